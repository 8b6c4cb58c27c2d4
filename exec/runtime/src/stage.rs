//! A stage: the decoder layers that one device of the ring computes, with their KV caches.
//!
//! A stage owns one or more ranges of layers (windows). The ring passes hidden states to the stage, together with the
//! range of layers to run. A process that runs the whole model ([`crate::engine`]) has one stage with all layers. The
//! stage checks all arguments that come from other devices.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::{Backend, Cpu, CpuBackend, CriticalPathCost, ExecError, KvCacheOptions, Weights};

pub struct Stage {
    weights: Arc<Weights>,
    owned: Vec<Range<u32>>,
    context: u32,
    /// Number of positions in the KV cache of each sequence and layer.
    filled: BTreeMap<(u32, u32), u32>,
    rounding: Option<fn(&mut [f32])>,
    backend: Box<dyn Backend>,
}

impl Stage {
    /// Creates a stage that computes the layers in `owned` on the CPU.
    pub fn on_cpu(
        weights: Arc<Weights>,
        owned: &[Range<u32>],
        cache: KvCacheOptions,
        cpu: Cpu,
    ) -> Result<Stage, ExecError> {
        check_owned(&weights, owned)?;
        let layers = owned.iter().cloned().flatten();
        let backend = CpuBackend::new(Arc::clone(&weights), layers, cache, cpu);
        Stage::new(weights, owned, cache, Box::new(backend))
    }

    /// Creates a stage that computes the layers in `owned` with `backend`, whose KV caches have the size `cache`.
    pub fn new(
        weights: Arc<Weights>,
        owned: &[Range<u32>],
        cache: KvCacheOptions,
        backend: Box<dyn Backend>,
    ) -> Result<Stage, ExecError> {
        check_owned(&weights, owned)?;
        let layers = || owned.iter().cloned().flatten();
        let of = |sequence| layers().map(move |layer| ((sequence, layer), 0));
        let filled = (0..cache.sequences).flat_map(of).collect();
        Ok(Stage { weights, owned: owned.to_vec(), context: cache.context, filled, rounding: None, backend })
    }

    /// Sets the function that rounds the hidden states after every layer, so that they can be sent in fewer bytes.
    #[must_use]
    pub fn with_rounding(mut self, rounding: fn(&mut [f32])) -> Stage {
        self.rounding = Some(rounding);
        self
    }

    /// Runs `layers` over tokens of sequence 0 as [`Stage::forward_sequence`] does.
    pub fn forward(
        &mut self,
        layers: Range<u32>,
        hidden: &mut [f32],
        positions: &[u32],
    ) -> Result<CriticalPathCost, ExecError> {
        self.forward_sequence(0, layers, hidden, positions)
    }

    /// Runs `layers` in place over `hidden`, the activations of tokens of one sequence: hidden states `[tokens,
    /// embedding]`, followed in some models by per-layer inputs, keys and values (`ModelShape::activation_length`). The
    /// layers must be inside one range of this stage.
    ///
    /// `positions`, one for each token, must be consecutive and leave no gap after the cached positions. If they start
    /// before the end of the cached positions, the KV cache is truncated first, as after a rejected draft; with layers
    /// that have a state instead, they must then start at 0.
    pub fn forward_sequence(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        positions: &[u32],
    ) -> Result<CriticalPathCost, ExecError> {
        if !self.owned.iter().any(|own| own.start <= layers.start && layers.end <= own.end) {
            return Err(ExecError::Layers { requested: layers, owned: self.owned.clone() });
        }
        let width = self.weights.shape().activation_length() as usize;
        if hidden.len() != positions.len() * width {
            let (found, tokens) = (hidden.len(), positions.len());
            return Err(ExecError::Hidden { found, tokens, width });
        }
        let Some((first, end)) = self.check_positions(sequence, &layers, positions)? else {
            return Ok(CriticalPathCost::default());
        };
        let mut cost = CriticalPathCost::default();
        if let Some(rounding) = self.rounding {
            let states = positions.len() * self.weights.shape().embedding_length as usize;
            for layer in layers.clone() {
                cost += self.backend.forward(sequence, layer..layer + 1, hidden, first);
                rounding(&mut hidden[..states]);
            }
            // The keys and values that other layers use.
            rounding(&mut hidden[states..]);
        } else {
            cost = self.backend.forward(sequence, layers.clone(), hidden, first);
        }
        self.weights.check_unchanged()?;
        for layer in layers {
            self.filled.insert((sequence, layer), end);
        }
        Ok(cost)
    }

    /// Returns the logits `[tokens, vocabulary]` of the final hidden states `hidden`, `[tokens, embedding]`, or `None`
    /// if the backend does not compute the output matrix. Damaged weights can give logits that are not finite.
    pub fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, CriticalPathCost)> {
        self.backend.logits(hidden)
    }

    /// Truncates the KV caches of all sequences to `length` positions.
    pub fn truncate_kv_caches(&mut self, length: u32) {
        self.truncate(length, (0, 0)..=(u32::MAX, u32::MAX));
    }

    /// Truncates the KV cache of one sequence to `length` positions.
    pub fn roll_back(&mut self, sequence: u32, length: u32) {
        self.truncate(length, (sequence, 0)..=(sequence, u32::MAX));
    }

    /// Returns the number of positions in a recurrent state that a pass from position `first` on could only continue if
    /// the state were rolled back, if there is such a state.
    fn state_to_roll_back(&self, sequence: u32, layers: &Range<u32>, first: u32) -> Option<u32> {
        let recurrent = layers.clone().filter(|layer| self.has_state(*layer));
        let mut filled = recurrent.filter_map(|layer| self.filled.get(&(sequence, layer)).copied());
        filled.find(|filled| first != 0 && first != *filled)
    }

    fn has_state(&self, layer: u32) -> bool {
        self.weights.shape().mixer(layer).is_recurrent()
    }

    /// Truncates the caches of these sequences and layers. The state of a layer without attention can only be cleared.
    fn truncate(&mut self, length: u32, caches: RangeInclusive<(u32, u32)>) {
        let too_long: Vec<_> = self.filled.range(caches).filter(|(_, filled)| length < **filled).collect();
        let new: Vec<_> = too_long
            .into_iter()
            .map(|(&key, _)| (key, if self.has_state(key.1) { 0 } else { length }))
            .collect();
        self.filled.extend(new);
    }

    pub fn layer_ranges(&self) -> &[Range<u32>] {
        &self.owned
    }

    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Returns whether a GPU computes the layers that the plan assigns to the GPU; false after the GPU is lost.
    pub fn has_gpu(&self) -> bool {
        self.backend.has_gpu()
    }

    pub fn kv_cache_bytes(&self) -> u64 {
        self.backend.kv_cache_bytes()
    }

    /// Checks `positions`. Returns the first position and the end (exclusive), or `None` if there are no positions.
    fn check_positions(
        &self,
        sequence: u32,
        layers: &Range<u32>,
        positions: &[u32],
    ) -> Result<Option<(u32, u32)>, ExecError> {
        let Some(&first) = positions.first() else { return Ok(None) };
        // A sequence without a cache cannot be computed.
        let filled = layers.clone().map(|layer| self.filled.get(&(sequence, layer)).copied());
        let Some(filled) = filled.min().flatten() else {
            return Err(ExecError::Sequence { sequence });
        };
        let end = u64::from(first) + positions.len() as u64;
        let consecutive =
            positions.iter().zip(u64::from(first)..).all(|(&at, expected)| u64::from(at) == expected);
        if !consecutive || first > filled || end > u64::from(self.context) {
            let (end, count) = (u32::try_from(end).unwrap_or(u32::MAX), positions.len());
            return Err(ExecError::Positions { first, end, count, filled, context: self.context });
        }
        if let Some(filled) = self.state_to_roll_back(sequence, layers, first) {
            return Err(ExecError::RolledBackState { first, filled });
        }
        Ok(Some((first, end as u32)))
    }
}

fn check_owned(weights: &Weights, owned: &[Range<u32>]) -> Result<(), ExecError> {
    let all = 0..weights.shape().layers.0;
    for (index, range) in owned.iter().enumerate() {
        let overlaps = owned[..index].iter().any(|other| range.start < other.end && other.start < range.end);
        if range.start >= range.end || range.end > all.end || overlaps || !weights.has_layers(range.clone()) {
            return Err(ExecError::Layers { requested: range.clone(), owned: vec![all] });
        }
    }
    Ok(())
}
