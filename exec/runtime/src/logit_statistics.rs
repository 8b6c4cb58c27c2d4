//! Statistics of the logits from which tokens are sampled, which show when a model has become meaningless.
//!
//! Damaged weights often still give finite logits and some text. A sign of them is a distribution of the next token
//! that is almost uniform: a trained model has an entropy of a few nats, and a distribution over V tokens has at most
//! ln V. The statistics are a hint, not a check: most damage does not change them. `hearth_ring` compares the weights
//! with their digests.

use hearth_kernels::InstructionSet;
use hearth_kernels::elementwise::exponential_sums;

/// The share of the maximum entropy ln V above which a distribution counts as almost uniform.
/// source: normally distributed logits of standard deviation s have the entropy ln V - s^2 / 2, so that s is below 1.5
/// for V = 50,000; the logits of trained models vary more, and a perplexity of V^0.9 is one of an untrained model
const MAX_ENTROPY_SHARE: f64 = 0.9;
/// The share of the tokens that must be suspicious before the text is.
/// source: assumed; a trained model may be undecided at some tokens, but not at most
const SUSPICIOUS_SHARE: f64 = 0.5;

/// The statistics of the logits of a run.
#[derive(Debug, Clone)]
pub struct LogitStatistics {
    instructions: InstructionSet,
    tokens: u64,
    max_abs: f32,
    entropy_sum: f64,
    max_entropy: f64,
    almost_uniform_tokens: u64,
    equal_tokens: u64,
}

/// The summary of the logits of a run. Entropies are those of the softmax of the logits, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitSummary {
    /// The largest absolute value of a logit.
    pub max_abs: f32,
    pub mean_entropy: f64,
    /// The entropy of equal logits, ln V for a vocabulary of V tokens.
    pub max_entropy: f64,
    /// The share of the tokens whose distribution was almost uniform.
    pub almost_uniform_share: f64,
    /// The share of the tokens whose logits were all equal.
    pub equal_share: f64,
}

impl Default for LogitStatistics {
    fn default() -> Self {
        Self {
            instructions: InstructionSet::detect(),
            tokens: 0,
            max_abs: 0.0,
            entropy_sum: 0.0,
            max_entropy: 0.0,
            almost_uniform_tokens: 0,
            equal_tokens: 0,
        }
    }
}

impl LogitStatistics {
    /// Records the logits `[vocabulary]` of a token, which must be finite.
    pub fn record(&mut self, logits: &[f32]) {
        let (smallest, largest) = range(logits);
        let mut sums = [0.0; 2];
        exponential_sums(self.instructions, logits, largest, &mut sums);
        let [powers, weighted] = sums.map(f64::from);
        let entropy = powers.ln() - weighted / powers;
        self.max_entropy = (logits.len().max(1) as f64).ln();
        self.tokens += 1;
        self.max_abs = self.max_abs.max(largest.abs()).max(smallest.abs());
        self.entropy_sum += entropy;
        self.almost_uniform_tokens += u64::from(entropy > MAX_ENTROPY_SHARE * self.max_entropy);
        self.equal_tokens += u64::from(smallest == largest);
    }

    /// Returns the summary of all recorded tokens; `None` if there are none.
    pub fn summary(&self) -> Option<LogitSummary> {
        let share = |tokens: u64| tokens as f64 / self.tokens as f64;
        (self.tokens > 0).then(|| LogitSummary {
            max_abs: self.max_abs,
            mean_entropy: self.entropy_sum / self.tokens as f64,
            max_entropy: self.max_entropy,
            almost_uniform_share: share(self.almost_uniform_tokens),
            equal_share: share(self.equal_tokens),
        })
    }
}

impl LogitSummary {
    /// Returns the reason why the text may be meaningless, as a clause; `None` if the logits look like those of a
    /// trained model.
    pub fn suspicion(&self) -> Option<String> {
        if self.equal_share > SUSPICIOUS_SHARE {
            return Some(format!("all logits are equal for {:.0} % of the tokens", 100.0 * self.equal_share));
        }
        (self.almost_uniform_share > SUSPICIOUS_SHARE).then(|| {
            format!(
                "the model finds almost all tokens equally likely (entropy {:.1} of at most {:.1} nats)",
                self.mean_entropy, self.max_entropy
            )
        })
    }
}

/// Returns the smallest and the largest value; those that are not numbers do not count. Without numbers they are plus
/// and minus infinity.
pub(crate) fn range(values: &[f32]) -> (f32, f32) {
    let (mut smallest, mut largest) = ([f32::INFINITY; 8], [f32::NEG_INFINITY; 8]);
    for chunk in values.chunks(8) {
        for ((value, smallest), largest) in chunk.iter().zip(&mut smallest).zip(&mut largest) {
            *smallest = if value < smallest { *value } else { *smallest };
            *largest = if value > largest { *value } else { *largest };
        }
    }
    (
        smallest.into_iter().fold(f32::INFINITY, f32::min),
        largest.into_iter().fold(f32::NEG_INFINITY, f32::max),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(rows: &[&[f32]]) -> LogitSummary {
        let mut statistics = LogitStatistics::default();
        for row in rows {
            statistics.record(row);
        }
        statistics.summary().expect("a token")
    }

    #[test]
    fn entropy_and_range_are_those_of_the_softmax() {
        assert_eq!(LogitStatistics::default().summary(), None);
        // The probabilities are 1/2, 1/4, 1/8 and 1/8: 1/2 ln 2 + 1/4 ln 4 + 2/8 ln 8 = 1.75 ln 2.
        let ln2 = std::f32::consts::LN_2;
        let halves = [5.0, 5.0 - ln2, 5.0 - 2.0 * ln2, 5.0 - 2.0 * ln2];
        let one = summary(&[&halves]);
        assert!((one.mean_entropy - 1.75 * f64::from(ln2)).abs() < 1e-6, "{one:?}");
        assert!((one.max_entropy - 4f64.ln()).abs() < 1e-12 && one.max_abs == 5.0, "{one:?}");
        // One token is certain, so its entropy is 0.
        let two = summary(&[&halves, &[-90.0, 0.0, -90.0, -90.0]]);
        assert!((two.mean_entropy - 0.875 * f64::from(ln2)).abs() < 1e-6 && two.max_abs == 90.0, "{two:?}");
    }

    #[test]
    fn almost_uniform_and_equal_logits_are_suspicious() {
        let sharp: Vec<f32> = (0..2000).map(|token| if token == 7 { 12.0 } else { 0.0 }).collect();
        let flat: Vec<f32> = (0..2000).map(|token| (token % 7) as f32 * 0.1).collect();
        let equal = vec![3.0; 2000];
        assert_eq!(summary(&[&sharp, &sharp, &flat]).suspicion(), None, "most tokens are fine");
        let almost = summary(&[&sharp, &flat, &flat]).suspicion().expect("most tokens are uniform");
        assert!(almost.contains("equally likely") && almost.contains("7.6 nats"), "{almost}");
        let constant = summary(&[&equal, &equal, &sharp]).suspicion().expect("most logits are equal");
        assert!(constant.contains("equal for 67 %"), "{constant}");
    }
}
