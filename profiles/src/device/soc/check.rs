//! Validates the ranges and the consistency of the values of a SoC.

use super::{
    MatmulProfile, MeasuredMatmul, PartitionPolicy, Soc, SocNpu, SocOptions, SocStrategy, Synchronisation,
};
use crate::document::DocumentError;

/// Maximum number of tokens in a graph or a chunk, and maximum dimension of a tile or a matmul.
/// source: assumed, the longest context of a model
const MAX_GRAPH_TOKENS: u32 = 1 << 20;
/// Maximum number of graph sizes of an NPU. Splitting a prompt tries every combination of up to four of them.
const MAX_GRAPH_SIZES: usize = 16;
/// Maximum number of measured matmuls of a SoC; every partition search reads all of them.
/// source: assumed, more than a day of measuring
const MAX_SHAPES: usize = 20_000;
/// Maximum number of bits per weight, more than any weight format needs.
const MAX_BITS: f64 = 64.0;
/// Maximum `order_penalty` of an NPU, to detect wrong values. source: assumed
const MAX_PENALTY: f64 = 1e6;
/// Maximum of every time in a SoC profile, in seconds; a longer time means that a processor hangs. source: assumed
const MAX_SECONDS: f64 = 3600.0;

/// The key of an invalid value and what is wrong with it.
type Invalid = Option<(&'static str, String)>;

impl Soc {
    pub(in crate::device) fn validate(&self, device: &str) -> Result<(), DocumentError> {
        let found = self
            .rates()
            .or_else(|| self.times())
            .or_else(|| self.bandwidths())
            .or_else(|| self.sizes())
            .or_else(|| self.npu.as_ref().and_then(invalid_npu))
            .or_else(|| invalid_bits("gpu.weight_bits", self.gpu.bits_per_weight.value))
            .or_else(|| self.options_error(&self.default_options).map(|what| ("usual", what)));
        found.map_or(Ok(()), |(key, what)| {
            let what = format!("device `{device}`: `soc.{key}` {what}");
            Err(DocumentError::invalid_value(format!("soc.{key}"), what))
        })
    }

    /// Returns why this SoC cannot be used with these options, `None` if it can.
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

    fn rates(&self) -> Invalid {
        let npu = self.npu.as_ref().map(|npu| ("npu.matmul", npu.matmul.value.0));
        let rates = [
            ("gpu.matmul", self.gpu.matmul.value.0),
            ("bus.peak", self.memory_bandwidths.peak_bandwidth.value.0),
            ("bus.one", self.memory_bandwidths.single_processor.value.0),
            ("bus.together", self.memory_bandwidths.both_processors.value.0),
        ];
        let (key, _) = rates.into_iter().chain(npu).find(|(_, rate)| *rate <= 0.0)?;
        Some((key, "is zero, so a run would never end; measure it again".into()))
    }

    fn times(&self) -> Invalid {
        let times = [
            ("gpu.submission", self.gpu.submission.value),
            ("synchronisation.fast", self.sync_costs.fast_event.value),
            ("synchronisation.copy", self.sync_costs.buffer_copy.value),
            ("synchronisation.submission", self.sync_costs.submission.value),
            ("synchronisation.sleep", self.sync_costs.min_sleep.value),
            ("graphs.preparation", self.graphs.preparation_time.value),
            ("graphs.each_token", self.graphs.preparation_time_per_token.value),
        ];
        let (key, time) = times.into_iter().find(|(_, time)| time.0 > MAX_SECONDS)?;
        Some((key, format!("is {time}: it must be at most an hour")))
    }

    fn bandwidths(&self) -> Invalid {
        let bus = &self.memory_bandwidths;
        if bus.both_processors.value > bus.peak_bandwidth.value {
            return Some(("bus.together", "is more than `soc.bus.peak`, the maximum of the memory".into()));
        }
        let what = "is more than `soc.bus.together`: one processor cannot be faster than two together";
        (bus.single_processor.value > bus.both_processors.value).then(|| ("bus.one", what.into()))
    }

    fn sizes(&self) -> Invalid {
        let sizes = &self.graphs.graph_sizes.value;
        let what = if sizes.is_empty() || sizes.len() > MAX_GRAPH_SIZES {
            format!("has {} sizes: give 1 to {MAX_GRAPH_SIZES}", sizes.len())
        } else if !sizes.iter().all(|size| (1..=MAX_GRAPH_TOKENS).contains(size)) {
            format!("has a size outside 1 to {MAX_GRAPH_TOKENS} tokens")
        } else if !sizes.is_sorted_by(|one, next| one < next) {
            "is not in ascending order".to_owned()
        } else {
            return None;
        };
        Some(("graphs.sizes", what))
    }
}

/// Returns the error for an option that has no effect with this strategy.
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

fn invalid_npu(npu: &SocNpu) -> Invalid {
    let tile = npu.tile_size.value;
    if !(1..=MAX_GRAPH_TOKENS).contains(&tile) {
        let what = format!("is {tile}: the array must have 1 to {MAX_GRAPH_TOKENS} rows");
        return Some(("npu.tile", what));
    }
    let penalty = npu.order_penalty.value;
    if !(0.0..=MAX_PENALTY).contains(&penalty) {
        return Some(("npu.order_penalty", format!("is {penalty}: give 0 to {MAX_PENALTY}")));
    }
    invalid_bits("npu.weight_bits", npu.bits_per_weight.value)
        .or_else(|| npu.matmul_profile.as_ref().and_then(invalid_profile))
}

fn invalid_bits(key: &'static str, bits: f64) -> Invalid {
    let wrong = !(bits > 0.0 && bits <= MAX_BITS);
    wrong.then(|| (key, format!("is {bits}: a weight must have more than 0 and at most {MAX_BITS} bits")))
}

fn invalid_profile(profiled: &MatmulProfile) -> Invalid {
    let shapes = &profiled.matmuls;
    let in_range = |side: u32| (1..=MAX_GRAPH_TOKENS).contains(&side);
    let is_wrong = |shape: &MeasuredMatmul| {
        let dimensions = [shape.outputs, shape.inputs, shape.tokens];
        !dimensions.into_iter().all(in_range) || shape.time.0 <= 0.0 || shape.time.0 > MAX_SECONDS
    };
    let what = if shapes.is_empty() || shapes.len() > MAX_SHAPES {
        format!("has {} matmuls: give 1 to {MAX_SHAPES}", shapes.len())
    } else {
        let index = shapes.iter().position(is_wrong)?;
        let MeasuredMatmul { outputs, inputs, tokens, time } = shapes[index];
        if [outputs, inputs, tokens].into_iter().all(in_range) {
            format!("[{index}] has time {time}: it must be above zero and at most an hour")
        } else {
            format!(
                "[{index}] has dimensions {outputs}, {inputs} and {tokens}: each must be 1 to \
                 {MAX_GRAPH_TOKENS}"
            )
        }
    };
    Some(("npu.profiled.shapes", what))
}
