//! How long does a processor work on a layer when all its weights are at hand?
//!
//! Roofline, format by format: a matrix costs the longer of its arithmetic at the processor's rate for the
//! format and its bytes at the processor's read bandwidth. Decoding streams every weight once for one token;
//! where the rate was measured with weights streamed from memory, that rate holds both. A batch of tokens
//! reads the weights once and multiplies with each. Attention costs the longer of its arithmetic and reading
//! the keys and values of the positions so far. To that come the copy of the new keys and values and the fixed
//! costs of a layer and of a window, where the profile has them.
//!
//! The planner and the simulator both ask here, so that a plan's expectation and its simulation differ in what they
//! make of memory and links, never in the arithmetic.
//!
//! Not here: waiting for weights and sharing the cores, which is simulated.

use hearth_profiles::device::{Cpu, Gpu, nearest};
use hearth_profiles::model::{ModelProfile, TensorGroup};
use hearth_profiles::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Format, PerFormat, Seconds, Sourced};

use crate::schedule::Pass;

type Rates = PerFormat<Sourced<FlopsPerSecond>>;

/// One processor working on one model: what each of its steps takes with all weights at hand.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    model: &'a ModelProfile,
    /// Bytes of an element of the key-value cache.
    kv_element: Bytes,
    matvec: &'a Rates,
    streamed: Option<&'a Rates>,
    matmul: &'a Rates,
    bandwidth: BytesPerSecond,
    attention: Option<FlopsPerSecond>,
    kv_copy: &'a hearth_profiles::device::Transfer,
    layer_overhead: Seconds,
}

impl<'a> Work<'a> {
    /// The CPU of a device.
    pub fn on_cpu(cpu: &'a Cpu, model: &'a ModelProfile, kv_element: Bytes) -> Self {
        Self {
            model,
            kv_element,
            matvec: &cpu.matvec,
            streamed: Some(&cpu.matvec_streamed).filter(|rates| !rates.is_empty()),
            matmul: &cpu.matmul,
            bandwidth: cpu.read_bandwidth.value,
            attention: cpu.attention.as_ref().map(|rate| rate.value),
            kv_copy: &cpu.kv_copy,
            layer_overhead: cpu.layer_overhead.as_ref().map_or(Seconds(0.0), |cost| cost.value),
        }
    }

    /// The GPU of a device.
    pub fn on_gpu(gpu: &'a Gpu, model: &'a ModelProfile, kv_element: Bytes) -> Self {
        Self {
            model,
            kv_element,
            matvec: &gpu.matvec,
            streamed: None,
            matmul: &gpu.matmul,
            bandwidth: gpu.read_bandwidth.value,
            attention: None,
            kv_copy: &gpu.kv_copy,
            layer_overhead: Seconds(0.0),
        }
    }

    /// One layer for all tokens of a pass.
    pub fn layer(&self, layer: u32, pass: Pass) -> Seconds {
        let shape = &self.model.shape;
        let new = shape.kv_bytes_per_layer(pass.tokens, self.kv_element);
        self.product(&self.model.layers[layer as usize], pass.tokens)
            + self.attention(pass)
            + self.kv_copy.time(new)
            + self.layer_overhead
    }

    /// The output matrix for one position.
    pub fn output(&self) -> Seconds {
        self.outputs(1)
    }

    /// The output matrix for so many positions at once.
    pub fn outputs(&self, positions: u32) -> Seconds {
        if positions == 0 { Seconds(0.0) } else { self.product(&self.model.output, positions) }
    }

    /// Looking up the embedding rows of so many tokens.
    pub fn embed(&self, tokens: u32) -> Seconds {
        self.model.input_row_bytes() * u64::from(tokens) / self.bandwidth
    }

    /// Multiplying each token of a pass with the matrices of a group.
    pub fn product(&self, group: &TensorGroup, tokens: u32) -> Seconds {
        group
            .by_format()
            .map(|(format, share)| {
                let streamed = self.streamed.filter(|_| tokens == 1).and_then(|rates| nearest(rates, format));
                if let Some(rate) = streamed {
                    return share.flops / rate;
                }
                longer(
                    share.flops * f64::from(tokens) / self.rate(format, tokens),
                    share.bytes / self.bandwidth,
                )
            })
            .sum()
    }

    /// Summed over the tokens of a pass, each of which sees one position more than the one before it.
    fn attention(&self, pass: Pass) -> Seconds {
        let shape = &self.model.shape;
        let (first, tokens) = (f64::from(pass.first_position), f64::from(pass.tokens));
        let positions = tokens * first + tokens * (tokens + 1.0) / 2.0;
        let work = Flops(shape.attention_flops_per_layer(1).0 * positions);
        let rate = self.attention.unwrap_or_else(|| self.rate(Format::F16, pass.tokens));
        let seen = shape.kv_bytes_per_layer(pass.first_position + pass.tokens, self.kv_element);
        longer(work / rate, seen / self.bandwidth)
    }

    /// The arithmetic rate; a profile has at least one, or the run was refused.
    fn rate(&self, format: Format, tokens: u32) -> FlopsPerSecond {
        let batched = if tokens > 1 { nearest(self.matmul, format) } else { None };
        batched.or_else(|| nearest(self.matvec, format)).unwrap_or(FlopsPerSecond(f64::INFINITY))
    }
}

fn longer(one: Seconds, other: Seconds) -> Seconds {
    Seconds(one.0.max(other.0))
}
