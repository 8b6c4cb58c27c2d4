//! Validation of a SoC's numbers, beyond their types.

use super::{Profiled, Soc, SocNpu, SocOptions, Strategy, Synchronisation, Upkeep};
use crate::document::DocumentError;

/// The largest graph, tile and chunk. source: assumed, the longest context of a model
const MAX_GRAPH_TOKENS: u32 = 1 << 20;
/// The most graphs: choosing among cuts of them tries every set of four.
const MAX_GRAPH_SIZES: usize = 16;
/// The most profiled products, all of which are searched for every partition. source: assumed, more than a day of
/// measuring
const MAX_SHAPES: usize = 20_000;
/// More bits than any weight format has.
const MAX_BITS: f64 = 64.0;
/// The largest penalty of a plausible processor. source: assumed
const MAX_PENALTY: f64 = 1e6;
/// The longest time; a longer wait means a hung processor. source: assumed
const MAX_SECONDS: f64 = 3600.0;

type Wrong = Option<(String, String)>;

impl Soc {
    /// Checks the values beyond their types.
    pub(in crate::device) fn validate(&self, device: &str) -> Result<(), DocumentError> {
        let found = self
            .rates()
            .or_else(|| self.times())
            .or_else(|| self.bandwidths())
            .or_else(|| self.sizes())
            .or_else(|| self.npu.as_ref().and_then(wrong_npu))
            .or_else(|| wrong_bits("gpu.weight_bits", self.gpu.weight_bits.value))
            .or_else(|| self.wrong_options(&self.usual).map(|what| ("usual".to_owned(), what)));
        found.map_or(Ok(()), |(key, what)| {
            let what = format!("device `{device}`: `soc.{key}` {what}");
            Err(DocumentError::invalid_at(format!("soc.{key}"), what))
        })
    }

    /// Returns why this SoC cannot be used with these options, if it cannot.
    pub fn wrong_options(&self, options: &SocOptions) -> Option<String> {
        if self.npu.is_none() && !options.strategy.needs_no_npu() {
            return Some(format!(
                "asks for `{}`, and the SoC has no NPU that computes in FP16: choose `gpu-only` or `best`",
                options.strategy.name()
            ));
        }
        useless(options).or_else(|| {
            let chunk = options.chunk.filter(|chunk| !(1..=MAX_GRAPH_TOKENS).contains(chunk))?;
            Some(format!("has a chunk of {chunk} tokens: choose 1 to {MAX_GRAPH_TOKENS}"))
        })
    }

    fn rates(&self) -> Wrong {
        let npu = self.npu.as_ref().map(|npu| ("npu.matmul", npu.matmul.value.0));
        let rates = [
            ("gpu.matmul", self.gpu.matmul.value.0),
            ("bus.peak", self.bus.peak.value.0),
            ("bus.one", self.bus.one.value.0),
            ("bus.together", self.bus.together.value.0),
        ];
        let zero = rates.into_iter().chain(npu).find(|(_, rate)| *rate <= 0.0);
        zero.map(|(key, _)| {
            (key.to_owned(), "is zero, so nothing would ever finish; measure it again".into())
        })
    }

    fn times(&self) -> Wrong {
        let times = [
            ("gpu.submission", self.gpu.submission.value),
            ("synchronisation.fast", self.synchronisation.fast.value),
            ("synchronisation.copy", self.synchronisation.copy.value),
            ("synchronisation.submission", self.synchronisation.submission.value),
            ("synchronisation.sleep", self.synchronisation.sleep.value),
            ("graphs.preparation", self.graphs.preparation.value),
            ("graphs.each_token", self.graphs.each_token.value),
        ];
        let long = times.into_iter().find(|(_, time)| time.0 > MAX_SECONDS);
        long.map(|(key, time)| (key.to_owned(), format!("is {time}: choose at most an hour")))
    }

    fn bandwidths(&self) -> Wrong {
        let (one, together, peak) = (self.bus.one.value, self.bus.together.value, self.bus.peak.value);
        let more = |key: &str, what: &str| Some((format!("bus.{key}"), what.to_owned()));
        if together > peak {
            return more("together", "is more than `soc.bus.peak`; the memory cannot give it");
        }
        if one > together {
            return more("one", "is more than `soc.bus.together`: one processor gets no more than two");
        }
        None
    }

    fn sizes(&self) -> Wrong {
        let sizes = &self.graphs.sizes.value;
        let say = |what: String| Some(("graphs.sizes".to_owned(), what));
        if sizes.is_empty() || sizes.len() > MAX_GRAPH_SIZES {
            return say(format!("has {} sizes: give 1 to {MAX_GRAPH_SIZES}", sizes.len()));
        }
        if !sizes.iter().all(|size| (1..=MAX_GRAPH_TOKENS).contains(size)) {
            return say(format!("has a size that is not 1 to {MAX_GRAPH_TOKENS} tokens"));
        }
        if !sizes.windows(2).all(|pair| pair[0] < pair[1]) {
            return say("is not in ascending order".to_owned());
        }
        None
    }
}

/// Returns the error for a key that has no effect with this strategy.
fn useless(options: &SocOptions) -> Option<String> {
    let strategy = options.strategy;
    if options.chunk.is_some() && strategy != Strategy::Chunked {
        return Some(format!(
            "gives `chunk`, which `{}` does not use: leave it out, or choose `chunked`",
            strategy.name()
        ));
    }
    // A single processor needs no synchronisation.
    let waits =
        options.synchronisation != Synchronisation::default() || options.partitions != Upkeep::default();
    (strategy == Strategy::GpuOnly && waits).then(|| {
        "gives `synchronisation` or `partitions`, which `gpu-only` does not use: leave them out".to_owned()
    })
}

fn wrong_npu(npu: &SocNpu) -> Wrong {
    let tile = npu.tile.value;
    if !(1..=MAX_GRAPH_TOKENS).contains(&tile) {
        return Some(("npu.tile".into(), format!("is {tile}: the array has 1 to {MAX_GRAPH_TOKENS} rows")));
    }
    let penalty = npu.order_penalty.value;
    if !(0.0..=MAX_PENALTY).contains(&penalty) {
        return Some(("npu.order_penalty".into(), format!("is {penalty}: give 0 to {MAX_PENALTY}")));
    }
    wrong_bits("npu.weight_bits", npu.weight_bits.value)
        .or_else(|| npu.profiled.as_ref().and_then(wrong_profile))
}

fn wrong_bits(key: &str, bits: f64) -> Wrong {
    let wrong = !(bits > 0.0 && bits <= MAX_BITS);
    wrong
        .then(|| (key.to_owned(), format!("is {bits}: a weight has more than 0 and at most {MAX_BITS} bits")))
}

fn wrong_profile(profiled: &Profiled) -> Wrong {
    let say = |what: String| Some(("npu.profiled.shapes".to_owned(), what));
    let shapes = &profiled.shapes;
    if shapes.is_empty() || shapes.len() > MAX_SHAPES {
        return say(format!("has {} products: give 1 to {MAX_SHAPES}", shapes.len()));
    }
    let plain = |side: u32| (1..=MAX_GRAPH_TOKENS).contains(&side);
    let wrong = shapes.iter().position(|shape| {
        let sides = [shape.outputs, shape.inputs, shape.tokens];
        !sides.into_iter().all(plain) || shape.time.0 <= 0.0 || shape.time.0 > MAX_SECONDS
    });
    wrong.and_then(|at| {
        say(format!(
            "[{at}]: sides are 1 to {MAX_GRAPH_TOKENS}, and a time is above zero and at most an hour"
        ))
    })
}
