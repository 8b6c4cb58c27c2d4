//! Compute cost: the time that a processor needs for a layer whose weights are in memory.
//!
//! There is a roofline model for each weight format: a matmul takes the longer of its arithmetic at the processor's
//! rate for the format and the time to read the weights at the processor's read bandwidth. A batch of tokens shares one
//! read of the weights; for one token, a rate that was measured with weights streamed from memory covers both terms. A
//! small batch, which kernels compute like single tokens, takes the time of one token and an equal time for each further
//! token, if the profile has both rates. For a larger one, kernels may first unpack the weights, which takes the same time
//! for any number of tokens: its time is on a line through two measured sizes. Norms and activation functions take a time
//! for each token, if the profile has their rate.
//! Attention takes the longer of its arithmetic and the time to read the keys and values of all positions so far.
//!
//! The operating system also spends CPU time on each page that it adds to the page cache or evicts. This bounds the
//! rate at which one thread can stream weights, even from a fast disk ([`stream_rate`]).
//!
//! Not here: waiting for weights and contention for the cores (`hearth_sim`).

use hearth_profiles::device::{
    Cpu, DeviceProfile, Disk, Gpu, LARGE_BATCH_TOKENS, MEDIUM_BATCH_TOKENS, SMALL_BATCH_TOKENS, TransferCost,
    nearest_format_rate,
};
use hearth_profiles::model::{FormatTotals, ModelProfile, TensorGroup, TokenMixer};
use hearth_profiles::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Format, FormatMap, Seconds, Sourced};

use crate::cluster::Cluster;
use crate::soc::SocLatencyModel;
use hearth_schema::pass::Pass;
use hearth_schema::plan::{Plan, PlannedDevice};

/// CPU time of the operating system to read this many bytes ahead: to allocate and charge pages and to queue reads.
/// source: measured on Linux 6.18, 28 ms for 200 MiB of `WILLNEED` calls
pub const PAGE_INSERT_COST: (Seconds, Bytes) = (Seconds(0.028), Bytes::from_mib(200));

/// CPU time of the operating system to unmap and free this many bytes (`MADV_DONTNEED` and `POSIX_FADV_DONTNEED`).
/// source: measured on Linux 6.18, 0.10 ms for 1 MiB
pub const PAGE_DISCARD_COST: (Seconds, Bytes) = (Seconds(0.04), Bytes::from_mib(400));

/// CPU time of the operating system to scan this many bytes for pages to evict.
/// source: measured on Linux 6.18: with 200 MiB to age and 200 MiB to evict, the calls for 200 MiB took 60 to 70 ms
/// instead of 28 ms
pub const PAGE_SCAN_COST: (Seconds, Bytes) = (Seconds(0.035), Bytes::from_mib(400));

/// Returns the rate at which one thread can add pages to the page cache and evict other pages, if the disk is not the
/// bottleneck: the rate in the disk's profile, or a default from [`PAGE_INSERT_COST`] and [`PAGE_DISCARD_COST`].
pub fn page_replacement_rate(disk: &Disk) -> BytesPerSecond {
    let default = 1.0 / (seconds_per_byte(PAGE_INSERT_COST) + seconds_per_byte(PAGE_DISCARD_COST));
    disk.page_cache_throughput.as_ref().map_or(BytesPerSecond(default), |rate| rate.value)
}

/// Returns the rate at which a thread reads ahead while the operating system evicts pages: the read-ahead rate of the
/// disk, or a lower rate if the CPU time to insert, scan, unmap and free pages is the bottleneck.
pub fn os_read_ahead_rate(disk: &Disk) -> BytesPerSecond {
    let evicting = 1.0 / (1.0 / page_replacement_rate(disk).0 + seconds_per_byte(PAGE_SCAN_COST));
    BytesPerSecond(disk.read_ahead_rate().0.min(evicting))
}

fn seconds_per_byte((time, bytes): (Seconds, Bytes)) -> f64 {
    time.0 / bytes.as_f64()
}

/// Returns the rate at which a device streams weights from disk: the disk's read-ahead rate or
/// [`page_replacement_rate`], whichever is lower.
pub fn stream_rate(disk: &Disk) -> BytesPerSecond {
    BytesPerSecond(disk.read_ahead_rate().0.min(page_replacement_rate(disk).0))
}

/// Number of tokens from which on kernels compute a batch in panels, whose speed is `matmul` in a profile.
/// source: `hearth_kernels::panel`, measured there. On ARM it is 12; batches of 8 to 11 tokens are rare and their speed
/// differs little.
const MIN_PANEL_TOKENS: u32 = 8;

type Rates = FormatMap<Sourced<FlopsPerSecond>>;

#[derive(Debug, Clone)]
pub struct ComputeCost<'a> {
    model: &'a ModelProfile,
    /// Bytes per element of the KV cache.
    kv_format: Format,
    matvec: &'a Rates,
    streamed: Option<&'a Rates>,
    /// Rates of [`SMALL_BATCH_TOKENS`] tokens with weights streamed from memory.
    small_batch: Option<&'a Rates>,
    /// Rates of [`MEDIUM_BATCH_TOKENS`] tokens with weights streamed from memory.
    medium_batch: Option<&'a Rates>,
    matmul: &'a Rates,
    bandwidth: BytesPerSecond,
    attention: Option<FlopsPerSecond>,
    activation_bandwidth: Option<BytesPerSecond>,
    kv_copy: &'a TransferCost,
    layer_overhead: Seconds,
    /// Whether the passes of a batch share one read of the weights. On a GPU, they follow each other.
    shares_reads: bool,
    /// The latency model of the SoC if a SoC computes layers and output matrix; `None` for a CPU or a dedicated GPU.
    soc_model: Option<SocLatencyModel<'a>>,
}

impl<'a> ComputeCost<'a> {
    /// Creates the cost of a device with weights in main memory: of its SoC, or of its CPU if the profile
    /// has no SoC or the layers of the model differ, which the latency model of a SoC does not know.
    pub fn for_main_memory(device: &'a DeviceProfile, model: &'a ModelProfile, kv_format: Format) -> Self {
        let soc = device.soc.as_ref().filter(|_| model.shape.has_equal_layers());
        let soc_model = soc.map(|soc| SocLatencyModel::new(soc, model, kv_format));
        Self { soc_model, ..Self::for_cpu(&device.cpu, model, kv_format) }
    }

    pub fn for_cpu(cpu: &'a Cpu, model: &'a ModelProfile, kv_format: Format) -> Self {
        Self {
            model,
            kv_format,
            matvec: &cpu.matvec,
            streamed: Some(&cpu.matvec_streamed).filter(|rates| !rates.is_empty()),
            small_batch: Some(&cpu.matmul_streamed).filter(|rates| !rates.is_empty()),
            medium_batch: Some(&cpu.matmul_medium).filter(|rates| !rates.is_empty()),
            matmul: &cpu.matmul,
            bandwidth: cpu.read_bandwidth.value,
            attention: cpu.attention_rate.as_ref().map(|rate| rate.value),
            activation_bandwidth: cpu.activation_bandwidth.as_ref().map(|rate| rate.value),
            kv_copy: &cpu.kv_copy,
            layer_overhead: cpu.layer_overhead.as_ref().map_or(Seconds(0.0), |cost| cost.value),
            shares_reads: true,
            soc_model: None,
        }
    }

    pub fn for_gpu(gpu: &'a Gpu, model: &'a ModelProfile, kv_format: Format) -> Self {
        Self {
            model,
            kv_format,
            matvec: &gpu.matvec,
            streamed: None,
            small_batch: None,
            medium_batch: None,
            matmul: &gpu.matmul,
            bandwidth: gpu.read_bandwidth.value,
            attention: None,
            activation_bandwidth: None,
            kv_copy: &gpu.kv_copy,
            layer_overhead: gpu.layer_overhead.as_ref().map_or(Seconds(0.0), |cost| cost.value),
            shares_reads: false,
            soc_model: None,
        }
    }

    /// Returns the time to compute one layer for all tokens of the passes of a batch, which share one read of the weights
    /// on a CPU. On a SoC the passes follow each other, because its graphs are compiled for one sequence.
    pub fn layer_time(&self, layer: u32, batch: &[Pass]) -> Seconds {
        if let Some(soc_model) = &self.soc_model {
            return batch.iter().map(|&pass| soc_model.layer_time(pass)).sum();
        }
        if !self.shares_reads && batch.len() > 1 {
            return batch.iter().map(|&pass| self.layer_time(layer, &[pass])).sum();
        }
        let mixer = self.model.shape.mixer(layer);
        let tokens = batch.iter().map(|pass| pass.tokens).sum();
        let new = self.model.shape.new_cache_bytes(layer, tokens, self.kv_format);
        self.matmul_time(&self.model.layers[layer as usize], tokens)
            + batch.iter().map(|&pass| self.mixer_time(mixer, pass)).sum()
            + self.activation_time(layer, tokens)
            + self.kv_copy.transfer_time(new)
            + self.layer_overhead
    }

    /// Returns the time of norms, activation functions and residual additions in a layer; zero if it was not measured.
    ///
    /// Deviation: equal for each token, as measured with a small batch. A single token is computed by one thread, and a
    /// long prompt by all threads.
    fn activation_time(&self, layer: u32, tokens: u32) -> Seconds {
        let bytes = self.model.shape.layer_activation_bytes(layer) * u64::from(tokens);
        self.activation_bandwidth.map_or(Seconds(0.0), |bandwidth| bytes / bandwidth)
    }

    /// Returns the time to compute the logits of `positions` positions in one batch.
    pub fn output_time(&self, positions: u32) -> Seconds {
        match &self.soc_model {
            _ if positions == 0 => Seconds(0.0),
            Some(soc_model) => soc_model.output_time(positions),
            None => self.matmul_time(&self.model.output_head, positions),
        }
    }

    /// Returns the time to look up the embedding rows of `tokens` tokens, and to compute their per-layer inputs.
    pub fn embedding_time(&self, tokens: u32) -> Seconds {
        let rows = self.model.embedding_row_bytes() * u64::from(tokens) / self.bandwidth;
        rows + self.matmul_time(&self.model.per_layer_projection, tokens)
    }

    /// Returns the time to multiply the activations of `tokens` tokens by all matrices of a tensor group. Of a mixture,
    /// it reads the experts that the tokens use.
    pub fn matmul_time(&self, group: &TensorGroup, tokens: u32) -> Seconds {
        let streamed = self.streamed.filter(|_| tokens == 1);
        let share_read = self.model.shape.experts.map_or(1.0, |experts| experts.share_read(tokens));
        // The tokens of a batch use different experts.
        let is_dense = self.model.shape.experts.is_none();
        let time = |(format, share): (Format, FormatTotals)| {
            if is_dense && let Some(time) = self.batch_time(format, share.flops, tokens) {
                return time;
            }
            if let Some(rate) = streamed.and_then(|rates| nearest_format_rate(rates, format)) {
                return share.flops / rate;
            }
            let arithmetic = share.flops * f64::from(tokens) / self.rate(format, tokens);
            longer(arithmetic, Seconds(share.bytes_read(share_read) / self.bandwidth.0))
        };
        group.totals_by_format().map(time).sum()
    }

    /// Returns the time of products with `flops` operations per token for a batch of fewer than [`LARGE_BATCH_TOKENS`]
    /// tokens, on a line through the measured times of two numbers of tokens; `None` for one token, for a large batch,
    /// and without measurements.
    ///
    /// Kernels that first unpack weights take the same time for it with any number of tokens, so the line through two
    /// larger batches continues to smaller ones. Other kernels are on the line from a smaller to a larger batch. It is not
    /// known which kernels compute 8 to 15 tokens, so the longer of the two times is used.
    fn batch_time(&self, format: Format, flops: Flops, tokens: u32) -> Option<Seconds> {
        let on_line = |(fewer, rates): (u32, &Rates), (more, other_rates): (u32, &Rates)| {
            let time =
                |tokens, rates| Some((flops * f64::from(tokens) / nearest_format_rate(rates, format)?).0);
            let (start, end) = (time(fewer, rates)?, time(more, other_rates)?);
            let each = (end - start).max(0.0) / f64::from(more - fewer);
            Some(Seconds((start + each * (f64::from(tokens) - f64::from(fewer))).max(0.0)))
        };
        let small = self.small_batch.map(|rates| (SMALL_BATCH_TOKENS, rates));
        let medium = self.medium_batch.map(|rates| (MEDIUM_BATCH_TOKENS, rates));
        let large = (LARGE_BATCH_TOKENS, self.matmul);
        match tokens {
            0 | 1 => None,
            2..MIN_PANEL_TOKENS => on_line((1, self.streamed?), small?),
            MIN_PANEL_TOKENS..MEDIUM_BATCH_TOKENS => {
                let with_panels = on_line(medium?, large)?;
                let without = small.and_then(|small| on_line(small, medium?));
                Some(without.map_or(with_panels, |without| longer(with_panels, without)))
            }
            MEDIUM_BATCH_TOKENS..LARGE_BATCH_TOKENS => on_line(medium?, large),
            _ => None,
        }
    }

    /// Returns the time of a layer's token mixer for all tokens of a pass. In attention, each token attends to one
    /// position more than the token before it. A pass reads and writes the state of a delta net once; the arithmetic
    /// rate of attention is assumed for it.
    ///
    /// Deviation: a sliding window does not limit the positions, because a shape does not have its length. Attention in
    /// contexts that are longer than the window is overestimated.
    fn mixer_time(&self, mixer: TokenMixer, pass: Pass) -> Seconds {
        let (first, tokens) = (f64::from(pass.first_position), f64::from(pass.tokens));
        let seen = mixer.cache_bytes(pass.first_position + pass.tokens, self.kv_format);
        let (work, moved) = match mixer {
            TokenMixer::Attention(_) => {
                let positions = tokens * first + tokens * (tokens + 1.0) / 2.0;
                (Flops(mixer.flops(1).0 * positions), seen)
            }
            TokenMixer::DeltaNet(_) => (Flops(mixer.flops(1).0 * tokens), seen * 2),
        };
        let rate = self.attention.unwrap_or_else(|| self.rate(Format::F16, pass.tokens));
        longer(work / rate, moved / self.bandwidth)
    }

    /// Returns the arithmetic rate for a weight format; infinite if the profile has no rate for any format.
    fn rate(&self, format: Format, tokens: u32) -> FlopsPerSecond {
        let batched = if tokens > 1 { nearest_format_rate(self.matmul, format) } else { None };
        batched.or_else(|| nearest_format_rate(self.matvec, format)).unwrap_or(FlopsPerSecond(f64::INFINITY))
    }
}

/// Returns the time in which the devices compute a prompt one after the other.
pub fn prompt_time(plan: &Plan, cluster: &Cluster, tokens: u32) -> Seconds {
    let (model, element) = (&cluster.model, cluster.kv_cache_format.format());
    let pass = Pass::new(0, 0, tokens.max(1), true);
    let of_device = |(index, planned): (usize, &PlannedDevice)| {
        let Some(member) = cluster.member(&planned.name) else { return Seconds(0.0) };
        let cpu = ComputeCost::for_main_memory(&member.device, model, element);
        let gpu = member.device.gpu.as_ref().map(|gpu| ComputeCost::for_gpu(gpu, model, element));
        let rounds = 0..plan.rounds;
        let time = |layer: u32, is_on_gpu: bool| {
            gpu.as_ref().filter(|_| is_on_gpu).unwrap_or(&cpu).layer_time(layer, &[pass])
        };
        rounds
            .flat_map(|round| {
                let gpu_window = plan.gpu_window(index, round);
                plan.window(index, round).map(move |layer| (layer, gpu_window.contains(&layer)))
            })
            .map(|(layer, is_on_gpu)| time(layer, is_on_gpu))
            .sum()
    };
    plan.devices.iter().enumerate().map(of_device).sum()
}

pub(crate) fn longer(one: Seconds, other: Seconds) -> Seconds {
    Seconds(one.0.max(other.0))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped_profile as shipped_device;
    use hearth_profiles::model::shipped_profile;

    use super::*;

    #[test]
    fn small_batch_takes_an_equal_time_for_each_further_token() {
        let model = shipped_profile("1b").expect("shipped");
        let mut device = shipped_device("d3").expect("shipped");
        let rate = |gflops: f64| {
            FormatMap::from_iter([(Format::Q4K, Sourced::new(FlopsPerSecond(gflops * 1e9), "test"))])
        };
        device.cpu.matvec_streamed = rate(40.0);
        device.cpu.matmul_streamed = rate(80.0);
        device.cpu.matmul = rate(100.0);
        let cost = ComputeCost::for_cpu(&device.cpu, &model, Format::F16);
        let group = &model.layers[4];
        let one = group.flops().0 / 40e9;
        // 4 tokens take twice as long as one.
        for (tokens, expected) in [(1, one), (2, one * 4.0 / 3.0), (4, 2.0 * one), (7, 3.0 * one)] {
            let time = cost.matmul_time(group, tokens).0;
            assert!((time / expected - 1.0).abs() < 1e-9, "{tokens} tokens: {time} and {expected}");
        }
        let time = cost.matmul_time(group, MIN_PANEL_TOKENS).0;
        assert!((time / (one * 8.0 * 0.4) - 1.0).abs() < 1e-9, "{time}");
        // 16 tokens take 16 times as long as one, 128 tokens 51.2 times.
        device.cpu.matmul_medium = rate(40.0);
        let cost = ComputeCost::for_cpu(&device.cpu, &model, Format::F16);
        let each = (51.2 - 16.0) / 112.0;
        for (tokens, expected) in [(12, 16.0 - 4.0 * each), (16, 16.0), (72, 33.6), (128, 51.2), (256, 102.4)]
        {
            let time = cost.matmul_time(group, tokens).0;
            assert!((time / (one * expected) - 1.0).abs() < 1e-9, "{tokens} tokens: {time}");
        }
        // Without a cost of panels, 8 tokens are between 4, which take 2 times as long as one, and 16, which take 6.4 times.
        device.cpu.matmul_medium = rate(100.0);
        let cost = ComputeCost::for_cpu(&device.cpu, &model, Format::F16);
        let time = cost.matmul_time(group, 8).0;
        assert!((time / (one * (2.0 + 4.4 / 3.0)) - 1.0).abs() < 1e-9, "{time}");
    }

    #[test]
    fn activations_take_an_equal_time_for_each_token() {
        let model = shipped_profile("1b").expect("shipped");
        let mut device = shipped_device("d3").expect("shipped");
        let batch = |tokens| [Pass::new(0, 0, tokens, true)];
        let time = |device: &DeviceProfile, tokens| {
            ComputeCost::for_cpu(&device.cpu, &model, Format::F16).layer_time(3, &batch(tokens)).0
        };
        let before = [1, 8].map(|tokens| time(&device, tokens));
        device.cpu.activation_bandwidth = Some(Sourced::new(BytesPerSecond(1e9), "test"));
        let shape = &model.shape;
        let each = 4.0 * f64::from(shape.embedding_length + shape.feed_forward_length) / 1e9;
        for (tokens, before) in [1, 8].into_iter().zip(before) {
            let added = time(&device, tokens) - before;
            assert!((added / (each * f64::from(tokens)) - 1.0).abs() < 1e-9, "{tokens} tokens: {added}");
        }
    }

    #[test]
    fn tokens_read_the_experts_that_they_use() {
        let (model, device) =
            (shipped_profile("qwen3-30b-a3b").expect("shipped"), shipped_device("d3").expect("shipped"));
        let cost = ComputeCost::for_gpu(device.gpu.as_ref().expect("a GPU"), &model, Format::F16);
        let group = &model.layers[4];
        let (all, experts) = (group.bytes().as_f64(), group.expert_bytes().as_f64());
        assert!(experts > 0.9 * all, "{experts} of {all}");
        let bandwidth = device.gpu.as_ref().expect("a GPU").read_bandwidth.value.0;
        // One token uses 8 of 128 experts, two tokens use 15.5 of them on average. Arithmetic adds nothing here.
        for (tokens, used) in [(1, 8.0), (2, 15.5)] {
            let expected = (all - experts * (1.0 - used / 128.0)) / bandwidth;
            let time = cost.matmul_time(group, tokens).0;
            assert!((time / expected - 1.0).abs() < 0.02, "{tokens} tokens: {time} and {expected}");
        }
    }
}
