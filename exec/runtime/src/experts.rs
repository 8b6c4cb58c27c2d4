//! Routing of tokens to the experts of a mixture.
//!
//! The router has a score for each expert. The softmax of the scores is the weight of an expert, and the experts with
//! the largest weights compute the token. In most models, their weights are divided by their sum (Shazeer et al. 2017,
//! "Outrageously large neural networks"; the reports of Mixtral and Qwen 3).

use std::sync::{Arc, Mutex, PoisonError};

use hearth_core::expert_routes::RecordedRoutes;
use hearth_kernels::{InstructionSet, elementwise};
use hearth_schema::route_trace::RouteUse;

/// An expert that computes a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Route {
    pub(crate) expert: usize,
    /// Index of the token in the batch.
    pub(crate) token: usize,
    /// The factor of the expert's output.
    pub(crate) weight: f32,
}

/// Records which experts the tokens of a run use.
#[derive(Debug, Default)]
pub struct RouteRecorder(Mutex<Vec<RouteUse>>);

impl RouteRecorder {
    pub(crate) fn record(&self, uses: impl Iterator<Item = RouteUse>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(uses);
    }

    /// Returns the recorded uses, and begins anew.
    pub fn take(&self) -> Vec<RouteUse> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The routes of a recording, which tokens take instead of those of the router.
#[derive(Debug, Clone)]
pub struct ReplayedRoutes {
    pub recorded: Arc<RecordedRoutes>,
    /// Number of tokens of the prompt, after which generated tokens follow.
    pub prompt_tokens: u32,
}

/// What happens with the routes of a run. By default, tokens take the routes of the router.
#[derive(Debug, Default)]
pub struct RouteOptions {
    pub recorder: Option<RouteRecorder>,
    pub replayed: Option<ReplayedRoutes>,
}

/// Returns the `used` experts with the largest weights. Of equal experts, the first are chosen, so that the result is the
/// same on every device.
fn best_experts(weights: &[f32], used: usize) -> Vec<usize> {
    let mut experts: Vec<usize> = (0..weights.len()).collect();
    experts.sort_by(|&one, &other| weights[other].total_cmp(&weights[one]).then(one.cmp(&other)));
    experts.truncate(used);
    experts
}

/// Appends the routes of a token to `routes`, in ascending order of the experts. `scores` are those of the router, and
/// are replaced by their softmax. The token uses `replayed` experts, or else the `used` best ones.
pub(crate) fn route(
    scores: &mut [f32],
    token: usize,
    (used, replayed): (usize, Option<Vec<u32>>),
    is_normalised: bool,
    routes: &mut Vec<Route>,
) {
    // The same lanes on every processor.
    elementwise::softmax(InstructionSet::SCALAR, scores);
    let replayed = replayed.map(|experts| experts.into_iter().map(|expert| expert as usize).collect());
    let mut experts = replayed.unwrap_or_else(|| best_experts(scores, used));
    experts.sort_unstable();
    let sum: f32 = experts.iter().map(|&expert| scores[expert]).sum();
    let divisor = if is_normalised { sum } else { 1.0 };
    routes.extend(experts.into_iter().map(|expert| Route {
        expert,
        token,
        weight: scores[expert] / divisor,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(scores: &[f32], used: usize, is_normalised: bool) -> Vec<(usize, f32)> {
        let mut routes = Vec::new();
        route(&mut scores.to_vec(), 0, (used, None), is_normalised, &mut routes);
        routes.iter().map(|route| (route.expert, route.weight)).collect()
    }

    #[test]
    fn best_experts_are_chosen_and_weighted() {
        let two = std::f32::consts::LN_2;
        // The softmax of 0, ln 2, 0 and ln 4 is 1/8, 2/8, 1/8 and 4/8.
        let scores = [0.0, two, 0.0, 2.0 * two];
        let close = |found: Vec<(usize, f32)>, expected: &[(usize, f32)]| {
            assert_eq!(found.len(), expected.len());
            for ((expert, weight), (other, expected)) in found.iter().zip(expected) {
                assert!(expert == other && (weight - expected).abs() < 1e-6, "{found:?}");
            }
        };
        close(routes(&scores, 2, true), &[(1, 1.0 / 3.0), (3, 2.0 / 3.0)]);
        close(routes(&scores, 3, false), &[(0, 0.125), (1, 0.25), (3, 0.5)]);
        close(routes(&[1.0; 5], 2, true), &[(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn replayed_experts_are_weighted_by_the_router() {
        let mut routes = Vec::new();
        route(&mut [0.0, 3.0, 0.0, 0.0], 7, (1, Some(vec![3, 0])), true, &mut routes);
        let route = |expert| Route { expert, token: 7, weight: 0.5 };
        assert_eq!(routes, [0, 3].map(route));
    }

    #[test]
    fn scores_that_are_not_numbers_choose_something() {
        let found = routes(&[f32::NAN; 4], 2, true);
        assert!(found.len() == 2 && found.iter().all(|(_, weight)| weight.is_nan()), "{found:?}");
    }
}
