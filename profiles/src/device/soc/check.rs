//! Validation of a SoC: checks that its values are in range and do not contradict each other.

use super::{
    MatmulProfile, MeasuredMatmul, PartitionPolicy, Soc, SocNpu, SocOptions, SocStrategy, Synchronisation,
};
use crate::document::DocumentError;

/// Maximum number of tokens in a graph or a chunk, and maximum dimension of a tile or a matmul.
/// source: assumed, the longest context of a model
const MAX_GRAPH_TOKENS: u32 = 1 << 20;
/// Maximum number of graph sizes of an NPU. Splitting a prompt tries all combinations of up to four graph sizes.
const MAX_GRAPH_SIZES: usize = 16;
/// Maximum number of measured matmuls of a SoC; every search for a partition reads all measured matmuls.
/// source: assumed, more than a day of measuring
const MAX_SHAPES: usize = 20_000;
/// Maximum number of bits per weight in a SoC profile, more than any weight format has.
const MAX_BITS: f64 = 64.0;
/// Maximum `order_penalty` of an NPU, to detect wrong values. source: assumed
const MAX_PENALTY: f64 = 1e6;
/// Maximum of every time in a SoC profile, in seconds; a longer time means that a processor hangs. source: assumed
const MAX_SECONDS: f64 = 3600.0;

/// The key of an invalid value and the error message.
type Invalid = (&'static str, String);

/// Returns an error with a key and a formatted message from the current function if the condition is false.
macro_rules! ensure {
    ($key:expr, $condition:expr, $($message:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err(($key, format!($($message)+)));
        }
    };
}

impl Soc {
    pub(in crate::device) fn validate(&self, device: &str) -> Result<(), DocumentError> {
        self.check().map_err(|(key, what)| {
            let what = format!("device `{device}`: `soc.{key}` {what}");
            DocumentError::invalid_value(format!("soc.{key}"), what)
        })
    }

    /// Returns the reason why the options are invalid for this SoC, or `None` if they are valid.
    pub fn options_error(&self, options: &SocOptions) -> Option<String> {
        if self.npu.is_none() && !options.strategy.runs_without_npu() {
            return Some(format!(
                "has strategy `{}`, but the SoC has no NPU that computes in FP16: choose `gpu-only` or `best`",
                options.strategy.name()
            ));
        }
        unused_option(options).or_else(|| {
            let chunk = options.chunk_tokens.filter(|chunk| !(1..=MAX_GRAPH_TOKENS).contains(chunk))?;
            Some(format!("has a chunk of {chunk} tokens: choose 1 to {MAX_GRAPH_TOKENS}"))
        })
    }

    fn check(&self) -> Result<(), Invalid> {
        let (gpu, bus, costs, graphs) = (&self.gpu, &self.memory_bandwidths, &self.sync_costs, &self.graphs);
        let npu_rate = self.npu.as_ref().map(|npu| ("npu.matmul", npu.matmul.value.0));
        let rates = [
            ("gpu.matmul", gpu.matmul.value.0),
            ("bus.peak", bus.peak_bandwidth.value.0),
            ("bus.one", bus.single_processor.value.0),
            ("bus.together", bus.both_processors.value.0),
        ];
        for (key, rate) in rates.into_iter().chain(npu_rate) {
            ensure!(key, rate > 0.0, "is zero, so a run would never end; measure it again");
        }
        for (key, time) in [
            ("gpu.submission", gpu.submission.value),
            ("synchronisation.fast", costs.fast_event.value),
            ("synchronisation.copy", costs.buffer_copy.value),
            ("synchronisation.submission", costs.submission.value),
            ("synchronisation.sleep", costs.min_sleep.value),
            ("graphs.preparation", graphs.preparation_time.value),
            ("graphs.each_token", graphs.preparation_time_per_token.value),
        ] {
            ensure!(key, time.0 <= MAX_SECONDS, "is {time}: it must be at most an hour");
        }
        let (peak, one, both) =
            (bus.peak_bandwidth.value, bus.single_processor.value, bus.both_processors.value);
        ensure!("bus.together", both <= peak, "is more than `soc.bus.peak`, the maximum of the memory");
        let what = "is more than `soc.bus.together`: one processor cannot be faster than two together";
        ensure!("bus.one", one <= both, "{what}");
        let (key, sizes) = ("graphs.sizes", &graphs.graph_sizes.value);
        let count = sizes.len();
        let in_range = (1..=MAX_GRAPH_SIZES).contains(&count);
        ensure!(key, in_range, "has {count} sizes: give 1 to {MAX_GRAPH_SIZES}");
        let in_range = sizes.iter().all(|size| (1..=MAX_GRAPH_TOKENS).contains(size));
        ensure!(key, in_range, "has a size outside 1 to {MAX_GRAPH_TOKENS} tokens");
        ensure!(key, sizes.is_sorted_by(|one, next| one < next), "is not in ascending order");
        self.npu.as_ref().map_or(Ok(()), check_npu)?;
        check_bits("gpu.weight_bits", gpu.bits_per_weight.value)?;
        self.options_error(&self.default_options).map_or(Ok(()), |what| Err(("usual", what)))
    }
}

/// Returns the error message for an option that has no effect with the strategy in `options`.
fn unused_option(options: &SocOptions) -> Option<String> {
    let strategy = options.strategy;
    if options.chunk_tokens.is_some() && strategy != SocStrategy::Chunked {
        let name = strategy.name();
        return Some(format!("has `chunk`, which `{name}` does not use: remove it, or choose `chunked`"));
    }
    // A single processor needs no synchronisation.
    let waits = options.synchronisation != Synchronisation::default()
        || options.partition_policy != PartitionPolicy::default();
    (strategy == SocStrategy::GpuOnly && waits).then(|| {
        "has `synchronisation` or `partitions`, which `gpu-only` does not use: remove them".to_owned()
    })
}

fn check_npu(npu: &SocNpu) -> Result<(), Invalid> {
    let (tile, penalty) = (npu.tile_size.value, npu.order_penalty.value);
    let in_range = (1..=MAX_GRAPH_TOKENS).contains(&tile);
    ensure!("npu.tile", in_range, "is {tile}: the array must have 1 to {MAX_GRAPH_TOKENS} rows");
    let in_range = (0.0..=MAX_PENALTY).contains(&penalty);
    ensure!("npu.order_penalty", in_range, "is {penalty}: give 0 to {MAX_PENALTY}");
    check_bits("npu.weight_bits", npu.bits_per_weight.value)?;
    npu.matmul_profile.as_ref().map_or(Ok(()), check_profile)
}

fn check_bits(key: &'static str, bits: f64) -> Result<(), Invalid> {
    let in_range = bits > 0.0 && bits <= MAX_BITS;
    ensure!(key, in_range, "is {bits}: a weight must have more than 0 and at most {MAX_BITS} bits");
    Ok(())
}

fn check_profile(profile: &MatmulProfile) -> Result<(), Invalid> {
    let (key, count) = ("npu.profiled.shapes", profile.matmuls.len());
    ensure!(key, (1..=MAX_SHAPES).contains(&count), "has {count} matmuls: give 1 to {MAX_SHAPES}");
    for (index, &MeasuredMatmul { outputs, inputs, tokens, time }) in profile.matmuls.iter().enumerate() {
        let in_range = [outputs, inputs, tokens].iter().all(|side| (1..=MAX_GRAPH_TOKENS).contains(side));
        let sides = format!("{outputs}, {inputs} and {tokens}");
        ensure!(key, in_range, "[{index}] has dimensions {sides}: each must be 1 to {MAX_GRAPH_TOKENS}");
        let in_range = time.0 > 0.0 && time.0 <= MAX_SECONDS;
        ensure!(key, in_range, "[{index}] has time {time}: it must be above zero and at most an hour");
    }
    Ok(())
}
