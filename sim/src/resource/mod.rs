//! What can a device run out of per second: processor time, disk bandwidth, air?
//!
//! Each resource keeps its own account of who is being served and answers two questions: when is somebody done
//! next, and who was it. The world asks again after every change and sets the resource's timer accordingly
//! ("re-timed at every change"); a resource never sees the event heap.
//!
//! Not here: memory. What is kept in it is a question without time, see [`crate::page_cache`].

pub mod cpu;
pub mod disk;
pub mod link;
mod sharing;
mod throttle;

pub use cpu::Cpu;
pub use disk::{Disk, DiskSpeed, Flow};
pub use link::{AirLink, ConstantLink, Link};
