//! NPU graphs: the numbers of tokens that have a compiled graph, and sets of graphs that together cover a prompt.
//!
//! HeteroLLM paper, sections 4.1.1 and 5.2.2. A graph is compiled ahead of time for a fixed number of tokens, in
//! sizes of powers of two. A prompt is padded to the next size, is covered by several graphs, or waits until graphs
//! for its own length are built.
//!
//! Not here: which set of graphs is the fastest, which depends on the matmuls ([`super::solver`], [`super::prefill`]).

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::NpuGraphs;

/// Maximum number of NPU graphs that together cover the rest of a prompt after the chunks of the largest graph size.
/// source: assumed; the HeteroLLM paper, section 4.1.1, uses two, and the cost of loading more graphs is not published
const MAX_GRAPHS_PER_PROMPT: usize = 4;

/// The sizes of the compiled NPU graphs, in tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct GraphSizes {
    /// The sizes in tokens, in ascending order; there is at least one size.
    pub sizes: Vec<u64>,
    /// Every combination with repetition of one to four sizes, each in descending order.
    sets: Vec<Vec<u64>>,
}

impl GraphSizes {
    pub fn new(graphs: &NpuGraphs) -> Self {
        let sizes: Vec<u64> = graphs.graph_sizes.value.iter().map(|&size| u64::from(size)).collect();
        let mut sets: Vec<Vec<u64>> = Vec::new();
        let mut last: Vec<Vec<u64>> = vec![Vec::new()];
        for _ in 0..MAX_GRAPHS_PER_PROMPT {
            let longer = |set: Vec<u64>| {
                let max = set.last().copied().unwrap_or(u64::MAX);
                let next = sizes.iter().rev().filter(move |&&size| size <= max);
                next.map(move |&size| [&set[..], &[size]].concat())
            };
            last = last.into_iter().flat_map(longer).collect();
            sets.extend(last.iter().cloned());
        }
        Self { sizes, sets }
    }

    pub fn max_size(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(1).max(1)
    }

    /// Returns the smallest graph size of at least `tokens` tokens, or the largest size if all sizes are smaller.
    pub fn padded_size(&self, tokens: u64) -> u64 {
        self.sizes.iter().copied().find(|&size| size >= tokens).unwrap_or(self.max_size())
    }

    /// Returns the sets of graph sizes that sum to at least `tokens`, but to less if any one of the sizes is removed.
    pub fn size_sets_covering(&self, tokens: u64) -> impl Iterator<Item = &[u64]> {
        self.sets.iter().map(Vec::as_slice).filter(move |set| {
            let sum: u64 = set.iter().sum();
            sum >= tokens && set.iter().all(|size| sum - size < tokens)
        })
    }

    /// Returns the sets of graph sizes that sum to less than `tokens`.
    pub fn size_sets_below(&self, tokens: u64) -> impl Iterator<Item = &[u64]> {
        self.sets.iter().map(Vec::as_slice).filter(move |set| set.iter().sum::<u64>() < tokens)
    }

    /// Splits a prompt of `tokens` tokens into chunks and returns their lengths. Each chunk has `max_length` tokens, or
    /// the largest graph size if this is smaller; only the last chunk may be shorter.
    pub fn chunk_lengths(&self, tokens: u64, max_length: u64) -> Vec<u64> {
        let length = max_length.clamp(1, self.max_size());
        let full = vec![length; (tokens / length) as usize];
        full.into_iter().chain(Some(tokens % length).filter(|&rest| rest > 0)).collect()
    }
}

/// Returns the time to build the four NPU graphs of a layer for `tokens` tokens at run time. The time is a linear
/// function of the number of tokens that agrees with the measured time, and is never negative.
pub fn preparation_time(graphs: &NpuGraphs, tokens: u64) -> Seconds {
    let further = tokens as f64 - f64::from(graphs.preparation_tokens.value);
    Seconds((graphs.preparation_time.value.0 + graphs.preparation_time_per_token.value.0 * further).max(0.0))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped_profile;

    use super::*;

    fn graphs() -> NpuGraphs {
        shipped_profile("snapdragon-8-gen-3").unwrap().soc.unwrap().graphs
    }

    #[test]
    fn prompts_are_padded_and_covered_as_in_the_paper() {
        let sizes = GraphSizes::new(&graphs());
        assert_eq!((sizes.padded_size(300), sizes.padded_size(525), sizes.padded_size(1)), (512, 1024, 32));
        let covers: Vec<&[u64]> = sizes.size_sets_covering(525).collect();
        assert!(covers.contains(&[512, 32].as_slice()) && covers.contains(&[1024].as_slice()));
        assert!(!covers.contains(&[512, 32, 32].as_slice()), "not minimal");
        // 6 + 21 + 56 + 126 sets with one to four of the six sizes.
        assert_eq!(sizes.sets.len(), 209);
        assert_eq!(sizes.chunk_lengths(2100, 1024), [1024, 1024, 52]);
    }

    #[test]
    fn graph_preparation_takes_the_published_time() {
        let graphs = graphs();
        assert_eq!(preparation_time(&graphs, 135), Seconds(0.4084));
        assert!((preparation_time(&graphs, 1000).0 - 2.050).abs() < 1e-3);
        assert_eq!(preparation_time(&graphs, 0).0.signum(), 1.0);
    }
}
