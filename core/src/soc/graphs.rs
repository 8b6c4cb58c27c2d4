//! NPU graphs: the numbers of tokens that an NPU can compute, and covers of a prompt by them.
//!
//! HeteroLLM paper, sections 4.1.1 and 5.2.2. A graph is for one number of tokens and is made ahead, in sizes of
//! powers of two. A prompt is padded to the next size, covered by several, or gets graphs of its own while it waits.
//!
//! Not here: which cover is the cheapest, which depends on the products ([`super::solver`], [`super::prefill`]).

use hearth_profiles::Seconds;
use hearth_profiles::device::soc::Graphs;

/// Graphs one after another, at most, beside those of full size. source: HeteroLLM paper, section 4.1.1, whose covers
/// have two; the cost of loading more is not published
pub const MAX_PROMPT_CHUNKS: usize = 4;

/// Sizes of graphs that are ready.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// Ascending, at least one.
    sizes: Vec<u64>,
    /// Every multiset of one to four sizes, in order, largest first.
    sets: Vec<Vec<u64>>,
}

impl Sizes {
    /// Creates the sizes of a valid document.
    pub fn new(graphs: &Graphs) -> Self {
        let sizes: Vec<u64> = graphs.sizes.value.iter().map(|&size| u64::from(size)).collect();
        let mut sets: Vec<Vec<u64>> = Vec::new();
        let mut last: Vec<Vec<u64>> = vec![Vec::new()];
        for _ in 0..MAX_PROMPT_CHUNKS {
            let longer = |set: &Vec<u64>| {
                let set = set.clone();
                let no_larger = set.last().copied().unwrap_or(u64::MAX);
                let next = sizes.iter().rev().copied().filter(move |&size| size <= no_larger);
                next.map(move |size| set.iter().copied().chain([size]).collect::<Vec<_>>())
                    .collect::<Vec<_>>()
            };
            last = last.iter().flat_map(longer).collect();
            sets.extend(last.iter().cloned());
        }
        Self { sizes, sets }
    }

    /// The largest.
    pub fn largest(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(1).max(1)
    }

    /// All sizes in ascending order.
    pub fn all(&self) -> &[u64] {
        &self.sizes
    }

    /// Whether there is a graph for exactly `tokens`.
    pub fn has(&self, tokens: u64) -> bool {
        self.sizes.binary_search(&tokens).is_ok()
    }

    /// The smallest graph for at least `tokens`, or the largest graph.
    pub fn padded(&self, tokens: u64) -> u64 {
        self.sizes.iter().copied().find(|&size| size >= tokens).unwrap_or(self.largest())
    }

    /// Minimal sets of graphs that hold `tokens`.
    pub fn covers(&self, tokens: u64) -> impl Iterator<Item = &[u64]> {
        self.sets.iter().map(Vec::as_slice).filter(move |set| {
            let held: u64 = set.iter().sum();
            held >= tokens && set.iter().all(|size| held - size < tokens)
        })
    }

    /// Sets of graphs that hold fewer than `tokens`.
    pub fn smaller_sets(&self, tokens: u64) -> impl Iterator<Item = &[u64]> {
        self.sets.iter().map(Vec::as_slice).filter(move |set| set.iter().sum::<u64>() < tokens)
    }

    /// A prompt in pieces that a graph could hold: full ones and a last one.
    pub fn pieces(&self, tokens: u64, largest: u64) -> Vec<u64> {
        let largest = largest.clamp(1, self.largest());
        let full = vec![largest; (tokens / largest) as usize];
        full.into_iter().chain(Some(tokens % largest).filter(|&rest| rest > 0)).collect()
    }
}

/// Seconds for making a layer's four graphs for `tokens` at run time. Below the length that was measured it falls on,
/// to no less than nothing.
pub fn preparation(graphs: &Graphs, tokens: u64) -> Seconds {
    let further = tokens as f64 - f64::from(graphs.prepared_for.value);
    Seconds((graphs.preparation.value.0 + graphs.each_token.value.0 * further).max(0.0))
}

#[cfg(test)]
mod tests {
    use hearth_profiles::device::shipped;

    use super::*;

    #[test]
    fn prompts_are_padded_and_covered_as_in_the_paper() {
        let soc = shipped("snapdragon-8-gen-3").unwrap().soc.unwrap();
        let sizes = Sizes::new(&soc.graphs);
        assert_eq!((sizes.padded(300), sizes.padded(525), sizes.padded(1)), (512, 1024, 32));
        let covers: Vec<&[u64]> = sizes.covers(525).collect();
        assert!(covers.contains(&[512, 32].as_slice()) && covers.contains(&[1024].as_slice()));
        assert!(!covers.contains(&[512, 32, 32].as_slice()), "one of them is superfluous");
        // 6 + 21 + 56 + 126 sets of one to four.
        assert_eq!(sizes.sets.len(), 209);
        assert_eq!(sizes.pieces(2100, 1024), [1024, 1024, 52]);
    }

    #[test]
    fn making_graphs_takes_what_the_paper_prints() {
        let soc = shipped("snapdragon-8-gen-3").unwrap().soc.unwrap();
        assert_eq!(preparation(&soc.graphs, 135), Seconds(0.4084));
        assert!((preparation(&soc.graphs, 1000).0 - 2.050).abs() < 1e-3);
        assert_eq!(preparation(&soc.graphs, 0).0.signum(), 1.0);
    }
}
