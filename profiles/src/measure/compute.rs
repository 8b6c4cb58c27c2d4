//! Compute rates of the executor's kernels on this machine.
//!
//! The caller provides the [`Kernels`]; this module decides what they compute. A product of a matrix of `rows` x
//! `columns` with one vector is 2 rows columns operations, whatever the format.
//!
//! - in cache: a matrix of [`CACHED`] bytes, many times in one call, so that waking threads does not count;
//! - streamed: matrices of [`STREAMED_BYTES`] bytes one after another through a buffer as large as memory allows, as in decoding;
//! - batched: [`BATCH`] vectors at once, as in prefill.

use super::MeasureError;
use super::mapping::Buffer;
use super::sampling::{Effort, Samples, duration, rate};
use crate::device::Transfer;
use crate::format::Format;
use crate::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};
use crate::values::{PerFormat, Sourced};

/// Bytes of a matrix that stays in the second-level cache of every core.
pub const CACHED: usize = 256 << 10;

/// Bytes of a streamed matrix: about one of a large model's layer.
pub const STREAMED_BYTES: usize = 16 << 20;

/// Bytes of the matrix of a batch.
const BATCHED: usize = 4 << 20;

pub const BATCH: usize = 128;

/// Weights in a row: whole blocks of every format, and a usual width.
const COLUMNS: usize = 2048;

/// The number of formats up to which every round measures all of them. source: assumed
const FEW_FORMATS: usize = 3;

/// Products with a cached matrix in one call.
const REPEATS: usize = 32;

pub trait Kernels {
    /// Description for the sources: `avx2 kernels, 2 threads`.
    fn name(&self) -> String;

    /// The formats that they can multiply.
    fn formats(&self) -> Vec<Format>;

    /// Multiplies a matrix with `tokens` vectors, `repeats` times in one call. `weights` are whole rows of `columns`
    /// weights; the vectors are arbitrary.
    fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, repeats: usize);

    /// Computes one layer's attention of one token over a cache of a usual length that is in no near cache. Returns the
    /// work.
    fn attend(&mut self) -> Flops;

    /// Writes the keys and values of `tokens` tokens into one layer's cache. Returns the bytes.
    fn write_cache(&mut self, tokens: usize) -> Bytes;
}

#[derive(Debug, Clone, PartialEq)]
pub struct ComputeRates {
    /// Matrix times vector, weights in cache.
    pub matvec: PerFormat<Sourced<FlopsPerSecond>>,
    /// Matrix times vector, weights streamed from memory.
    pub matvec_streamed: PerFormat<Sourced<FlopsPerSecond>>,
    /// Matrix times a batch of vectors.
    pub matmul: PerFormat<Sourced<FlopsPerSecond>>,
    /// Attention over cached keys and values.
    pub attention: Sourced<FlopsPerSecond>,
    /// Writing a token's keys and values.
    pub kv_copy: Transfer,
}

/// Measures the rates of `kernels` for `formats`, or for all their formats if none is given.
pub fn compute(
    kernels: &mut dyn Kernels,
    formats: &[Format],
    buffer: &Buffer,
    effort: &Effort,
    progress: &mut dyn FnMut(&str),
) -> Result<ComputeRates, MeasureError> {
    let known = kernels.formats();
    let mut wanted: Vec<Format> = known.iter().copied().filter(|format| formats.contains(format)).collect();
    if wanted.is_empty() {
        wanted = known;
    }
    let mut measured: Vec<(Format, [Samples; 3])> =
        wanted.into_iter().map(|one| (one, Default::default())).collect();
    let mut attention = Samples::default();
    // In rounds: a disturbance of the machine then affects some samples of each number, and not all of one. Many formats take
    // fewer rounds.
    let most = effort.rounds.max(1);
    for _ in 0..(most * FEW_FORMATS / measured.len().max(1)).clamp(most.min(2), most) {
        for (format, samples) in &mut measured {
            progress(&format!("kernels: {format}"));
            samples[0].add(cached(kernels, *format, buffer, effort));
            samples[1].add(streamed_matvec(kernels, *format, buffer, effort));
            samples[2].add(batched(kernels, *format, buffer, effort));
        }
        progress("kernels: attention");
        attention.add(rate(effort, || kernels.attend().0));
    }
    let name = kernels.name();
    let table = |kind: usize, what: &dyn Fn(Format) -> String| {
        let row = |(format, samples): &(Format, [Samples; 3])| {
            Ok((*format, samples[kind].usable(FlopsPerSecond, &format!("{}, {name}", what(*format)))?))
        };
        measured.iter().map(row).collect::<Result<PerFormat<_>, MeasureError>>()
    };
    let matvec = table(0, &|format| {
        format!("{format} matrix times vector, {} in cache", Bytes(rows(format, CACHED).1 as u64))
    })?;
    let streamed = |format| format!("{format} matrix times vector, streamed through {}", buffer.size());
    let matvec_streamed = table(1, &streamed)?;
    let matmul = table(2, &|format| format!("{format} matrix times {BATCH} vectors"))?;
    let attention =
        attention.usable(FlopsPerSecond, &format!("one token's attention in one layer with {name}"))?;
    let kv_copy = kv_copy(kernels, effort)?;
    Ok(ComputeRates { matvec, matvec_streamed, matmul, attention, kv_copy })
}

/// Whole rows in `bytes` of weights, at least one, and their bytes.
fn rows(format: Format, bytes: usize) -> (usize, usize) {
    let row = format.row_bytes(COLUMNS as u64).map_or(COLUMNS * 4, |row| row.0 as usize);
    let rows = (bytes / row).max(1);
    (rows, rows * row)
}

fn work(rows: usize, tokens: usize) -> f64 {
    (2 * rows * COLUMNS * tokens) as f64
}

fn cached(kernels: &mut dyn Kernels, format: Format, buffer: &Buffer, effort: &Effort) -> Samples {
    let (count, bytes) = rows(format, CACHED);
    let weights = &buffer.bytes()[..bytes];
    rate(effort, || {
        kernels.multiply(format, COLUMNS, weights, 1, REPEATS);
        work(count * REPEATS, 1)
    })
}

/// Measures matrix-vector products over the whole buffer, in operations per second.
pub fn streamed_matvec(
    kernels: &mut dyn Kernels,
    format: Format,
    buffer: &Buffer,
    effort: &Effort,
) -> Samples {
    let (count, bytes) = rows(format, STREAMED_BYTES.min(buffer.bytes().len()));
    let mut at = 0;
    rate(effort, || {
        if at + bytes > buffer.bytes().len() {
            at = 0;
        }
        kernels.multiply(format, COLUMNS, &buffer.bytes()[at..at + bytes], 1, 1);
        // Page by page, so that rows are aligned for every format.
        at += bytes.next_multiple_of(4096);
        work(count, 1)
    })
}

fn batched(kernels: &mut dyn Kernels, format: Format, buffer: &Buffer, effort: &Effort) -> Samples {
    let (count, bytes) = rows(format, BATCHED.min(buffer.bytes().len()));
    rate(effort, || {
        kernels.multiply(format, COLUMNS, &buffer.bytes()[..bytes], BATCH, 1);
        work(count, BATCH)
    })
}

/// A batch gives the rate; the excess time of a single token is the latency.
fn kv_copy(kernels: &mut dyn Kernels, effort: &Effort) -> Result<Transfer, MeasureError> {
    let name = kernels.name();
    let rates = rate(effort, || kernels.write_cache(BATCH).as_f64());
    let what = format!("writing the keys and values of {BATCH} tokens, {name}");
    let bandwidth: Sourced<BytesPerSecond> = rates.sourced(BytesPerSecond, &what);
    let mut bytes = Bytes(0);
    let times = duration(effort, || bytes = kernels.write_cache(1));
    let latency = times.sourced(
        |one| Seconds((one - (bytes / bandwidth.value).0).max(0.0)),
        &format!("writing one token's keys and values, less their time at `bandwidth`, {name}"),
    );
    if bandwidth.value.0.is_finite() && bandwidth.value.0 > 0.0 && latency.value.0.is_finite() {
        Ok(Transfer { latency, bandwidth })
    } else {
        Err(MeasureError::Unusable { what: "writing keys and values".into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels that count instead of computing.
    #[derive(Default)]
    struct Counting {
        calls: Vec<(Format, usize, usize, usize)>,
    }

    impl Kernels for Counting {
        fn name(&self) -> String {
            "counting kernels".into()
        }
        fn formats(&self) -> Vec<Format> {
            vec![Format::F32, Format::Q4K]
        }
        fn multiply(&mut self, format: Format, columns: usize, weights: &[u8], tokens: usize, _: usize) {
            let row = format.row_bytes(columns as u64).unwrap().0 as usize;
            assert!(weights.len().is_multiple_of(row) && !weights.is_empty());
            assert!((weights.as_ptr() as usize).is_multiple_of(64));
            self.calls.push((format, columns, weights.len(), tokens));
            std::hint::black_box(weights.iter().step_by(64).map(|&byte| u64::from(byte)).sum::<u64>());
        }
        fn attend(&mut self) -> Flops {
            Flops(1000.0)
        }
        fn write_cache(&mut self, tokens: usize) -> Bytes {
            Bytes(tokens as u64 * 4096)
        }
    }

    #[test]
    fn each_format_is_measured_three_ways() {
        let mut kernels = Counting::default();
        let buffer = Buffer::new(Bytes::mib(2)).unwrap();
        let rates = compute(&mut kernels, &[], &buffer, &Effort::token(), &mut |_| ()).unwrap();
        for table in [&rates.matvec, &rates.matvec_streamed, &rates.matmul] {
            assert_eq!(
                table.iter().map(|(format, _)| format).collect::<Vec<_>>(),
                [Format::F32, Format::Q4K]
            );
            assert!(table.iter().all(|(_, rate)| rate.value.0 > 0.0 && rate.source.contains("counting")));
        }
        assert!(kernels.calls.iter().any(|call| call.3 == BATCH));
        let only = compute(&mut kernels, &[Format::Q4K], &buffer, &Effort::token(), &mut |_| ()).unwrap();
        assert_eq!(only.matvec.iter().count(), 1);
    }
}
