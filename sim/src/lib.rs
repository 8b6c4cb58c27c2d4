//! Discrete-event simulator: predicts the time of a plan and the activity of every device.
//!
//! [`simulate`] takes a resolved scenario and a plan. It interprets the same schedule as the executor and writes the same
//! trace.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | the clock and the heap of pending events |
//! | [`resource`] | what devices and messages compete for: processors, disks, links |
//! | [`page_cache`] | which weights stay in memory, by operating system |
//! | [`device`] | a device that interprets its schedule |
//! | `ring` | the devices of a ring, and what disturbs them |
//! | `tensor` | plans that slice every layer over all devices |
//! | `soc` | a phone with GPU and NPU that runs a model alone |
//! | [`mobile_gpu`] | a roofline model of a phone's GPU, without events |

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod device;
pub mod engine;
mod error;
mod input;
pub mod mobile_gpu;
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
pub use input::{Disturbances, Input, Options, Run};
pub use run::{simulate, simulate_with_disturbances};
