//! Which documents cross a boundary, and what do they mean?
//!
//! Data walks one way: a [`scenario`] names devices, links, a model and a workload; a planner turns it
//! into an immutable [`plan`]; [`schedule`] expands the plan into steps, the same for the simulator and
//! the executor; both write a [`trace`]; [`metrics`] are computed from traces by one function.
//!
//! Not here: opening files (the command line), finding plans (`halda`), and running them (`sim`,
//! `exec`).

pub mod address;
pub mod cluster;
pub mod conversion;
pub mod digest;
pub mod draft;
pub mod editor;
pub mod events;
pub mod happenings;
pub mod heartbeat;
pub mod holdings;
pub mod metrics;
pub mod plan;
pub mod rates;
pub mod replan;
pub mod residency;
pub mod room;
pub mod scenario;
pub mod schedule;
pub mod soc;
pub mod spread;
pub mod tensor;
pub mod trace;
pub mod workload;

pub use cluster::{Cluster, LinkTable, Member};
pub use plan::Plan;
pub use scenario::Scenario;
pub use trace::Trace;
