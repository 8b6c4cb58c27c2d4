//! Planners that decide which device runs which layers of a model.
//!
//! An [`Instance`] describes the layer-to-device assignment (LDA) problem of the prima.cpp paper. A [`LatencyModel`]
//! computes the time per token of an assignment, and [`latency::constraints`] lists the conditions that a plan must
//! satisfy. A [`Strategy`] chooses a plan, and an [`Explanation`] describes what limits the plan. [`export`] turns a plan
//! into command lines of other engines.
//!
//! ```
//! use hearth_halda::{ExactSearch, Instance, LatencyModel, solve};
//!
//! let line = include_str!("../tests/data/lda/small.jsonl").lines().next().unwrap();
//! let row: serde_json::Value = serde_json::from_str(line)?;
//! let instance: Instance = serde_json::from_value(row["instance"].clone())?;
//! let model = LatencyModel::new(&instance)?;
//! let solution = solve(&ExactSearch::default(), &model)?;
//! assert_eq!(solution.assignment.window_layers, [5, 7]);
//! assert_eq!(solution.assignment.gpu_layers, [3, 2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod baselines;
mod capacity;
pub mod explanation;
pub mod export;
pub mod latency;
pub mod lint;
mod plan_document;
pub mod problem;
pub mod registry;
pub mod runtime_model;
mod solve;
pub mod solvers;
pub mod strategy;

pub use hearth_schema::scenario::{MemoryRisk, RingOrder as OrderChoice};

pub use baselines::edgeshard::EdgeShard;
pub use baselines::even::EvenWindows;
pub use baselines::exhaustive::ExhaustiveSearch;
pub use baselines::lingualinked::LinguaLinked;
pub use baselines::manual::ManualPlan;
pub use baselines::memory_proportional::MemoryProportional;
pub use baselines::performance_proportional::PerformanceProportional;
pub use baselines::single::SingleDevice;
pub use baselines::systems;
pub use explanation::{BindingConstraint, DeviceExplanation, DropReason, Explanation, RelayPlacement};
pub use latency::coefficients::MemoryCase;
pub use latency::constraints::{PlanRules, Violation, violations};
pub use latency::steady_state::DeviceTiming;
pub use latency::{DeviceTerms, LatencyBreakdown, LatencyModel};
pub use plan_document::{PlanError, empty_plan, plan_from_assignment, plan_from_solution};
pub use problem::assignment::{Assignment, LayerCounts, RoundWindow, valid_rounds};
pub use problem::exo_memory_by_device;
pub use problem::instance::{Device, GpuApi, Instance, Model};
pub use problem::validation::InstanceError;
pub use registry::{StrategyLookupError, StrategyOptions, strategy_by_name};
pub use runtime_model::{ComputeTimes, ExpertReads, ReadRates, RereadScope, RuntimeModel};
pub use solve::{Solution, solve, solve_within_memory};
pub use solvers::exact_search::ExactSearch;
pub use solvers::halda::{CostTerms, Halda};
pub use solvers::local_search::{RefineOptions, RefinedPlan, refine};
pub use solvers::overlap::OverlapSearch;
pub use solvers::search_space::HeadChoice;
pub use strategy::{
    AvoidedRisk, IncompleteSearch, InfeasibleReason, Objective, Proposal, SearchStep, Strategy, StrategyError,
};
