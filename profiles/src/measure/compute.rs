//! Measures the compute rates of the executor's CPU kernels on this machine.
//!
//! The caller provides the [`Kernels`], and this module decides what the kernels compute. The product of a matrix of
//! `rows` x `columns` and a vector has `2 * rows * columns` operations in every format. Products are measured in five
//! ways:
//!
//! - in cache: one matrix of [`CACHED_MATRIX_BYTES`] bytes, many times in one call, so that the time to wake threads
//!   does not count;
//! - streamed: matrices of [`STREAMED_MATRIX_BYTES`] bytes, one after another from a buffer as large as memory allows,
//!   as in decoding;
//! - streamed, with [`SMALL_BATCH_TOKENS`] vectors at once, as when sequences share a batch;
//! - streamed, with [`MEDIUM_BATCH_TOKENS`] vectors, for which kernels first unpack the weights;
//! - batched: [`BATCH_SIZE`] vectors at once, as in prefill.
//!
//! Batches of vectors are rounded in every call. Attention, activations and writing the KV cache are measured too.

use super::MeasurementError;
use super::mapping::WeightBuffer;
use super::sampling::{MeasurementOptions, Samples, measure_duration, measure_rate};
use crate::device::{LARGE_BATCH_TOKENS, MEDIUM_BATCH_TOKENS, SMALL_BATCH_TOKENS, TransferCost};
use crate::document_values::{FormatMap, Sourced};
use crate::format::Format;
use crate::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};

/// Size in bytes of a matrix that stays in the L2 cache of every core.
pub const CACHED_MATRIX_BYTES: usize = 256 << 10;

/// Size in bytes of a streamed matrix: about the size of one matrix in a layer of a large model.
pub const STREAMED_MATRIX_BYTES: usize = 16 << 20;

/// Number of products with a cached matrix in one call of the kernel.
const REPEATS: usize = 32;

/// Size in bytes of the matrix that is multiplied with a batch of vectors.
const BATCHED_BYTES: usize = 4 << 20;

pub const BATCH_SIZE: usize = LARGE_BATCH_TOKENS as usize;

/// Number of weights in a row of each matrix: a whole number of blocks in every format, and the width of a small model.
const COLUMNS: usize = 2048;

/// Maximum number of formats that are sampled in all rounds; more formats get fewer rounds. source: assumed
const FEW_FORMATS: usize = 3;

/// The CPU kernels whose rates are measured; the executor implements this trait.
pub trait Kernels {
    /// Returns a description of the kernels for the sources of the rates, such as `avx2 kernels, 2 threads`.
    fn description(&self) -> String;

    fn formats(&self) -> Vec<Format>;

    /// Multiplies a matrix by `tokens` vectors, `repeats` times in one call. `weights` has whole rows of `columns`
    /// weights. The values of the vectors are arbitrary.
    fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, repeats: usize);

    /// Computes attention in one layer for one token, with a KV cache in main memory. Returns the number of operations.
    fn attend(&mut self) -> Flops;

    /// Computes the norms, the activation function and the residual additions of one layer for `tokens` tokens. Returns
    /// the size of their hidden states and feed-forward activations in f32.
    fn process_activations(&mut self, tokens: usize) -> Bytes;

    /// Writes the keys and values of `tokens` tokens into the KV cache of one layer. Returns the number of bytes.
    fn write_kv_cache(&mut self, tokens: usize) -> Bytes;
}

/// The measured rates of the executor's CPU kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct ComputeRates {
    /// Speed of matrix-vector products with weights in cache.
    pub matvec: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix-vector products with weights streamed from memory.
    pub matvec_streamed: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with [`SMALL_BATCH_TOKENS`] vectors and weights streamed from memory.
    pub matmul_streamed: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with [`MEDIUM_BATCH_TOKENS`] vectors and weights streamed from memory.
    pub matmul_medium: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of matrix products with a batch of vectors.
    pub matmul: FormatMap<Sourced<FlopsPerSecond>>,
    /// Speed of attention over cached keys and values.
    pub attention_rate: Sourced<FlopsPerSecond>,
    /// Speed of norms, activation functions and residual additions.
    pub activation_bandwidth: Sourced<BytesPerSecond>,
    /// Cost of writing keys and values into the KV cache.
    pub kv_copy: TransferCost,
}

/// Measures the rates of `kernels` for those of `formats` that the kernels support, or for all supported formats if the
/// kernels support none of `formats`. Calls `progress` with the name of each step.
pub fn measure_compute_rates(
    kernels: &mut dyn Kernels,
    formats: &[Format],
    buffer: &WeightBuffer,
    options: &MeasurementOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<ComputeRates, MeasurementError> {
    let known = kernels.formats();
    let mut wanted: Vec<Format> = known.iter().copied().filter(|format| formats.contains(format)).collect();
    if wanted.is_empty() {
        wanted = known;
    }
    let mut measured: Vec<(Format, [Samples; 5])> =
        wanted.into_iter().map(|one| (one, Default::default())).collect();
    let (mut attention, mut activations) = (Samples::default(), Samples::default());
    // The samples are taken in rounds, so that a disturbance of the machine affects a few samples of each rate and
    // not all samples of one rate. With many formats there are fewer rounds.
    let max_rounds = options.sampling_rounds.max(1);
    for _ in 0..(max_rounds * FEW_FORMATS / measured.len().max(1)).clamp(max_rounds.min(2), max_rounds) {
        for (format, samples) in &mut measured {
            progress(&format!("kernels: {format}"));
            samples[0].add(product_rate(kernels, *format, buffer, options, CACHED_MATRIX_BYTES, 1, REPEATS));
            samples[1].add(measure_streamed_rate(kernels, *format, buffer, options, 1));
            for (kind, tokens) in [(3, SMALL_BATCH_TOKENS), (4, MEDIUM_BATCH_TOKENS)] {
                let tokens = tokens as usize;
                samples[kind].add(measure_streamed_rate(kernels, *format, buffer, options, tokens));
            }
            samples[2].add(product_rate(kernels, *format, buffer, options, BATCHED_BYTES, BATCH_SIZE, 1));
        }
        progress("kernels: attention");
        attention.add(measure_rate(options, || kernels.attend().0));
        let tokens = SMALL_BATCH_TOKENS as usize;
        activations.add(measure_rate(options, || kernels.process_activations(tokens).as_f64()));
    }
    let name = kernels.description();
    let table = |kind: usize, what: &dyn Fn(Format) -> String| {
        let row = |(format, samples): &(Format, [Samples; 5])| {
            let what = format!("{}, {name}", what(*format));
            Ok((*format, samples[kind].sourced_positive_median(FlopsPerSecond, &what)?))
        };
        measured.iter().map(row).collect::<Result<FormatMap<_>, MeasurementError>>()
    };
    let matvec = table(0, &|format| {
        format!(
            "{format} matrix times vector, {} in cache",
            Bytes(rows(format, CACHED_MATRIX_BYTES).1 as u64)
        )
    })?;
    let streamed = |format| format!("{format} matrix times vector, streamed through {}", buffer.size());
    let matvec_streamed = table(1, &streamed)?;
    let batched = |format, tokens| {
        format!("{format} matrix times {tokens} vectors, streamed through {}", buffer.size())
    };
    let matmul_streamed = table(3, &|format| batched(format, SMALL_BATCH_TOKENS))?;
    let matmul_medium = table(4, &|format| batched(format, MEDIUM_BATCH_TOKENS))?;
    let matmul = table(2, &|format| format!("{format} matrix times {BATCH_SIZE} vectors"))?;
    let what = format!("one token's attention in one layer with {name}");
    let attention = attention.sourced_positive_median(FlopsPerSecond, &what)?;
    let what =
        format!("norms, activation functions and residual additions of {SMALL_BATCH_TOKENS} tokens, {name}");
    let activation_bandwidth = activations.sourced_positive_median(BytesPerSecond, &what)?;
    let kv_copy = kv_copy(kernels, options)?;
    Ok(ComputeRates {
        matvec,
        matvec_streamed,
        matmul_streamed,
        matmul_medium,
        matmul,
        attention_rate: attention,
        activation_bandwidth,
        kv_copy,
    })
}

/// Number of rows of which matrices have a multiple, as those of models do. Packed weights need whole groups of rows.
const ROW_GROUP: usize = 16;

/// Returns the number of whole rows in `bytes` bytes of weights, [`ROW_GROUP`] or a multiple of it if there is room, and
/// the size of these rows in bytes.
fn rows(format: Format, bytes: usize) -> (usize, usize) {
    let row = format.row_bytes(COLUMNS as u64).map_or(COLUMNS * 4, |row| row.0 as usize);
    let rows = match (bytes / row).max(1) {
        few if few < ROW_GROUP => few,
        rows => rows / ROW_GROUP * ROW_GROUP,
    };
    (rows, rows * row)
}

/// Returns the number of operations in the product of a matrix of `rows` rows and `tokens` vectors.
fn work(rows: usize, tokens: usize) -> f64 {
    (2 * rows * COLUMNS * tokens) as f64
}

/// Measures the speed of products of a matrix of at most `max_bytes` bytes and `tokens` vectors, in FLOP/s.
fn product_rate(
    kernels: &mut dyn Kernels,
    format: Format,
    buffer: &WeightBuffer,
    options: &MeasurementOptions,
    max_bytes: usize,
    tokens: usize,
    repeats: usize,
) -> Samples {
    let (count, bytes) = rows(format, max_bytes.min(buffer.as_bytes().len()));
    measure_rate(options, || {
        kernels.multiply(format, COLUMNS, &buffer.as_bytes()[..bytes], tokens, repeats);
        work(count * repeats, tokens)
    })
}

/// Measures the speed of products with `tokens` vectors and weights streamed from the whole buffer, in FLOP/s.
pub fn measure_streamed_rate(
    kernels: &mut dyn Kernels,
    format: Format,
    buffer: &WeightBuffer,
    options: &MeasurementOptions,
    tokens: usize,
) -> Samples {
    let (count, bytes) = rows(format, STREAMED_MATRIX_BYTES.min(buffer.as_bytes().len()));
    let mut at = 0;
    measure_rate(options, || {
        if at + bytes > buffer.as_bytes().len() {
            at = 0;
        }
        kernels.multiply(format, COLUMNS, &buffer.as_bytes()[at..at + bytes], tokens, 1);
        // Every matrix begins at a page, so that rows are aligned for every format.
        at += bytes.next_multiple_of(4096);
        work(count, tokens)
    })
}

/// Measures the cost of writing keys and values into the KV cache. The bandwidth is that of a batch of tokens. The
/// latency is the time for a single token minus the time of its bytes at this bandwidth.
fn kv_copy(
    kernels: &mut dyn Kernels,
    options: &MeasurementOptions,
) -> Result<TransferCost, MeasurementError> {
    let name = kernels.description();
    let rates = measure_rate(options, || kernels.write_kv_cache(BATCH_SIZE).as_f64());
    let what = format!("writing the keys and values of {BATCH_SIZE} tokens, {name}");
    let bandwidth: Sourced<BytesPerSecond> = rates.sourced_median(BytesPerSecond, &what);
    let mut bytes = Bytes(0);
    let times = measure_duration(options, || bytes = kernels.write_kv_cache(1));
    let latency = times.sourced_median(
        |one| Seconds((one - (bytes / bandwidth.value).0).max(0.0)),
        &format!("writing one token's keys and values, minus their time at `bandwidth`, {name}"),
    );
    if bandwidth.value.0.is_finite() && bandwidth.value.0 > 0.0 && latency.value.0.is_finite() {
        Ok(TransferCost { latency, bandwidth })
    } else {
        Err(MeasurementError::Unusable { what: "writing keys and values".into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels that compute nothing and record the number of vectors of each product.
    struct Counting(Vec<usize>);

    impl Kernels for Counting {
        fn description(&self) -> String {
            "counting kernels".into()
        }
        fn formats(&self) -> Vec<Format> {
            vec![Format::F32, Format::Q4K]
        }
        fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, _: usize) {
            let row = format.row_bytes(columns as u64).unwrap().0 as usize;
            assert!(weights.len().is_multiple_of(row) && !weights.is_empty());
            assert!((weights.as_ptr() as usize).is_multiple_of(64));
            self.0.push(tokens);
            std::hint::black_box(weights.iter().step_by(64).map(|&byte| u64::from(byte)).sum::<u64>());
        }
        fn attend(&mut self) -> Flops {
            Flops(1000.0)
        }
        fn process_activations(&mut self, tokens: usize) -> Bytes {
            Bytes(tokens as u64 * 4096)
        }
        fn write_kv_cache(&mut self, tokens: usize) -> Bytes {
            Bytes(tokens as u64 * 4096)
        }
    }

    #[test]
    fn each_format_is_measured_five_ways() {
        let mut kernels = Counting(Vec::new());
        let buffer = WeightBuffer::new(Bytes::from_mib(2)).unwrap();
        let mut measure = |formats: &[Format]| {
            let options = MeasurementOptions::minimal();
            measure_compute_rates(&mut kernels, formats, &buffer, &options, &mut |_| ()).unwrap()
        };
        let (rates, only) = (measure(&[]), measure(&[Format::Q4K]));
        let streamed = [&rates.matvec_streamed, &rates.matmul_streamed, &rates.matmul_medium];
        for table in [&rates.matvec, &rates.matmul].into_iter().chain(streamed) {
            let formats: Vec<Format> = table.iter().map(|(format, _)| format).collect();
            assert_eq!(formats, [Format::F32, Format::Q4K]);
            assert!(table.iter().all(|(_, rate)| rate.value.0 > 0.0 && rate.source.contains("counting")));
        }
        assert!(kernels.0.contains(&(SMALL_BATCH_TOKENS as usize)) && kernels.0.contains(&BATCH_SIZE));
        assert_eq!(only.matvec.iter().count(), 1);
        let activations = &rates.activation_bandwidth;
        assert!(activations.value.0 > 0.0 && activations.source.contains("of 4 tokens, counting kernels"));
    }
}
