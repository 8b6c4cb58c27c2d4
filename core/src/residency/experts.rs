//! Managed residency of experts: which experts of a mixture stay in memory, beside the other weights of its layers.
//!
//! Every token uses all weights of a layer except its experts, so these are kept first ([`super::ManagedResidency`]).
//! The rest of the memory is a cache of experts. A batch requests the experts that its tokens use, group by group, and
//! releases them. Experts beyond the budget are evicted whole, because evicting single pages makes the system reclaim
//! other weights.
//!
//! Not here: the rank by which an expert is evicted ([`crate::expert_cache`]).

use hearth_profiles::Bytes;
use hearth_profiles::model::Experts;
use hearth_schema::residency::ResidencyOptions;

use super::{Event, KeptBudget, ManagedResidency, kept_bytes, weight_budget};
use crate::expert_cache::{EvictionPolicy, ExpertCache, ExpertId};

/// Number of groups whose experts are in use at the same time: one is computed while the next is read (the executor's
/// loop over groups, and the order of requests and releases in the simulator).
const GROUPS_IN_USE: u64 = 2;

/// Returns the memory for the experts that are in use, of which the largest has `largest` bytes.
pub fn in_use_bytes(shape: &Experts, largest: u64) -> u64 {
    GROUPS_IN_USE * u64::from(shape.used) * largest
}

/// The state of the experts of a device.
#[derive(Debug, Clone)]
pub struct ExpertResidency {
    options: ResidencyOptions,
    cpus: u32,
    cache: ExpertCache,
    /// How the budget of the cache, which is zero until memory has been measured, follows the memory.
    budget: KeptBudget,
    /// Total size of the experts of the device.
    all_bytes: u64,
    /// Memory for the experts that are in use.
    in_use_bytes: u64,
    experts_per_group: usize,
    /// Experts to evict from memory.
    evictable: Vec<ExpertId>,
}

impl ExpertResidency {
    /// Creates the state of a device whose layers have experts of `expert_bytes` bytes: an element for each layer of
    /// the model, 0 if it has no experts or belongs to another device. No expert is kept until memory has been measured.
    /// `cpus` is the number of CPUs of the machine.
    pub fn new(expert_bytes: Vec<u64>, shape: &Experts, options: ResidencyOptions, cpus: u32) -> Self {
        let all_bytes = expert_bytes.iter().sum::<u64>() * u64::from(shape.count);
        let largest = expert_bytes.iter().copied().max().unwrap_or(0);
        Self {
            options,
            cpus,
            cache: ExpertCache::new(
                options.expert_eviction.unwrap_or(EvictionPolicy::NextUse),
                expert_bytes,
                Bytes::ZERO,
            ),
            budget: KeptBudget::new(options.max_kept_bytes(all_bytes)),
            all_bytes,
            in_use_bytes: in_use_bytes(shape, largest),
            experts_per_group: shape.used as usize,
            evictable: Vec::new(),
        }
    }

    /// Returns the memory that experts may have, in use or cached.
    pub fn max_bytes(&self) -> u64 {
        self.all_bytes.min(self.cache.budget().0 + self.in_use_bytes)
    }

    /// Returns the memory for the experts that are in use.
    pub fn in_use_bytes(&self) -> u64 {
        self.in_use_bytes
    }

    /// Returns how many different experts a group has at most.
    pub fn experts_per_group(&self) -> usize {
        self.experts_per_group
    }

    /// Divides the measured memory between the other weights and the experts. `available` is the page cache in bytes, if
    /// known. `evicted` bytes were evicted by the system.
    pub fn divide_memory(&mut self, others: &mut ManagedResidency, available: Option<u64>, evicted: u64) {
        let page_cache = available.map(|bytes| self.memory_of_other_weights(bytes));
        others.react(Event::Measured { page_cache, evicted: 0 });
        self.follow_memory(available, others.weight_bytes(), evicted);
    }

    /// Returns the page cache that the other weights can use, if `available` bytes are available.
    fn memory_of_other_weights(&self, available: u64) -> u64 {
        available.saturating_sub(self.in_use_bytes)
    }

    /// Adapts the cache to the measured memory. `available` is the page cache in bytes, if known, of which the part that
    /// keeps the other weights, `other` bytes, is not for experts. `evicted` bytes were evicted by the system.
    fn follow_memory(&mut self, available: Option<u64>, other: u64, evicted: u64) {
        let limit = available.map(|bytes| self.limit(bytes, other));
        self.budget.update_after_token(evicted, limit);
        self.cache.set_budget(Bytes(self.budget.bytes));
    }

    /// Shrinks the cache to the measured memory between two tokens. The parameters are as above.
    pub fn yield_memory(&mut self, available: u64, other: u64) {
        let limit = self.limit(available, other);
        self.budget.lower_to(limit);
        self.cache.set_budget(Bytes(self.budget.bytes));
    }

    /// Returns how many bytes of experts fit.
    fn limit(&self, available: u64, other: u64) -> u64 {
        let (options, cpus) = (&self.options, self.cpus);
        let all = other + self.all_bytes;
        if weight_budget(available, all, cpus) >= all && options.max_kept_bytes(all) >= all {
            return self.all_bytes;
        }
        let bytes = self.memory_of_other_weights(available);
        let of_others = kept_bytes(bytes, other, cpus, options);
        kept_bytes(bytes, all, cpus, options).saturating_sub(of_others)
    }

    /// Requests the experts of a group for a layer; `is_first` if it is the first one of a batch. Returns those that have
    /// to be read.
    pub fn request(&mut self, layer: u32, experts: &[u32], is_first: bool) -> Vec<u32> {
        if is_first {
            self.cache.begin_batch(layer);
        }
        self.evictable.retain(|(other, expert)| *other != layer || !experts.contains(expert));
        self.cache.look_up(layer, experts)
    }

    /// Releases the experts of a group. Returns whether there are experts to evict.
    pub fn release(&mut self, layer: u32, experts: &[u32]) -> bool {
        self.cache.release(layer, experts);
        self.cache.bytes() > self.cache.budget() || !self.evictable.is_empty()
    }

    /// Removes and returns an expert that has to be evicted from memory. Choosing takes longer than the other calls, so
    /// it is for a thread that does not compute.
    pub fn next_evictable(&mut self) -> Option<ExpertId> {
        if self.evictable.is_empty() && self.cache.bytes() > self.cache.budget() {
            self.evictable = self.cache.evict();
            if self.evictable.is_empty() {
                // The cache of a layer has shrunk, although another layer is computed or none.
                self.evictable = self.cache.evict_from_all_layers();
            }
        }
        self.evictable.pop()
    }

    /// Returns the bytes of the experts that have been used at least once.
    pub fn used_bytes(&self) -> Bytes {
        self.cache.used_bytes()
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::residency::Residency;
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Experts = Experts {
        count: 8,
        used: 2,
        feed_forward_length: 64,
        shared_feed_forward_length: 0,
        dense_layers: 0,
    };
    const EXPERT: u64 = 1 << 20;

    fn residency(available: u64) -> ExpertResidency {
        let options = ResidencyOptions::with_policy(Residency::Managed);
        let mut residency = ExpertResidency::new(vec![EXPERT; 4], &SHAPE, options, 2);
        residency.follow_memory(Some(available), 4 * EXPERT, 0);
        residency
    }

    #[test]
    fn experts_get_the_memory_that_other_weights_leave() {
        // 4 MiB of other weights, 32 of experts, 4 in use; the rest is the stream buffer, the margin and the kernel.
        let enough = residency(64 << 20);
        assert_eq!((enough.budget.bytes, enough.experts_per_group()), (32 << 20, 2));
        let tight = residency(32 << 20).budget.bytes;
        assert!((14 << 20..16 << 20).contains(&tight), "{tight}");
        assert_eq!(residency(2 << 20).budget.bytes, 0);
        assert_eq!(enough.memory_of_other_weights(32 << 20), 28 << 20);
    }

    #[test]
    fn expert_that_is_needed_again_is_not_evicted() {
        let mut residency = residency(0);
        assert_eq!(residency.request(0, &[1, 2], true), [1, 2]);
        assert!(residency.next_evictable().is_none(), "in use");
        assert!(residency.release(0, &[1, 2]));
        let first = residency.next_evictable();
        let other = if first == Some((0, 1)) { 2 } else { 1 };
        assert_eq!(residency.request(0, &[other, 3], true), [other, 3]);
        assert_eq!(residency.next_evictable(), None);
    }

    proptest! {
        #[test]
        fn cached_experts_fit_in_memory(
            available in 0u64..(48 << 20),
            tokens in prop::collection::vec((0u32..4, prop::collection::btree_set(0u32..8, 2)), 1..60),
        ) {
            let mut residency = residency(available);
            let mut in_memory = std::collections::BTreeSet::new();
            for (layer, experts) in tokens {
                let experts: Vec<u32> = experts.into_iter().collect();
                let missing = residency.request(layer, &experts, true);
                for &expert in &experts {
                    let is_new = in_memory.insert((layer, expert));
                    prop_assert!(!is_new || missing.contains(&expert), "an absent expert is read");
                }
                residency.release(layer, &experts);
                while let Some(id) = residency.next_evictable() {
                    in_memory.remove(&id);
                }
                prop_assert!(residency.cache.bytes().0 <= residency.budget.bytes);
                prop_assert_eq!(in_memory.len() as u64 * EXPERT, residency.cache.bytes().0);
                prop_assert!(in_memory.iter().all(|id| residency.cache.contains(*id)));
            }
        }
    }
}
