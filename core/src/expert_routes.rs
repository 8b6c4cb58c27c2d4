//! Expert routes of a simulated run: which experts each token uses in each layer.
//!
//! Routes are taken from a recording, or drawn. A drawn token uses an expert of the token before again with some
//! probability. Otherwise it chooses one by popularity, which falls exponentially with the rank: in a conversation, a
//! token rarely uses an expert of the less popular half.

use std::collections::BTreeSet;

use hearth_profiles::model::{Experts, ModelProfile};
use hearth_schema::pass::Pass;
use hearth_schema::route_trace::RouteTrace;

/// Probability that a token uses an expert because the token before used it in the same layer.
/// source: fitted to one recording, of Qwen3-30B-A3B (docs/studies/experts); other models are untested
const REPETITION_PROBABILITY: f64 = 0.25;
/// The popularity of an expert is `exp(-SKEW * rank / experts)`.
/// source: fitted to the same recording
const SKEW: f64 = 8.0;
/// Number of tokens after which a repeated choice is made anew at the latest, so that it can be looked up.
/// source: assumed, a chain this long has a probability below `1e-38`
const MAX_REPETITIONS: u32 = 64;

/// Factor by which a cache that evicts the least recently used experts must be larger for the hit rate of one that keeps
/// the most popular.
/// source: computed: replays of drawn routes, 1.35 to 1.45 for a quarter to three quarters of all experts
const LRU_FACTOR: f64 = 1.4;

/// Returns the expected share of the experts of a token that a cache does not have, if it holds the share `cached` of all
/// experts. A token uses the share `used`. Under `is_lru` the system evicts the least recently used experts, of which a
/// cache smaller than the experts of one token never has the next; otherwise the most popular ones stay.
pub fn expected_miss_rate(cached: f64, used: f64, is_lru: bool) -> f64 {
    if cached >= 1.0 {
        return 0.0;
    }
    if is_lru && cached < used {
        return 1.0;
    }
    let popular = if is_lru { cached / LRU_FACTOR } else { cached };
    let tail = |rank: f64| (-SKEW * rank).exp();
    ((tail(popular.max(0.0)) - tail(1.0)) / (1.0 - tail(1.0))).clamp(0.0, 1.0)
}

/// Experts by layer, in the order of use.
type LayerExperts = Vec<Vec<u32>>;

/// The routes of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedRoutes {
    /// The experts that the whole prompt uses.
    prompt: LayerExperts,
    /// The experts of each generated token; at least one.
    tokens: Vec<LayerExperts>,
}

impl RecordedRoutes {
    /// Reads the routes of a recording for a model. Fails with a reason if the recording is of another model.
    pub fn new(trace: &RouteTrace, model: &ModelProfile) -> Result<Self, String> {
        let (layers, count) = (model.shape.layers.0 as usize, model.shape.experts.map(|it| it.count));
        let recorded = (trace.expert_bytes.len(), trace.expert_count);
        match count {
            None => return Err(format!("`{}` is not a mixture of experts", model.name)),
            Some(count) if recorded != (layers, count) => {
                return Err(format!(
                    "the recording is of a model with {} layers of {} experts, but `{}` has {layers} layers of {count}",
                    recorded.0, recorded.1, model.name
                ));
            }
            Some(_) => {}
        }
        let mut routes = Self { prompt: vec![Vec::new(); layers], tokens: Vec::new() };
        for batch in &trace.batches {
            let layer = batch.layer as usize;
            if !batch.is_decode {
                let own = &mut routes.prompt[layer];
                own.extend(batch.experts.iter().filter(|expert| !own.contains(expert)).collect::<Vec<_>>());
                continue;
            }
            // The layers of a token are recorded in order.
            let is_new = routes.tokens.last().is_none_or(|token| {
                !token[layer].is_empty() || token[layer..].iter().any(|experts| !experts.is_empty())
            });
            if is_new {
                routes.tokens.push(vec![Vec::new(); layers]);
            }
            if let Some(token) = routes.tokens.last_mut() {
                token[layer].clone_from(&batch.experts);
            }
            if is_new && routes.tokens.len() > 1 {
                routes.check_token(routes.tokens.len() - 2, model)?;
            }
        }
        if routes.tokens.is_empty() {
            return Err("the recording has no generated tokens".to_owned());
        }
        routes.check_token(routes.tokens.len() - 1, model)?;
        Ok(routes)
    }

    /// Returns the experts of the generated token `index` in a layer. After its last token, the recording begins again.
    fn generated_token(&self, layer: u32, index: usize) -> &[u32] {
        &self.tokens[index % self.tokens.len()][layer as usize]
    }

    /// Returns the experts of a token in a layer, for a sequence whose prompt has `prompt_tokens` tokens. The tokens of
    /// the prompt divide the experts of the recorded prompt among them.
    pub fn token_experts(&self, layer: u32, position: u32, prompt_tokens: u32) -> Vec<u32> {
        if let Some(generated) = position.checked_sub(prompt_tokens) {
            return self.generated_token(layer, generated as usize).to_vec();
        }
        let (prompt, used) = (&self.prompt[layer as usize], self.generated_token(layer, 0).len());
        let first = position as usize * used;
        (first..first + used.min(prompt.len())).map(|slot| prompt[slot % prompt.len()]).collect()
    }

    /// Checks that a token uses experts in every layer that has some.
    fn check_token(&self, token: usize, model: &ModelProfile) -> Result<(), String> {
        let has_experts = |layer: &u32| model.shape.layer_experts(*layer).is_some();
        let is_missing = |layer: &u32| has_experts(layer) && self.tokens[token][*layer as usize].is_empty();
        match (0..model.shape.layers.0).find(is_missing) {
            Some(layer) => {
                Err(format!("the recording has no experts of layer {layer} for generated token {token}"))
            }
            None => Ok(()),
        }
    }
}

/// The routes of a run.
#[derive(Debug, Clone, Copy)]
pub struct ExpertRoutes<'a> {
    pub shape: Experts,
    pub recorded: Option<&'a RecordedRoutes>,
    /// Number of tokens of a prompt, after which generated tokens follow.
    pub prompt_tokens: u32,
    /// The random seed of drawn routes.
    pub seed: u64,
}

/// Number of tokens by which a sequence begins later in the recording than the one before, so that the tokens of a batch
/// differ. source: assumed, any number that is not a divisor of a usual length
const RECORDING_SHIFT: usize = 37;

impl ExpertRoutes<'_> {
    /// Returns the different experts that the tokens of passes use in a layer, in ascending order.
    pub fn experts_used(&self, layer: u32, passes: &[Pass]) -> Vec<u32> {
        let mut used = BTreeSet::new();
        for pass in passes {
            let end = pass.first_position + pass.tokens;
            match self.recorded {
                Some(recorded) => {
                    if pass.first_position < self.prompt_tokens {
                        used.extend(&recorded.prompt[layer as usize]);
                    }
                    for position in pass.first_position.max(self.prompt_tokens)..end {
                        let token = (position - self.prompt_tokens) as usize
                            + pass.sequence_index as usize * RECORDING_SHIFT;
                        used.extend(recorded.generated_token(layer, token));
                    }
                }
                None => {
                    for position in pass.first_position..end {
                        if used.len() == self.shape.count as usize {
                            break;
                        }
                        used.extend(self.drawn_experts(layer, pass.sequence_index, position));
                    }
                }
            }
        }
        used.into_iter().collect()
    }

    /// Draws the experts of a token.
    fn drawn_experts(&self, layer: u32, sequence: u32, position: u32) -> Vec<u32> {
        let Experts { count, used, .. } = self.shape;
        let mut experts: Vec<u32> = Vec::with_capacity(used as usize);
        for slot in 0..used {
            let draw = |position: u32, kind: u64| {
                let words =
                    [u64::from(sequence), u64::from(position), u64::from(layer), u64::from(slot), kind];
                uniform(words.into_iter().fold(self.seed, |hash, word| mix(hash ^ word)))
            };
            let oldest = position.saturating_sub(MAX_REPETITIONS);
            let is_repeated =
                |position: &u32| *position > oldest && draw(*position, 0) < REPETITION_PROBABILITY;
            let mut chosen_at = position;
            while is_repeated(&chosen_at) {
                chosen_at -= 1;
            }
            // The inverse of the exponential distribution, cut off at the last rank.
            let quantile = draw(chosen_at, 1) * (1.0 - (-SKEW).exp());
            let rank = ((-(1.0 - quantile).ln() / SKEW * f64::from(count)) as u32).min(count - 1);
            // Another slot may have the expert already.
            let candidates = (0..count).map(|next| (rank + next) % count);
            experts.extend(candidates.into_iter().find(|expert| !experts.contains(expert)));
        }
        experts
    }
}

/// Returns a random number for a number (SplitMix64; Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
/// generators"). A token needs a thousand draws, for which a random stream each would be slow.
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Converts random bits to a number in [0, 1).
fn uniform(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use hearth_profiles::Bytes;
    use hearth_profiles::model::shipped_profile;
    use hearth_schema::route_trace::RouteBatch;

    use super::*;
    use crate::expert_cache::{EvictionPolicy, replay, statistics};

    fn routes() -> ExpertRoutes<'static> {
        let shape = Experts {
            count: 128,
            used: 6,
            feed_forward_length: 768,
            shared_feed_forward_length: 0,
            dense_layers: 0,
        };
        ExpertRoutes { shape, recorded: None, prompt_tokens: 28, seed: 1 }
    }

    fn pass(first_position: u32, tokens: u32) -> Pass {
        Pass {
            index: 0,
            first_position,
            tokens,
            has_output: true,
            sequence_index: 0,
            drafted: 0,
            is_joined: false,
        }
    }

    /// Draws the routes of a prompt of 28 tokens and 128 tokens after it, like the recording of Qwen3-30B-A3B.
    fn drawn_trace() -> RouteTrace {
        let routes = routes();
        let mut batches = Vec::new();
        for token in 0..129 {
            let passes = if token == 0 { [pass(0, 28)] } else { [pass(27 + token, 1)] };
            for layer in 0..48 {
                let experts = routes.experts_used(layer, &passes);
                batches.push(RouteBatch { layer, is_decode: token > 0, experts });
            }
        }
        let expert_bytes = vec![Bytes(2_860_000); 48];
        RouteTrace { model: String::new(), expert_count: 128, expert_bytes, batches }
    }

    #[test]
    fn drawn_routes_look_like_recorded_ones() {
        let trace = drawn_trace();
        let found = statistics(&trace);
        // Repeated experts, uses of the most used tenth, and the experts that are used at all.
        let used = found.working_set.as_f64() / found.all_experts.as_f64();
        for (found, recorded) in [(found.repetition, 0.377), (found.top_tenth, 0.580), (used, 0.501)] {
            assert!((found - recorded).abs() < 0.02, "{found} instead of {recorded}");
        }
        for (mib, recorded) in [(1000, 35.1), (2000, 52.7), (4000, 74.9), (6000, 85.9), (8000, 89.5)] {
            let found = 100.0 * replay(&trace, EvictionPolicy::Lru, Bytes::from_mib(mib)).hit_rate;
            assert!((found - recorded).abs() < 3.0, "{mib} MiB: {found} % of hits instead of {recorded} %");
        }
    }

    #[test]
    fn expected_misses_are_those_of_a_replay() {
        let trace = drawn_trace();
        let all = statistics(&trace).all_experts.as_f64();
        let used = 6.0 / 128.0;
        for (policy, is_lru) in [(EvictionPolicy::NextUse, false), (EvictionPolicy::Lru, true)] {
            for mib in [1000, 2000, 4000, 6000] {
                let cache = Bytes::from_mib(mib);
                let found = 1.0 - replay(&trace, policy, cache).hit_rate_decode;
                let expected = expected_miss_rate(cache.as_f64() / all, used, is_lru);
                assert!(
                    (found - expected).abs() < 0.08,
                    "{policy:?}, {mib} MiB: {expected} instead of {found}"
                );
            }
        }
        assert_eq!(expected_miss_rate(0.03, used, true), 1.0);
        assert_eq!([false, true].map(|is_lru| expected_miss_rate(1.0, used, is_lru)), [0.0; 2]);
        assert_eq!(expected_miss_rate(0.0, used, false), 1.0);
    }

    #[test]
    fn recorded_tokens_are_followed_and_begin_again() {
        let batch =
            |layer, is_decode, experts: &[u32]| RouteBatch { layer, is_decode, experts: experts.into() };
        let shape = shipped_profile("qwen3-30b-a3b").expect("shipped").shape;
        let layers = shape.layers.0;
        let mut batches: Vec<RouteBatch> =
            (0..layers).map(|layer| batch(layer, false, &[9, layer])).collect();
        for token in 0..2 {
            batches.extend((0..layers).map(|layer| batch(layer, true, &[layer + token, 100])));
        }
        let expert_bytes = vec![Bytes(1); layers as usize];
        let trace = RouteTrace { model: String::new(), expert_count: 128, expert_bytes, batches };
        let model = shipped_profile("qwen3-30b-a3b").expect("shipped");
        let recorded = RecordedRoutes::new(&trace, &model).expect("of this model");
        let routes = ExpertRoutes { recorded: Some(&recorded), prompt_tokens: 28, ..routes() };
        let used = |first, tokens| routes.experts_used(3, &[pass(first, tokens)]);
        assert_eq!(used(0, 28), [3, 9]);
        assert_eq!([used(28, 1), used(29, 1), used(30, 1)], [[3, 100], [4, 100], [3, 100]]);
        assert_eq!(used(28, 2), [3, 4, 100]);
        // The tokens of a prompt of any length divide the experts of the recorded one.
        let replayed = |position| recorded.token_experts(3, position, 2);
        assert_eq!([0, 1, 2, 3, 4].map(replayed), [[9, 3], [9, 3], [3, 100], [4, 100], [3, 100]]);
        let other = RouteTrace { expert_count: 64, ..trace.clone() };
        let error = RecordedRoutes::new(&other, &model).unwrap_err();
        assert!(
            error.contains("48 layers of 64 experts, but `qwen3-30b-a3b` has 48 layers of 128"),
            "{error}"
        );
        let dense = shipped_profile("llama-8b").expect("shipped");
        assert!(RecordedRoutes::new(&trace, &dense).unwrap_err().contains("not a mixture"));
        let mut torn = trace.clone();
        torn.batches.remove(50);
        let error = RecordedRoutes::new(&torn, &model).unwrap_err();
        assert!(error.contains("no experts of layer 2 for generated token 0"), "{error}");
        let prompt_only = RouteTrace { batches: trace.batches[..48].to_vec(), ..trace };
        assert!(RecordedRoutes::new(&prompt_only, &model).unwrap_err().contains("no generated tokens"));
    }
}
