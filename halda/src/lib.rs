//! Which device should run which layers of a model?
//!
//! The layer-to-device assignment (LDA) of the prima.cpp paper: an [`instance`], its one [`latency`] model, its
//! named [`constraints`], and strategies that choose a plan ([`strategy`]), each with an [`explanation`].
//!
//! ```
//! use hearth_halda::{Exact, Instance, LatencyModel, solve};
//!
//! let line = include_str!("../tests/data/lda/small.jsonl").lines().next().unwrap();
//! let row: serde_json::Value = serde_json::from_str(line)?;
//! let instance: Instance = serde_json::from_value(row["instance"].clone())?;
//! let model = LatencyModel::new(&instance)?;
//! let solution = solve(&Exact::default(), &model)?;
//! assert_eq!(solution.assignment.window_layers, [5, 7]);
//! assert_eq!(solution.assignment.gpu_layers, [3, 2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod assignment;
pub mod build;
pub mod coefficients;
pub mod constraints;
pub mod edgeshard;
pub mod even;
pub mod exact;
pub mod exhaustive;
pub mod explanation;
pub mod gpu_split;
pub mod halda;
pub mod hops;
pub mod instance;
pub mod latency;
pub mod lingualinked;
pub mod lint;
pub mod manual;
pub mod memory_proportional;
pub mod order;
pub mod overlap;
pub mod performance_proportional;
pub mod plan;
pub mod practice;
pub mod programme;
pub mod proportional;
pub mod refine;
pub mod relaxed;
pub mod relays;
pub mod room;
pub mod selection;
pub mod sentences;
pub mod single;
pub mod steady_state;
pub mod strategy;
pub mod systems;
pub mod tour;
pub mod validation;

pub use assignment::{Assignment, Share, valid_rounds};
pub use coefficients::MemoryCase;
pub use constraints::{Rules, Violation, violations};
pub use edgeshard::EdgeShard;
pub use even::Even;
pub use exact::{Exact, HeadChoice, OrderChoice};
pub use exhaustive::Exhaustive;
pub use explanation::{Binding, DeviceExplanation, Dropped, Explanation, Relayed};
pub use halda::{Halda, Terms};
pub use instance::{Device, Gpu, Instance, Model, OperatingSystem};
pub use latency::{Breakdown, DeviceTerms, LatencyModel};
pub use lingualinked::LinguaLinked;
pub use manual::Manual;
pub use memory_proportional::{MemoryProportional, MemorySizes};
pub use overlap::Overlap;
pub use performance_proportional::PerformanceProportional;
pub use plan::{PlanError, plan};
pub use practice::{Practice, ReadRates, Rereads, WorkTimes};
pub use refine::{Refine, Search, refine};
pub use selection::{Options, SelectionError, named};
pub use single::Single;
pub use steady_state::Pace;
pub use strategy::{
    Infeasible, Objective, Proposal, Refusal, SearchLimit, SearchStep, Solution, Strategy, solve,
};
pub use validation::InstanceError;
