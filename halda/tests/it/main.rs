//! Integration tests of the planners, one module for each topic.
//!
//! Property tests run few cases by default. `HEARTH_SLOW=1` runs all cases, and `PROPTEST_CASES=N` runs N.

mod algorithm_one;
mod baselines;
mod certified_optima;
mod explanations;
mod export;
mod fixtures;
mod lint;
mod other_systems;
mod plan_documents;
mod properties;
mod refine;
mod ring_orders;
mod steady_state;
