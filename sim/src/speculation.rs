//! Speculative decoding: the time of a draft model, and which of its tokens are accepted.
//!
//! The draft model first processes the part of the sequence that is not in its KV cache, as one batch. Then it
//! generates one token after another, each in a pass through all its layers and its output matrix. After a step whose
//! drafts were all accepted, the last draft is not in the cache, so the next step begins with two tokens; rejected
//! tokens are removed from the cache. The weights of the draft model are in memory. A pass takes the time of
//! [`ComputeCost`], the fixed cost of a window and, on a GPU with its own memory, the time to upload the token IDs and
//! to download the logits.
//!
//! Each drafted position is accepted with the workload's probability if all drafts before it were (Leviathan et al.,
//! 2023, section 2.3: acceptances as independent draws). A draw belongs to a sequence and a position, and each
//! position is drawn once, because after a rejection the target model generates the token. So the draws do not depend
//! on the number of drafts per step.
//!
//! Deviation: drafted tokens do not have the fixed cost of a token (`cpu.token_overhead`) on the head device.
//!
//! Not here: the memory of the draft model (`hearth_core::memory::draft`).

use std::collections::BTreeMap;

use hearth_core::compute_cost::ComputeCost;
use hearth_profiles::device::DeviceProfile;
use hearth_profiles::model::ModelProfile;
use hearth_profiles::{Bytes, Format, Seconds};
use hearth_schema::pass::Pass;
use hearth_schema::plan::Processor;
use hearth_schema::scenario::Workload;

use crate::random::{self, StreamPurpose};

/// Size of a token ID, and also of a logit.
const ELEMENT_BYTES: Bytes = Bytes(4);

#[derive(Debug, Clone)]
pub struct Drafter<'a> {
    device: &'a DeviceProfile,
    model: &'a ModelProfile,
    kv_format: Format,
    pub processor: Processor,
    /// Number of positions in the draft model's KV cache, by sequence index.
    cached: BTreeMap<u32, u32>,
}

impl<'a> Drafter<'a> {
    pub fn new(
        device: &'a DeviceProfile,
        model: &'a ModelProfile,
        kv_format: Format,
        processor: Processor,
    ) -> Self {
        Self { device, model, kv_format, processor, cached: BTreeMap::new() }
    }

    /// Returns the draft model's time to generate the drafts of a pass, or to process a pass without drafts.
    pub fn pass_time(&mut self, pass: Pass) -> Seconds {
        let Pass { sequence_index: sequence, first_position, tokens, drafted, .. } = pass;
        let cached = self.cached.get(&sequence).copied().unwrap_or(0).min(first_position);
        self.cached.insert(sequence, first_position + tokens - u32::from(drafted > 0));
        if drafted == 0 {
            return self.pass(cached, first_position + tokens - cached, false);
        }
        let first = self.pass(cached, first_position + 1 - cached, true);
        (1..drafted).fold(first, |time, ahead| time + self.pass(first_position + ahead, 1, true))
    }

    fn pass(&self, first_position: u32, tokens: u32, output: bool) -> Seconds {
        let pass = Pass::new(0, first_position, tokens, output);
        let gpu = self.device.gpu.as_ref().filter(|_| self.processor == Processor::Gpu);
        let (work, fixed, copies) = if let Some(gpu) = gpu {
            let ids = gpu.upload.transfer_time(ELEMENT_BYTES * u64::from(tokens));
            let logits =
                ELEMENT_BYTES * u64::from(self.model.shape.vocab_size) * u64::from(pass.output_count());
            let copies =
                if gpu.unified_memory { Seconds(0.0) } else { ids + gpu.download.transfer_time(logits) };
            (ComputeCost::for_gpu(gpu, self.model, self.kv_format), &gpu.window_overhead, copies)
        } else {
            let work = ComputeCost::for_main_memory(self.device, self.model, self.kv_format);
            (work, &self.device.cpu.window_overhead, Seconds(0.0))
        };
        let layers: Seconds =
            (0..self.model.layers.len() as u32).map(|layer| work.layer_time(layer, &[pass])).sum();
        let fixed = fixed.as_ref().map_or(Seconds(0.0), |cost| cost.value);
        work.embedding_time(tokens) + layers + work.output_time(pass.output_count()) + fixed + copies
    }
}

/// Samples which drafts of a run are accepted.
#[derive(Debug, Clone, Copy)]
pub struct AcceptanceSampler {
    seed: u64,
    probability: f64,
}

impl AcceptanceSampler {
    pub fn new(seed: u64, workload: &Workload) -> Self {
        let probability =
            workload.speculation.as_ref().map_or(0.0, |speculation| speculation.acceptance.value.0);
        Self { seed, probability }
    }

    pub fn accepted_drafts(&self, pass: Pass) -> u32 {
        let is_accepted = |&draft: &u32| {
            let position = u64::from(pass.first_position + draft);
            random::draw(self.seed, StreamPurpose::Acceptance, pass.sequence_index, position)
                < self.probability
        };
        (1..=pass.drafted).take_while(is_accepted).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped_profile;
    use hearth_profiles::model;

    use super::*;

    #[test]
    fn rejected_drafts_are_processed_again() {
        let (device, model) =
            (shipped_profile("d3").expect("shipped"), model::shipped_profile("1b").expect("shipped"));
        let mut drafter = Drafter::new(&device, &model, Format::F16, Processor::Cpu);
        let step = |first, drafted| Pass { drafted, ..Pass::new(0, first, drafted + 1, true) };
        let prompt = drafter.pass_time(Pass::new(0, 0, 8, true)).0;
        assert!((prompt - drafter.pass(0, 8, false).0).abs() < 1e-15);
        // The token at 8 and the drafts at 9 and 10 are processed; the draft at 11 is generated and not processed.
        let expected: f64 = (8..11).map(|position| drafter.pass(position, 1, true).0).sum();
        assert!((drafter.pass_time(step(8, 3)).0 - expected).abs() < 1e-15);
        // The draft at 9 was accepted: the corrected token is at 10, and only it is new.
        assert!((drafter.pass_time(step(10, 1)).0 - drafter.pass(10, 1, true).0).abs() < 1e-15);
        // That draft was accepted as well: the draft at 11 has not been processed yet either.
        let both = drafter.pass(11, 2, true).0;
        assert!((drafter.pass_time(step(12, 1)).0 - both).abs() < 1e-15);
        // Another sequence starts with an empty cache.
        let other = Pass { sequence_index: 1, ..Pass::new(0, 0, 8, true) };
        assert!((drafter.pass_time(other).0 - prompt).abs() < 1e-15);
    }
}
