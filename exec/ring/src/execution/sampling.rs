//! Sampling: chooses the tokens of a pass, and accepts or rejects drafts.
//!
//! Each sequence has its own sampler, which is called once per token and in order, as if there were no drafts: it
//! receives the same logits and draws the same number of random values. A draft is accepted if it is equal to the
//! sampled token. So drafts change neither greedy nor sampled text. (The method of Leviathan et al., 2023, accepts
//! more drafts, but preserves only the distribution of the text.)

use std::collections::BTreeMap;

/// Samples the next token from the logits.
pub type SampleFn = Box<dyn FnMut(&[f32]) -> u32 + Send>;

/// The samplers of the sequences of a request, or of a server's active requests.
pub struct Samplers {
    samplers: BTreeMap<u32, SampleFn>,
    stop_tokens: Vec<u32>,
}

impl Samplers {
    /// Assigns one sampler to each sequence, in order. A token in `stop_tokens` ends a sequence.
    pub fn new(samplers: Vec<SampleFn>, stop_tokens: Vec<u32>) -> Self {
        Self { samplers: (0..).zip(samplers).collect(), stop_tokens }
    }

    /// Removes and returns the sampler of a sequence.
    pub fn take(&mut self, sequence: u32) -> Option<SampleFn> {
        self.samplers.remove(&sequence)
    }

    pub fn set(&mut self, sequence: u32, sampler: SampleFn) {
        self.samplers.insert(sequence, sampler);
    }

    /// Returns the generated tokens: the accepted drafts, and one more token. `logits` has the shape `[drafts + 1,
    /// vocabulary]`: a row before the first draft and a row after each draft. Returns `None` for an unknown sequence.
    pub fn sample(&mut self, sequence: u32, logits: &[f32], drafts: &[u32]) -> Option<Vec<u32>> {
        let Self { samplers, stop_tokens } = self;
        let sample = samplers.get_mut(&sequence)?;
        let vocabulary = (logits.len() / (drafts.len() + 1)).max(1);
        let mut tokens = Vec::new();
        for (at, row) in logits.chunks_exact(vocabulary).enumerate() {
            let token = sample(row);
            tokens.push(token);
            if drafts.get(at) != Some(&token) || stop_tokens.contains(&token) {
                break;
            }
        }
        Some(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_runtime::sampler::greedy_token;

    /// Returns one row of logits per element of `largest`, which is the token with the largest logit in this row.
    fn rows(largest: &[usize]) -> Vec<f32> {
        let row = |&best: &usize| (0..8).map(move |token| if token == best { 1.0 } else { 0.0 });
        largest.iter().flat_map(row).collect()
    }

    #[test]
    fn drafts_are_accepted_up_to_the_first_wrong_one() {
        let mut samplers = Samplers::new(vec![Box::new(greedy_token)], vec![5]);
        let mut tokens = |largest: &[usize], drafts: &[u32]| samplers.sample(0, &rows(largest), drafts);
        assert_eq!(tokens(&[3], &[]), Some(vec![3]));
        assert_eq!(tokens(&[3, 4, 6], &[3, 4]), Some(vec![3, 4, 6]), "all drafts are accepted");
        assert_eq!(tokens(&[3, 4, 6], &[3, 7]), Some(vec![3, 4]), "4 corrects 7");
        assert_eq!(tokens(&[3, 4, 6], &[7, 4]), Some(vec![3]), "drafts after a rejected one are ignored");
        assert_eq!(tokens(&[3, 5, 6], &[3, 5]), Some(vec![3, 5]), "the text ends with 5");
        assert_eq!(samplers.sample(1, &rows(&[3]), &[]), None);
    }

    #[test]
    fn sampler_is_called_once_a_token() {
        let calls = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counter = calls.clone();
        let sample = move |row: &[f32]| {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            greedy_token(row)
        };
        let mut samplers = Samplers::new(vec![Box::new(sample)], vec![]);
        let out = samplers.sample(0, &rows(&[1, 2, 3, 4]), &[1, 2, 7]).unwrap();
        assert_eq!((out, calls.load(std::sync::atomic::Ordering::Relaxed)), (vec![1, 2, 3], 3));
    }
}
