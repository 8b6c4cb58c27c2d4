//! The cache of experts: which experts of a mixture stay in memory, in the executor, the simulator and replays of
//! recorded routes.
//!
//! A batch looks up each of its experts once. A miss reads the expert from disk. After the batch, experts are evicted
//! until the cache fits in its budget. In a replay, those that the last batch used stay even if the cache does not fit,
//! as in the published rates; the executor may evict them too. Policies choose the expert to evict:
//!
//! | policy | evicts the expert |
//! | --- | --- |
//! | `lru` | that was used least recently |
//! | `lfu` | that was used least often, of equal ones the least recent |
//! | `layer-lru`, `layer-lfu` | as above, in a cache of its own for each layer with an equal share of the budget |
//! | `next-use` | whose next use is expected to be farthest away: its frequency, the last token, the order of layers |
//! | `belady` | whose next use is farthest away, which no policy can know: the best hit rate that is possible |
//!
//! A cache that is smaller than the experts of one token never hits with `lru`: layers are computed in a cycle, so that
//! an expert is evicted just before its next use. The cache of a layer holds at least what its last batch used, so that
//! all of them together exceed a budget that is smaller than that.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use hearth_profiles::Bytes;
pub use hearth_schema::residency::EvictionPolicy;
use hearth_schema::route_trace::RouteTrace;
use serde::Serialize;

/// Number of tokens after which the weight of a use is a half, in the `next-use` policy.
/// source: looked at: in the recording of Qwen3-30B-A3B, 8 to 64 differ by about one point of the hit rate
const HALF_LIFE: f64 = 16.0;
/// The probability, in addition to the frequency, that the next token uses an expert again that the last one used.
/// source: looked at: in the same recording 0.38 of all experts repeat; 0.1 to 0.3 differ by one point of the hit rate
const REPETITION_BONUS: f64 = 0.2;
/// The bounds of the probability that the next token uses an expert. source: assumed, so that distances are finite
const PROBABILITY_BOUNDS: (f64, f64) = (0.01, 0.99);

fn has_layer_caches(policy: EvictionPolicy) -> bool {
    matches!(policy, EvictionPolicy::LayerLru | EvictionPolicy::LayerLfu)
}

/// The result of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Replay {
    /// Share of all look-ups that found their expert in the cache.
    pub hit_rate: f64,
    /// Share of the look-ups of generated tokens.
    pub hit_rate_decode: f64,
    /// Bytes that were read, also for the prompt.
    #[serde(rename = "read_bytes", serialize_with = "Bytes::serialize_number")]
    pub read: Bytes,
}

/// What a recording looks like.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RouteStatistics {
    /// Number of generated tokens.
    pub decoded_tokens: usize,
    /// Mean bytes of the experts that a generated token uses: a smaller cache never hits with `lru`.
    #[serde(rename = "cycle_bytes", serialize_with = "Bytes::serialize_number")]
    pub cycle: Bytes,
    /// Bytes of all experts that generated tokens use.
    #[serde(rename = "working_set_bytes", serialize_with = "Bytes::serialize_number")]
    pub working_set: Bytes,
    /// Bytes of all experts of the model.
    #[serde(rename = "expert_bytes", serialize_with = "Bytes::serialize_number")]
    pub all_experts: Bytes,
    /// Share of the experts of a generated token that the token before used in the same layer.
    pub repetition: f64,
    /// Share of the uses by generated tokens that go to the most used tenth of the experts of each layer.
    pub top_tenth: f64,
}

/// An expert: its layer, and its index in the layer.
pub type ExpertId = (u32, u32);

#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    count: u64,
    last_use: u64,
    /// Batches of the layer up to the last one that used the expert.
    last_batch: u64,
    /// Share of the batches of the layer that used the expert, at its last use; a batch that was [`HALF_LIFE`] batches
    /// earlier has half the weight.
    frequency: f64,
}

impl Usage {
    /// Returns the usage after a use by batch `batch` of the layer, which is use `clock` of all.
    fn used(self, batch: u64, clock: u64) -> Self {
        let frequency = self.frequency_at(batch) + 1.0 - decay(1);
        Self { count: self.count + 1, last_use: clock, last_batch: batch, frequency }
    }

    fn frequency_at(&self, batch: u64) -> f64 {
        self.frequency * decay(batch - self.last_batch)
    }
}

fn decay(batches: u64) -> f64 {
    0.5_f64.powf(batches as f64 / HALF_LIFE)
}

/// Returns the expected number of batches until the next use of an expert whose layer has had `batch` batches and is
/// `layers_ahead` batches ahead. If the layer uses the expert with probability `p`, it waits for `1/p - 1` more rounds
/// through `layers` layers.
fn expected_distance(usage: &Usage, batch: u64, layers_ahead: u32, layers: u32) -> f64 {
    let repetition = if usage.last_batch == batch { REPETITION_BONUS } else { 0.0 };
    let (min, max) = PROBABILITY_BOUNDS;
    let probability = (min + usage.frequency_at(batch) + repetition).min(max);
    f64::from(layers_ahead) + f64::from(layers) * (1.0 / probability - 1.0)
}

/// An expert that has been looked up.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    usage: Usage,
    is_cached: bool,
    /// Number of batches that have looked the expert up and not released it: it cannot be evicted.
    uses: u32,
    /// The batch of the next use, for Belady.
    next_use: usize,
}

/// A cache of experts: which experts are in memory, and which are evicted.
///
/// A batch of tokens looks up the experts that it uses in a layer, reads those that are missing, and releases all of
/// them. Then [`ExpertCache::evict`] says which experts have to leave, so that the cache fits in its budget.
#[derive(Debug, Clone)]
pub struct ExpertCache {
    policy: EvictionPolicy,
    /// Size of one expert of each layer.
    expert_bytes: Vec<u64>,
    budget: u64,
    experts: BTreeMap<ExpertId, Entry>,
    cached_bytes: Vec<u64>,
    /// Number of batches of each layer.
    batches: Vec<u64>,
    /// Number of look-ups.
    clock: u64,
    /// The layer of the last batch.
    layer: u32,
}

impl ExpertCache {
    /// Creates an empty cache for experts that have `expert_bytes` bytes in each layer. A layer without experts has 0.
    pub fn new(policy: EvictionPolicy, expert_bytes: Vec<u64>, budget: Bytes) -> Self {
        let [cached_bytes, batches] = [(); 2].map(|()| vec![0; expert_bytes.len()]);
        let budget = budget.0;
        let experts = BTreeMap::new();
        Self { policy, expert_bytes, budget, experts, cached_bytes, batches, clock: 0, layer: 0 }
    }

    /// Changes the budget. The next [`ExpertCache::evict`] obeys it.
    pub fn set_budget(&mut self, budget: Bytes) {
        self.budget = budget.0;
    }

    pub fn budget(&self) -> Bytes {
        Bytes(self.budget)
    }

    /// Returns the bytes of the cached experts.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.cached_bytes.iter().sum())
    }

    /// Returns the bytes of the experts that have been looked up, cached or not.
    pub fn used_bytes(&self) -> Bytes {
        Bytes(self.experts.keys().map(|(layer, _)| self.expert_bytes[*layer as usize]).sum())
    }

    pub fn contains(&self, id: ExpertId) -> bool {
        self.experts.get(&id).is_some_and(|entry| entry.is_cached)
    }

    /// Begins a batch in a layer.
    pub fn begin_batch(&mut self, layer: u32) {
        self.layer = layer;
        self.batches[layer as usize] += 1;
    }

    /// Adds experts that the batch uses in its layer, and returns those that were missing. They stay until they are
    /// released.
    pub fn look_up(&mut self, layer: u32, experts: &[u32]) -> Vec<u32> {
        self.look_up_with_next_uses(layer, experts, &[])
    }

    /// Looks up experts. `next_uses` has the batch of the next use of each, if it is known.
    fn look_up_with_next_uses(&mut self, layer: u32, experts: &[u32], next_uses: &[usize]) -> Vec<u32> {
        let (batch, bytes) = (self.batches[layer as usize], self.expert_bytes[layer as usize]);
        let mut missing = Vec::new();
        for (at, &expert) in experts.iter().enumerate() {
            self.clock += 1;
            let entry = self.experts.entry((layer, expert)).or_default();
            entry.usage = entry.usage.used(batch, self.clock);
            entry.next_use = next_uses.get(at).copied().unwrap_or_default();
            entry.uses += 1;
            if !std::mem::replace(&mut entry.is_cached, true) {
                self.cached_bytes[layer as usize] += bytes;
                missing.push(expert);
            }
        }
        missing
    }

    /// Releases experts that a batch has looked up.
    pub fn release(&mut self, layer: u32, experts: &[u32]) {
        for &expert in experts {
            if let Some(entry) = self.experts.get_mut(&(layer, expert)) {
                entry.uses = entry.uses.saturating_sub(1);
            }
        }
    }

    /// Removes experts until the cache fits in its budget, and returns them. Experts that are in use stay. With a cache for
    /// each layer, only that of the last batch is looked at.
    pub fn evict(&mut self) -> Vec<ExpertId> {
        let layers = self.expert_bytes.len() as u32;
        if has_layer_caches(self.policy) {
            self.evict_from(self.layer..self.layer + 1, self.budget / u64::from(layers.max(1)))
        } else {
            self.evict_from(0..layers, self.budget)
        }
    }

    /// Removes experts as [`ExpertCache::evict`], as if all layers had one cache.
    pub fn evict_from_all_layers(&mut self) -> Vec<ExpertId> {
        self.evict_from(0..self.expert_bytes.len() as u32, self.budget)
    }

    /// Removes experts of some layers until these have at most `limit` bytes.
    fn evict_from(&mut self, range: Range<u32>, limit: u64) -> Vec<ExpertId> {
        let mut bytes: u64 = self.cached_bytes[range.start as usize..range.end as usize].iter().sum();
        if bytes <= limit {
            return Vec::new();
        }
        let own = self.experts.range((range.start, 0)..(range.end, 0));
        let candidates = own
            .filter(|(_, entry)| entry.is_cached && entry.uses == 0)
            .map(|(id, entry)| Reverse((self.rank(*id, entry), *id)));
        let mut candidates: BinaryHeap<_> = candidates.collect();
        let mut evicted = Vec::new();
        while bytes > limit
            && let Some(Reverse((_, id))) = candidates.pop()
        {
            let size = self.expert_bytes[id.0 as usize];
            bytes -= size;
            self.cached_bytes[id.0 as usize] -= size;
            if let Some(entry) = self.experts.get_mut(&id) {
                entry.is_cached = false;
            }
            evicted.push(id);
        }
        evicted
    }

    /// Returns the rank of an expert. The lowest rank is evicted first.
    fn rank(&self, id: ExpertId, entry: &Entry) -> (u64, u64) {
        let Usage { count, last_use, .. } = entry.usage;
        match self.policy {
            EvictionPolicy::Lru | EvictionPolicy::LayerLru => (last_use, 0),
            EvictionPolicy::Lfu | EvictionPolicy::LayerLfu => (count, last_use),
            EvictionPolicy::NextUse => {
                let layers = self.expert_bytes.len() as u32;
                let ahead = (id.0 + layers - self.layer - 1) % layers;
                let distance = expected_distance(&entry.usage, self.batches[id.0 as usize], ahead, layers);
                // The bits of positive numbers are in the order of the numbers.
                (u64::MAX - distance.to_bits(), last_use)
            }
            EvictionPolicy::Belady => (u64::MAX - entry.next_use as u64, last_use),
        }
    }
}

/// Replays a recording with a cache of `budget` bytes.
pub fn replay(trace: &RouteTrace, policy: EvictionPolicy, budget: Bytes) -> Replay {
    let next_uses = if policy == EvictionPolicy::Belady { next_uses(trace) } else { Vec::new() };
    let sizes = trace.expert_bytes.iter().map(|bytes| bytes.0).collect();
    let mut cache = ExpertCache::new(policy, sizes, budget);
    let [mut hits, mut lookups, mut read] = [[0; 2]; 3];
    for (index, batch) in trace.batches.iter().enumerate() {
        let phase = usize::from(batch.is_decode);
        cache.begin_batch(batch.layer);
        let missing = match next_uses.get(index) {
            Some(next) => cache.look_up_with_next_uses(batch.layer, &batch.experts, next),
            None => cache.look_up(batch.layer, &batch.experts),
        };
        lookups[phase] += batch.experts.len() as u64;
        hits[phase] += (batch.experts.len() - missing.len()) as u64;
        read[phase] += missing.len() as u64 * trace.expert_bytes[batch.layer as usize].0;
        // What the batch used stays.
        cache.evict();
        cache.release(batch.layer, &batch.experts);
    }
    let rate = |hits: u64, lookups: u64| if lookups > 0 { hits as f64 / lookups as f64 } else { 0.0 };
    Replay {
        hit_rate: rate(hits.iter().sum(), lookups.iter().sum()),
        hit_rate_decode: rate(hits[1], lookups[1]),
        read: Bytes(read.iter().sum()),
    }
}

/// Returns for each expert of each batch the index of the batch that uses it next, or `usize::MAX`.
fn next_uses(trace: &RouteTrace) -> Vec<Vec<usize>> {
    let mut next: BTreeMap<ExpertId, usize> = BTreeMap::new();
    let mut all: Vec<Vec<usize>> = Vec::with_capacity(trace.batches.len());
    for (index, batch) in trace.batches.iter().enumerate().rev() {
        let mut next_of = |&expert: &u32| next.insert((batch.layer, expert), index).unwrap_or(usize::MAX);
        all.push(batch.experts.iter().map(&mut next_of).collect());
    }
    all.reverse();
    all
}

/// Describes a recording.
pub fn statistics(trace: &RouteTrace) -> RouteStatistics {
    let size = |layer: u32| trace.expert_bytes[layer as usize].0;
    let decode = || trace.batches.iter().filter(|batch| batch.is_decode);
    let mut counts: BTreeMap<ExpertId, u64> = BTreeMap::new();
    let mut before: BTreeMap<u32, &[u32]> = BTreeMap::new();
    let [mut uses, mut repeated, mut bytes, mut first_layer_batches] = [0u64; 4];
    for batch in decode() {
        uses += batch.experts.len() as u64;
        bytes += batch.experts.len() as u64 * size(batch.layer);
        first_layer_batches += u64::from(batch.layer == 0);
        if let Some(last) = before.insert(batch.layer, &batch.experts) {
            repeated += batch.experts.iter().filter(|expert| last.contains(expert)).count() as u64;
        }
        for &expert in &batch.experts {
            *counts.entry((batch.layer, expert)).or_default() += 1;
        }
    }
    let tenth = trace.expert_count.div_ceil(10) as usize;
    let top: u64 = (0..trace.expert_bytes.len() as u32)
        .map(|layer| {
            let mut own: Vec<u64> =
                counts.range((layer, 0)..=(layer, u32::MAX)).map(|(_, count)| *count).collect();
            own.sort_unstable_by(|one, other| other.cmp(one));
            own.iter().take(tenth).sum::<u64>()
        })
        .sum();
    let share = |part: u64| if uses > 0 { part as f64 / uses as f64 } else { 0.0 };
    let all: u64 = trace.expert_bytes.iter().map(|bytes| bytes.0 * u64::from(trace.expert_count)).sum();
    RouteStatistics {
        decoded_tokens: first_layer_batches as usize,
        cycle: Bytes(bytes / first_layer_batches.max(1)),
        working_set: Bytes(counts.keys().map(|(layer, _)| size(*layer)).sum()),
        all_experts: Bytes(all),
        repetition: share(repeated),
        top_tenth: share(top),
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::route_trace::RouteBatch;

    use super::*;

    /// A recording of decoded tokens of two layers, each of which uses the given expert.
    fn trace(experts: &[u32]) -> RouteTrace {
        let batch = |layer, expert| RouteBatch { layer, is_decode: true, experts: vec![expert] };
        RouteTrace {
            model: String::new(),
            expert_count: 10,
            expert_bytes: vec![Bytes(100), Bytes(100)],
            batches: experts.iter().flat_map(|&expert| [batch(0, expert), batch(1, expert)]).collect(),
        }
    }

    #[test]
    fn lru_below_a_cycle_never_hits() {
        let trace = trace(&[3; 10]);
        assert_eq!(replay(&trace, EvictionPolicy::Lru, Bytes(100)).hit_rate, 0.0);
        assert_eq!(replay(&trace, EvictionPolicy::Lru, Bytes(200)).hit_rate, 0.9);
        // A layer keeps what its last batch used.
        assert_eq!(replay(&trace, EvictionPolicy::LayerLru, Bytes(100)).hit_rate, 0.9);
    }

    #[test]
    fn belady_keeps_what_is_used_next() {
        // With two experts a layer, 1, 2, 3, 1, 2 misses all with LRU; Belady keeps 1, and then evicts it for 2.
        let trace = trace(&[1, 2, 3, 1, 2]);
        assert_eq!(replay(&trace, EvictionPolicy::LayerLru, Bytes(400)).hit_rate, 0.0);
        let best = replay(&trace, EvictionPolicy::Belady, Bytes(400));
        assert!(best.hit_rate > 0.15 && best.read < Bytes(1000), "{best:?}");
        assert_eq!(replay(&trace, EvictionPolicy::Belady, Bytes(1 << 40)).read, Bytes(600));
    }

    #[test]
    fn expert_used_often_and_soon_is_kept() {
        // A layer that uses 1 for every second token, and another expert each time between.
        let trace = trace(&[1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1]);
        assert_eq!(replay(&trace, EvictionPolicy::Lru, Bytes(200)).hit_rate, 0.0);
        let found = replay(&trace, EvictionPolicy::NextUse, Bytes(400)).hit_rate;
        assert_eq!(found, replay(&trace, EvictionPolicy::Belady, Bytes(400)).hit_rate);
        let often = Usage { frequency: 0.5, last_batch: 8, ..Usage::default() };
        let seldom = Usage { frequency: 0.1, ..often };
        let distance = |usage: &Usage, ahead| expected_distance(usage, 9, ahead, 48);
        assert!(distance(&often, 5) < distance(&seldom, 5) && distance(&often, 5) < distance(&often, 6));
        assert!(expected_distance(&often, 8, 5, 48) < distance(&often, 5));
    }

    #[test]
    fn recording_is_described() {
        let found = statistics(&trace(&[1, 1, 2, 1]));
        assert_eq!((found.decoded_tokens, found.cycle, found.working_set), (4, Bytes(200), Bytes(400)));
        assert_eq!((found.repetition, found.top_tenth, found.all_experts), (0.25, 0.75, Bytes(2000)));
    }
}
