//! Solvers: exact searches for both objectives, Algorithm 1 of the prima.cpp paper, and a local search.

pub(crate) mod dynamic_program;
pub mod exact;
pub mod halda;
pub(crate) mod linear_program;
mod lower_bound;
pub mod overlap;
pub mod refine;
pub(crate) mod relays;
mod ring_order;
pub mod search_space;
pub(crate) mod shortest_cycle;
