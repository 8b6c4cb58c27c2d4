//! A stage: the decoder layers that one device of the ring computes, with their KV caches.
//!
//! A stage owns one or more ranges of layers (windows). The ring passes hidden states to the stage, together with the
//! range of layers to run. A process that runs the whole model ([`crate::engine`]) has one stage with all layers. The
//! stage checks all arguments that come from other devices.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use hearth_schema::pass::{Batch, CacheChange, Pass};

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

    /// Runs `layers` over tokens of one sequence from the position `first` on, as [`Stage::forward_batch`] does.
    pub fn forward(
        &mut self,
        sequence: u32,
        layers: Range<u32>,
        hidden: &mut [f32],
        first: u32,
    ) -> Result<CriticalPathCost, ExecError> {
        let tokens = hidden.len() / self.weights.shape().activation_length() as usize;
        let pass = Pass { sequence_index: sequence, ..Pass::new(0, first, tokens as u32, false) };
        self.forward_batch(layers, hidden, &pass.into())
    }

    /// Runs `layers` in place over `hidden`, the activations of the tokens of a batch: hidden states `[tokens,
    /// embedding]`, followed in some models by per-layer inputs, keys and values (`ModelShape::activation_length`). The
    /// layers must be inside one range of this stage.
    ///
    /// A pass must leave no gap after the cached positions of its sequence. If it starts before the end of the cached
    /// positions, the KV cache is truncated first, as after a rejected draft; with layers that have a state instead, it
    /// must then start at 0.
    pub fn forward_batch(
        &mut self,
        layers: Range<u32>,
        hidden: &mut [f32],
        batch: &Batch,
    ) -> Result<CriticalPathCost, ExecError> {
        if !self.owned.iter().any(|own| own.start <= layers.start && layers.end <= own.end) {
            return Err(ExecError::Layers { requested: layers, owned: self.owned.clone() });
        }
        let width = self.weights.shape().activation_length() as usize;
        let tokens = batch.tokens() as usize;
        if hidden.len() != tokens * width {
            return Err(ExecError::Hidden { found: hidden.len(), tokens, width });
        }
        if layers.is_empty() || tokens == 0 {
            return Ok(CriticalPathCost::default());
        }
        batch.cache_changes().iter().try_for_each(|&change| self.change_cache(change, &layers))?;
        batch.passes().iter().try_for_each(|pass| self.check_pass(pass, &layers))?;
        let mut cost = CriticalPathCost::default();
        if let Some(rounding) = self.rounding {
            let states = tokens * self.weights.shape().embedding_length as usize;
            for layer in layers.clone() {
                cost += self.backend.forward(layer..layer + 1, hidden, batch.passes());
                rounding(&mut hidden[..states]);
            }
            // The keys and values that other layers use.
            rounding(&mut hidden[states..]);
        } else {
            cost = self.backend.forward(layers.clone(), hidden, batch.passes());
        }
        self.weights.check_unchanged()?;
        for pass in batch.passes() {
            let end = pass.first_position + pass.tokens;
            self.filled.extend(layers.clone().map(|layer| ((pass.sequence_index, layer), end)));
        }
        Ok(cost)
    }

    /// Returns the logits `[tokens, vocabulary]` of the final hidden states `hidden`, `[tokens, embedding]`, or `None`
    /// if the backend does not compute the output matrix. Damaged weights can give logits that are not finite.
    pub fn logits(&mut self, hidden: &[f32]) -> Option<(Vec<f32>, CriticalPathCost)> {
        self.backend.logits(hidden)
    }

    /// Truncates the KV caches of all sequences to `length` positions; with `length` 0, their memory is given back.
    pub fn truncate_kv_caches(&mut self, length: u32) {
        if length == 0 {
            let sequences: BTreeSet<u32> = self.filled.keys().map(|&(sequence, _)| sequence).collect();
            for (sequence, layers) in
                sequences.iter().flat_map(|&it| self.owned.iter().map(move |own| (it, own)))
            {
                self.backend.release(sequence, layers.clone());
            }
        }
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

    fn change_cache(&mut self, change: CacheChange, layers: &Range<u32>) -> Result<(), ExecError> {
        let (sequence, positions) = match change {
            CacheChange::Release { sequence } => {
                if !self.filled.contains_key(&(sequence, layers.start)) {
                    return Err(ExecError::Sequence { sequence });
                }
                self.backend.release(sequence, layers.clone());
                (sequence, 0)
            }
            CacheChange::Copy { from, to, tokens } => {
                let is_cached =
                    |layer| self.filled.get(&(from, layer)).is_some_and(|&filled| filled >= tokens);
                let is_possible = layers.clone().all(is_cached)
                    && self.filled.contains_key(&(to, layers.start))
                    && self.backend.copy_positions(from, to, tokens, layers.clone());
                if !is_possible {
                    return Err(ExecError::CachedPositions { from, to, tokens });
                }
                (to, tokens)
            }
        };
        self.filled.extend(layers.clone().map(|layer| ((sequence, layer), positions)));
        Ok(())
    }

    fn check_pass(&self, pass: &Pass, layers: &Range<u32>) -> Result<(), ExecError> {
        let Pass { sequence_index: sequence, first_position: first, tokens, .. } = *pass;
        // A sequence without a cache cannot be computed.
        let filled = layers.clone().map(|layer| self.filled.get(&(sequence, layer)).copied());
        let Some(filled) = filled.min().flatten() else {
            return Err(ExecError::Sequence { sequence });
        };
        let end = u64::from(first) + u64::from(tokens);
        if first > filled || end > u64::from(self.context) {
            let (end, count) = (u32::try_from(end).unwrap_or(u32::MAX), tokens as usize);
            return Err(ExecError::Positions { first, end, count, filled, context: self.context });
        }
        if let Some(filled) = self.state_to_roll_back(sequence, layers, first) {
            return Err(ExecError::RolledBackState { first, filled });
        }
        Ok(())
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
