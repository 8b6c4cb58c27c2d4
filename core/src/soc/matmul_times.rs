//! Matrix multiplication times of an NPU, interpolated from a table of measurements.
//!
//! There are two modes, as in the profiler of the HeteroLLM paper (section 4.3). In both, the table gives a rate: the
//! operations of a matmul padded to whole tiles, divided by its time. In mode `table` a matmul has the rate of the
//! nearest measured matmul, by the distance of the logarithms of their dimensions. In mode `tree` it has the mean rate
//! of a leaf of a regression tree. Each split of the tree minimises the squared deviation of the logarithms of the
//! rates.
//!
//! Not here: the measurement itself, because this program cannot access an NPU.

use hearth_profiles::device::soc::{MatmulProfile, MeasuredMatmul, ProfileMode};

use super::matmul::Matmul;

/// Minimum number of measurements in a leaf of the regression tree.
/// source: assumed, so that a single bad measurement does not form a leaf
const MIN_LEAF_POINTS: usize = 2;
/// Maximum depth of the regression tree. source: assumed
const MAX_DEPTH: u32 = 12;
/// Number of features of a matmul in the regression tree: the logarithms of its inputs, outputs and tokens, and of the
/// ratios of inputs to outputs and of inputs to tokens.
const FEATURES: usize = 5;

#[derive(Debug, Clone, PartialEq)]
pub struct MatmulTimeTable {
    tile: u64,
    samples: Vec<Sample>,
    tree: Option<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    features: [f64; FEATURES],
    /// The natural logarithm of the rate in operations per second.
    ln_rate: f64,
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Leaf(f64),
    Split { feature: usize, at: f64, below: Box<Node>, above: Box<Node> },
}

impl MatmulTimeTable {
    /// Creates the table from a valid profile. `tile` is the tile size of the NPU's systolic array, in elements.
    pub fn new(profiled: &MatmulProfile, tile: u32) -> Self {
        let tile = u64::from(tile.max(1));
        let samples: Vec<Sample> = profiled.matmuls.iter().map(|shape| sample(shape, tile)).collect();
        let tree = (profiled.mode == ProfileMode::Tree).then(|| grow(samples.clone(), 0));
        Self { tile, samples, tree }
    }

    /// Returns the seconds for a matmul with `tokens` tokens.
    pub fn matmul_seconds(&self, matmul: Matmul, tokens: u64) -> f64 {
        let tokens = padded(tokens, self.tile);
        let features = features(matmul, tokens);
        let rate = self.tree.as_ref().map_or_else(|| self.nearest(&features), |tree| tree.predict(&features));
        work(matmul, tokens) / rate.exp()
    }

    fn nearest(&self, features: &[f64; FEATURES]) -> f64 {
        // The first three features are the dimensions; the ratios follow from them.
        let distance =
            |sample: &Sample| -> f64 { (0..3).map(|at| (sample.features[at] - features[at]).powi(2)).sum() };
        let near = self.samples.iter().min_by(|one, other| distance(one).total_cmp(&distance(other)));
        near.map_or(0.0, |sample| sample.ln_rate)
    }
}

impl Node {
    fn predict(&self, features: &[f64; FEATURES]) -> f64 {
        match self {
            Node::Leaf(rate) => *rate,
            Node::Split { feature, at, below, .. } if features[*feature] <= *at => below.predict(features),
            Node::Split { above, .. } => above.predict(features),
        }
    }
}

fn sample(shape: &MeasuredMatmul, tile: u64) -> Sample {
    let matmul = Matmul { inputs: u64::from(shape.inputs), outputs: u64::from(shape.outputs) };
    let tokens = padded(u64::from(shape.tokens), tile);
    Sample { features: features(matmul, tokens), ln_rate: (work(matmul, tokens) / shape.time.0).ln() }
}

fn padded(tokens: u64, tile: u64) -> u64 {
    tokens.max(1).div_ceil(tile) * tile
}

fn work(matmul: Matmul, tokens: u64) -> f64 {
    2.0 * matmul.weight_count() * tokens as f64
}

fn features(matmul: Matmul, tokens: u64) -> [f64; FEATURES] {
    let [inputs, outputs, tokens] =
        [matmul.inputs, matmul.outputs, tokens].map(|size| (size.max(1) as f64).ln());
    [inputs, outputs, tokens, inputs - outputs, inputs - tokens]
}

fn grow(mut samples: Vec<Sample>, level: u32) -> Node {
    let mean = samples.iter().map(|sample| sample.ln_rate).sum::<f64>() / samples.len().max(1) as f64;
    let split = if level < MAX_DEPTH { best_split(&mut samples) } else { None };
    let Some((feature, at)) = split else { return Node::Leaf(mean) };
    let (below, above) = samples.into_iter().partition(|sample| sample.features[feature] <= at);
    let [below, above] = [below, above].map(|part| Box::new(grow(part, level + 1)));
    Node::Split { feature, at, below, above }
}

/// Returns feature and threshold of the split with the smallest squared error; `None` if no split reduces the error.
fn best_split(samples: &mut [Sample]) -> Option<(usize, f64)> {
    let count = samples.len();
    let add =
        |(sum, squares), sample: &Sample| (sum + sample.ln_rate, squares + sample.ln_rate * sample.ln_rate);
    let (sum, squares): (f64, f64) = samples.iter().fold((0.0, 0.0), add);
    let whole = squares - sum * sum / count.max(1) as f64;
    let mut best: Option<(f64, usize, f64)> = None;
    for feature in 0..FEATURES {
        samples.sort_by(|one, other| one.features[feature].total_cmp(&other.features[feature]));
        let mut left = 0.0;
        for at in 1..count {
            left += samples[at - 1].ln_rate;
            let (here, next) = (samples[at - 1].features[feature], samples[at].features[feature]);
            if at < MIN_LEAF_POINTS || count - at < MIN_LEAF_POINTS || next <= here {
                continue;
            }
            let right = sum - left;
            // The sum of squares is constant, so the error depends only on the sums of both parts.
            let error = squares - left * left / at as f64 - right * right / (count - at) as f64;
            if best.is_none_or(|(min, ..)| error < min) {
                best = Some((error, feature, f64::midpoint(here, next)));
            }
        }
    }
    best.filter(|(error, ..)| *error < whole * (1.0 - 1e-9) - 1e-12).map(|(_, feature, at)| (feature, at))
}
