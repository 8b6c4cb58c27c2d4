//! The sampler: chooses the next token from logits.
//!
//! Temperature 0 means greedy sampling: the token with the largest logit, and among equal logits the one with the
//! lowest id. Otherwise the sampler keeps the k most likely tokens (top-k), then the smallest set of the most likely
//! tokens whose total probability is at least p (top-p), and draws a token from this set with a `ChaCha8` random number
//! generator. The exponential function is implemented in `hearth_kernels`, so that a seed gives the same text on every
//! platform.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::ExecError;
use hearth_kernels::exponential;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// The temperature; 0 means greedy sampling.
    pub temperature: f32,
    /// The maximum number of candidate tokens (top-k); 0 keeps all tokens.
    pub top_k: usize,
    /// The threshold of nucleus sampling (top-p), a probability; 1 keeps all candidate tokens.
    pub top_p: f32,
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions { temperature: 0.0, top_k: 40, top_p: 0.95, seed: 0 }
    }
}

/// Chooses tokens from logits with the given [`SamplerOptions`].
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    stream: ChaCha8Rng,
    candidates: Vec<u32>,
}

impl Sampler {
    /// Creates a sampler. Fails if the temperature or top-p is out of range.
    pub fn new(options: SamplerOptions) -> Result<Sampler, ExecError> {
        let SamplerOptions { temperature, top_p, .. } = options;
        let rejected = |name, value, range| Err(ExecError::Sampling { name, value, range });
        if !(temperature.is_finite() && temperature >= 0.0) {
            return rejected("temperature", temperature, "0 (greedy) or a larger number");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return rejected("top_p", top_p, "a number above 0 and at most 1");
        }
        let stream = ChaCha8Rng::seed_from_u64(options.seed);
        Ok(Sampler { options, stream, candidates: Vec::new() })
    }

    /// Creates a sampler for the sequence with the index `sequence`. It has the same options and its own random stream,
    /// which depends on the seed and the index. Sequence 0 has the random stream of [`Sampler::new`].
    #[must_use]
    pub fn for_sequence(&self, sequence: u32) -> Sampler {
        let mut stream = ChaCha8Rng::seed_from_u64(self.options.seed);
        stream.set_stream(u64::from(sequence));
        Sampler { options: self.options, stream, candidates: Vec::new() }
    }

    /// Chooses the next token from the logits `[vocabulary]`.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
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
        let kept = reached.map_or(weights.len(), |index| index + 1);
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
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = token;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f32) -> Sampler {
        Sampler::new(SamplerOptions { temperature, top_k, top_p, seed: 7 }).unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(greedy_token(&[f32::NAN, 1.0, 3.0, 3.0]), 2);
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
