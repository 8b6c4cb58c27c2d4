//! Discrete-event simulator: predicts the time per token of a plan and the activity of every device.
//!
//! [`simulate`] interprets the same schedule of a plan as the executor, and writes a trace in the same format.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | the clock and the queue of pending events |
//! | [`resource`] | shared resources: CPU cores, disks, links |
//! | [`page_cache`] | the page caches of different operating systems |
//! | `network` | the links of a run, and the messages in flight |
//! | [`device`] | a simulated device, which executes its schedule |
//! | `ring` | a ring of devices under the events of a scenario |
//! | `tensor` | tensor-parallel plans, which slice every layer |
//! | `soc` | a phone with a GPU and an NPU that runs a model without other devices |
//! | [`mobile_gpu`] | a roofline model of a phone's GPU, without events |

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod device;
pub mod engine;
mod error;
mod input;
pub mod mobile_gpu;
mod network;
pub mod page_cache;
mod random;
pub mod resource;
mod ring;
mod run;
mod soc;
mod speculation;
mod tensor;
mod trace;

pub use error::SimError;
pub use input::{Input, Options, ScenarioEvents, SimulationResult};
pub use run::{simulate, simulate_with_events};
