//! Sampling: chooses the tokens of a pass, and accepts or rejects drafts.
//!
//! Each sequence has its own sampler, which is called once per token and in order, as if there were no drafts: it
//! receives the same logits and draws the same number of random values. A draft is accepted if it is equal to the
//! sampled token. So drafts change neither greedy nor sampled text. (The method of Leviathan et al., 2023, accepts
//! more drafts, but preserves only the distribution of the text.)
//!
//! The sequence of a text whose embedding is wanted has no sampler: its output is a hidden state.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

/// Samples the next token from the logits.
pub type SampleFn = Box<dyn FnMut(&[f32]) -> u32 + Send>;

/// What is computed from the final hidden states of a sequence.
pub enum SequenceOutput {
    /// Tokens, which are sampled from the logits.
    Tokens(SampleFn),
    /// The hidden state `[embedding]` of the last token of the prompt, after the norm of the output layer. The sequence
    /// ends with it, without a token.
    Embedding(oneshot::Sender<Vec<f32>>),
}

/// The samplers of the sequences of a request, or of a server's active requests.
pub struct Samplers {
    outputs: BTreeMap<u32, SequenceOutput>,
    stop_tokens: Vec<u32>,
}

impl Samplers {
    /// Assigns one sampler to each sequence, in order. A token in `stop_tokens` ends a sequence.
    pub fn new(samplers: Vec<SampleFn>, stop_tokens: Vec<u32>) -> Self {
        let outputs = samplers.into_iter().map(SequenceOutput::Tokens);
        Self { outputs: (0..).zip(outputs).collect(), stop_tokens }
    }

    /// Removes and returns the output of a sequence.
    pub fn take(&mut self, sequence: u32) -> Option<SequenceOutput> {
        self.outputs.remove(&sequence)
    }

    pub fn set(&mut self, sequence: u32, output: SequenceOutput) {
        self.outputs.insert(sequence, output);
    }

    /// Returns whether the output of a sequence is an embedding, for which no logits are needed.
    pub fn is_embedding(&self, sequence: u32) -> bool {
        matches!(self.outputs.get(&sequence), Some(SequenceOutput::Embedding(_)))
    }

    /// Sends the embedding of a sequence, which then has no output any more.
    pub fn send_embedding(&mut self, sequence: u32, hidden: &[f32]) {
        if let Some(SequenceOutput::Embedding(embedding_tx)) = self.outputs.remove(&sequence) {
            // The client may have gone.
            let _ = embedding_tx.send(hidden.to_vec());
        }
    }

    /// Returns the generated tokens: the accepted drafts, and one more token. `logits` has the shape `[drafts + 1,
    /// vocabulary]`: a row before the first draft and a row after each draft. Returns `None` for a sequence without a
    /// sampler.
    pub fn sample(&mut self, sequence: u32, logits: &[f32], drafts: &[u32]) -> Option<Vec<u32>> {
        let Self { outputs, stop_tokens } = self;
        let Some(SequenceOutput::Tokens(sample)) = outputs.get_mut(&sequence) else { return None };
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

    #[test]
    fn embedding_is_sent_once_and_not_sampled() {
        let (embedding_tx, mut embedding_rx) = oneshot::channel();
        let mut samplers = Samplers::new(vec![Box::new(greedy_token)], vec![]);
        samplers.set(1, SequenceOutput::Embedding(embedding_tx));
        assert_eq!([0, 1, 2].map(|sequence| samplers.is_embedding(sequence)), [false, true, false]);
        assert_eq!(samplers.sample(1, &rows(&[3]), &[]), None);
        samplers.send_embedding(1, &[0.5, -1.0]);
        assert_eq!(embedding_rx.try_recv(), Ok(vec![0.5, -1.0]));
        assert!(samplers.take(1).is_none() && samplers.take(0).is_some());
    }
}
