//! Solvers: exact searches for both objectives, Algorithm 1 of the prima.cpp paper, and a local search.

pub(crate) mod dynamic_program;
pub mod exact_search;
pub mod halda;
pub(crate) mod linear_program;
pub mod local_search;
mod lower_bound;
pub mod overlap;
pub(crate) mod relays;
mod ring_order;
pub mod search_space;
pub(crate) mod shortest_cycle;
