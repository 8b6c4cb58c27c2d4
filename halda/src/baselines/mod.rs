//! Simple rules, the rules of other systems, plans by hand, and an exhaustive oracle to compare the solvers with.

pub mod edgeshard;
pub mod even;
pub mod exhaustive;
pub mod lingualinked;
pub mod manual;
pub mod memory_proportional;
pub mod performance_proportional;
pub(crate) mod proportional;
pub mod single;
pub mod systems;
