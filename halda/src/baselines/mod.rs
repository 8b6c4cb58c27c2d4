//! Baselines to compare the solvers with: simple rules, rules of other systems, manual plans, and exhaustive search.

pub mod edgeshard;
pub mod even;
pub mod exhaustive;
pub mod lingualinked;
pub mod manual;
pub mod memory_proportional;
pub mod performance_proportional;
pub(crate) mod proportional_shares;
pub mod single;
pub mod systems;
