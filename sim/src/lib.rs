//! How long does a plan take, and what does every device do meanwhile?
//!
//! A discrete-event simulator. It interprets the same schedule as the executor and writes the same trace:
//! [`simulate`] takes a resolved scenario and a plan. [`engine`] orders events, [`resource`] says when
//! processors, disks and links are done, [`page_cache`] says which bytes must be read again and [`storage`]
//! joins it to a disk.

mod absence;
mod acceptance;
mod agenda;
mod budget;
mod conditions;
mod drafter;
pub mod engine;
mod error;
mod helper;
mod keeper;
mod layout;
mod lines;
pub mod mobile_gpu;
pub mod page_cache;
mod renewal;
pub mod resource;
mod run;
mod setting;
mod soc;
mod station;
pub mod storage;
mod stream;
mod streams;
mod tensor;
mod walk;

pub use error::SimError;
pub use run::{Input, Options, Run, Surroundings, simulate, simulate_in};
