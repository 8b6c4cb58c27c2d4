//! The sampler: chooses the next token from logits.
//!
//! Before anything else, biases are added to logits and penalties are applied to tokens that occurred before. Three
//! penalties are common: the logit of a generated token is reduced by the presence penalty, and by the frequency penalty
//! for each time that it was generated (OpenAI's API). The logit of a token of the prompt or the answer is divided by the
//! repeat penalty, or multiplied if it is negative (Keskar et al., 2019, section 4.1).
//!
//! A grammar excludes the tokens that cannot continue the text.
//!
//! Temperature 0 means greedy sampling: the token with the largest logit, and among equal logits the one with the
//! lowest id. Otherwise the sampler keeps the k most likely tokens (top-k), then the smallest set of the most likely
//! tokens whose total probability is at least p (top-p), drops those that are less likely than a fraction of the most
//! likely token (min-p), and draws a token from this set with a `ChaCha8` random number
//! generator. The exponential function is implemented in `hearth_kernels`, so that a seed gives the same text on every
//! platform.

use std::collections::{BTreeMap, BTreeSet};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::ExecError;
use crate::grammar::GrammarMatcher;
use crate::logit_statistics::range;
use hearth_kernels::exponential;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// The temperature; 0 means greedy sampling.
    pub temperature: f32,
    /// The maximum number of candidate tokens (top-k); 0 keeps all tokens.
    pub top_k: usize,
    /// The threshold of nucleus sampling (top-p), a probability; 1 keeps all candidate tokens.
    pub top_p: f32,
    /// The minimum probability of a candidate, as a fraction of that of the most likely token (min-p); 0 keeps all.
    pub min_p: f32,
    /// What the logit of a token loses if the token was generated before.
    pub presence_penalty: f32,
    /// What the logit of a token loses for each time that the token was generated before.
    pub frequency_penalty: f32,
    /// The divisor of the logit of a token that occurred in the prompt or the answer; 1 leaves it.
    pub repeat_penalty: f32,
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_penalty: 1.0,
            seed: 0,
        }
    }
}

/// Chooses tokens from logits with the given [`SamplerOptions`].
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    stream: ChaCha8Rng,
    candidates: Vec<u32>,
    /// The tokens of the prompt.
    prompt: BTreeSet<u32>,
    /// How often each token was generated.
    counts: BTreeMap<u32, u32>,
    /// What is added to the logits of some tokens.
    biases: BTreeMap<u32, f32>,
    /// Restricts the text.
    grammar: Option<GrammarMatcher>,
    adjusted: Vec<f32>,
}

impl Sampler {
    /// Creates a sampler. Fails if an option is out of range.
    pub fn new(options: SamplerOptions) -> Result<Sampler, ExecError> {
        let SamplerOptions { temperature, top_p, min_p, repeat_penalty, .. } = options;
        let rejected = |name, value, range| Err(ExecError::Sampling { name, value, range });
        if !(temperature.is_finite() && temperature >= 0.0) {
            return rejected("temperature", temperature, "0 (greedy) or a larger number");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return rejected("top_p", top_p, "a number above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return rejected("min_p", min_p, "a number from 0 to 1");
        }
        if !(repeat_penalty.is_finite() && repeat_penalty > 0.0) {
            return rejected("repeat_penalty", repeat_penalty, "a number above 0 (1 has no effect)");
        }
        let additive = [
            ("presence_penalty", options.presence_penalty),
            ("frequency_penalty", options.frequency_penalty),
        ];
        if let Some((name, value)) = additive.into_iter().find(|(_, value)| !(-2.0..=2.0).contains(value)) {
            return rejected(name, value, "a number from -2 to 2");
        }
        Ok(Sampler::with_stream(options, ChaCha8Rng::seed_from_u64(options.seed)))
    }

    fn with_stream(options: SamplerOptions, stream: ChaCha8Rng) -> Sampler {
        Sampler {
            options,
            stream,
            candidates: Vec::new(),
            prompt: BTreeSet::new(),
            counts: BTreeMap::new(),
            biases: BTreeMap::new(),
            grammar: None,
            adjusted: Vec::new(),
        }
    }

    /// Sets the tokens of the prompt, to which the repeat penalty applies, and what is added to the logits of tokens.
    #[must_use]
    pub fn with_prompt_and_biases(mut self, prompt: &[u32], biases: &BTreeMap<u32, f32>) -> Sampler {
        if self.options.repeat_penalty != 1.0 {
            self.prompt = prompt.iter().copied().collect();
        }
        self.biases.clone_from(biases);
        self
    }

    /// Restricts the text to a grammar.
    #[must_use]
    pub fn with_grammar(self, grammar: GrammarMatcher) -> Sampler {
        Sampler { grammar: Some(grammar), ..self }
    }

    /// Creates a sampler for the sequence with the index `sequence`. It has the same options and its own random stream,
    /// which depends on the seed and the index. Sequence 0 has the random stream of [`Sampler::new`].
    #[must_use]
    pub fn for_sequence(&self, sequence: u32) -> Sampler {
        let mut stream = ChaCha8Rng::seed_from_u64(self.options.seed);
        stream.set_stream(u64::from(sequence));
        Sampler::with_stream(self.options, stream)
    }

    /// Chooses the next token from the logits `[vocabulary]`.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let SamplerOptions { presence_penalty, frequency_penalty, repeat_penalty, .. } = self.options;
        let has_penalty = (presence_penalty, frequency_penalty, repeat_penalty) != (0.0, 0.0, 1.0);
        if !has_penalty && self.biases.is_empty() && self.grammar.is_none() {
            return self.choose(logits);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        self.adjust(&mut adjusted);
        if let Some(grammar) = &mut self.grammar {
            grammar.restrict(&mut adjusted);
        }
        let token = self.choose(&adjusted);
        self.adjusted = adjusted;
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(token);
        }
        if has_penalty {
            *self.counts.entry(token).or_default() += 1;
        }
        token
    }

    fn adjust(&self, logits: &mut [f32]) {
        let SamplerOptions { presence_penalty, frequency_penalty, repeat_penalty, .. } = self.options;
        for (&token, &bias) in &self.biases {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        let only_generated = self.counts.keys().filter(|token| !self.prompt.contains(token));
        for &token in self.prompt.iter().chain(only_generated) {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repeat_penalty } else { *logit * repeat_penalty };
        }
        for (&token, &count) in &self.counts {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= presence_penalty + frequency_penalty * count as f32;
            }
        }
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        if self.options.temperature == 0.0 {
            return greedy_token(logits);
        }
        let more_likely = |a: &u32, b: &u32| {
            let (x, y) = (logits[*a as usize], logits[*b as usize]);
            y.total_cmp(&x).then_with(|| a.cmp(b))
        };
        self.candidates.clear();
        self.candidates.extend((0..logits.len() as u32).filter(|&token| !logits[token as usize].is_nan()));
        let Some(last) = self.candidates.len().checked_sub(1) else { return 0 };
        let keep = if self.options.top_k == 0 { last + 1 } else { self.options.top_k.min(last + 1) };
        if keep <= last {
            self.candidates.select_nth_unstable_by(keep, more_likely);
            self.candidates.truncate(keep);
        }
        self.candidates.sort_unstable_by(more_likely);
        let best = logits[self.candidates[0] as usize];
        let weight =
            |token: u32| f64::from(exponential((logits[token as usize] - best) / self.options.temperature));
        let weights: Vec<f64> = self.candidates.iter().map(|&token| weight(token)).collect();
        let wanted = f64::from(self.options.top_p) * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        let mut kept = reached.map_or(weights.len(), |index| index + 1);
        // The weight of the most likely token is 1.
        let is_unlikely = |weight: &f64| *weight < f64::from(self.options.min_p);
        if let Some(unlikely) = weights[..kept].iter().position(is_unlikely) {
            kept = unlikely;
            sum = weights[..kept].iter().sum();
        }
        // A uniform number in 0..1 with 53 random bits, the precision of an f64.
        let uniform = (self.stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * sum;
        let drawn = weights[..kept].iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        self.candidates[drawn.unwrap_or(kept - 1)]
    }
}

/// Returns the token with the largest logit; among equal logits, the token with the lowest id.
pub fn greedy_token(logits: &[f32]) -> u32 {
    let (_, largest) = range(logits);
    // The compiler vectorises loops without an early exit.
    let has_largest = |part: &[f32]| part.iter().filter(|logit| **logit == largest).count() > 0;
    let first = SEARCH_CHUNK * logits.chunks(SEARCH_CHUNK).position(has_largest).unwrap_or(0);
    let within = logits[first..].iter().position(|logit| *logit == largest);
    (first + within.unwrap_or(0)) as u32
}

/// The number of logits that [`greedy_token`] compares at once.
const SEARCH_CHUNK: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f32) -> Sampler {
        Sampler::new(SamplerOptions { temperature, top_k, top_p, seed: 7, ..SamplerOptions::default() })
            .unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(greedy_token(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
        assert_eq!(greedy_token(&[f32::NAN; 3]), 0);
        for largest in [0, 255, 256, 700, 999u32] {
            let logits: Vec<f32> = (0..1000).map(|token| if token < largest { -1.0 } else { 2.0 }).collect();
            assert_eq!(greedy_token(&logits), largest);
        }
        assert_eq!(sampler(0.0, 0, 1.0).sample(&[0.5, -1.0]), 0);
    }

    #[test]
    fn only_likely_tokens_are_drawn() {
        // Probabilities 0.64, 0.24, 0.09, 0.03.
        let logits = [1.0, 3.0, 2.0, 0.0];
        let drawn = |mut sampler: Sampler| {
            let mut seen = [0; 4];
            for _ in 0..2000 {
                seen[sampler.sample(&logits) as usize] += 1;
            }
            seen
        };
        let all = drawn(sampler(1.0, 0, 1.0));
        assert!((1200..1370).contains(&all[1]) && all[3] > 30, "{all:?}");
        let two = drawn(sampler(1.0, 2, 1.0));
        assert!(two[0] == 0 && two[3] == 0 && two[2] > 400, "{two:?}");
        // 0.64 < 0.8 <= 0.64 + 0.24.
        let likely = drawn(sampler(1.0, 0, 0.8));
        assert!(likely[0] == 0 && likely[3] == 0 && likely[2] > 400, "{likely:?}");
    }

    #[test]
    fn min_p_drops_tokens_that_are_unlikely_beside_the_best() {
        // The second token is 0.37 times as likely as the first, the third 0.14 times.
        let options =
            SamplerOptions { temperature: 1.0, top_p: 1.0, min_p: 0.3, ..SamplerOptions::default() };
        let mut sampler = Sampler::new(options).unwrap();
        let drawn: Vec<u32> = (0..500).map(|_| sampler.sample(&[0.0, 3.0, 2.0, 1.0])).collect();
        assert!(drawn.iter().all(|token| [1, 2].contains(token)) && drawn.contains(&2), "{drawn:?}");
    }

    #[test]
    fn penalties_and_biases_change_the_greedy_choice() {
        let tokens = |options: SamplerOptions, prompt: &[u32], biases: &[(u32, f32)]| {
            let biases = biases.iter().copied().collect();
            let mut sampler = Sampler::new(options).unwrap().with_prompt_and_biases(prompt, &biases);
            (0..4).map(|_| sampler.sample(&[2.0, 1.5, 1.1, -1.0])).collect::<Vec<_>>()
        };
        let none = SamplerOptions::default();
        assert_eq!(tokens(none, &[0], &[]), [0, 0, 0, 0]);
        assert_eq!(tokens(none, &[], &[(3, 4.0), (9, 1.0)]), [3, 3, 3, 3]);
        // 2.0 - 0.6 = 1.4, then 1.5 - 0.6 = 0.9; a second time costs nothing more.
        let presence = SamplerOptions { presence_penalty: 0.6, ..none };
        assert_eq!(tokens(presence, &[], &[]), [0, 1, 0, 0]);
        let frequency = SamplerOptions { frequency_penalty: 0.6, ..none };
        assert_eq!(tokens(frequency, &[], &[]), [0, 1, 0, 2]);
        // 2.0 / 1.5 = 1.33 for the token of the prompt; negative logits are multiplied.
        let repeat = SamplerOptions { repeat_penalty: 1.5, ..none };
        assert_eq!(tokens(repeat, &[0], &[]), [1, 0, 0, 0]);
    }

    #[test]
    fn options_out_of_range_are_rejected_by_name() {
        let none = SamplerOptions::default();
        for (options, name) in [
            (SamplerOptions { min_p: 1.5, ..none }, "min_p"),
            (SamplerOptions { presence_penalty: f32::NAN, ..none }, "presence_penalty"),
            (SamplerOptions { frequency_penalty: -2.1, ..none }, "frequency_penalty"),
            (SamplerOptions { repeat_penalty: 0.0, ..none }, "repeat_penalty"),
        ] {
            let message = Sampler::new(options).unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{name}` is")), "{message}");
        }
    }

    fn draw(mut sampler: Sampler) -> Vec<u32> {
        let logits: Vec<f32> = (0..50).map(|token| (token * 7 % 11) as f32).collect();
        (0..100).map(|_| sampler.sample(&logits)).collect()
    }

    #[test]
    fn equal_seeds_give_equal_tokens_and_each_sequence_has_its_own_stream() {
        assert_eq!(draw(sampler(0.8, 40, 0.95)), draw(sampler(0.8, 40, 0.95)));
        let seed = sampler(0.8, 40, 0.95);
        let [first, second, third] = [0, 1, 2].map(|sequence| draw(seed.for_sequence(sequence)));
        assert_eq!(first, draw(seed.clone()));
        assert!(first != second && second != third && first != third, "{first:?}");
    }

    #[test]
    fn a_negative_temperature_is_rejected() {
        let options = SamplerOptions { temperature: -1.0, ..SamplerOptions::default() };
        assert!(Sampler::new(options).unwrap_err().to_string().starts_with("`temperature` is -1"));
    }
}
