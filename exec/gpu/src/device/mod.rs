//! An opened GPU: its adapter, capabilities, device and queue.
//!
//! An adapter is what a driver shows; [`Gpu`] is one that was opened. Everything that can fail on it runs inside
//! `Gpu::checked`, which angles what the driver says into a [`GpuError`]: nothing here panics because a device went
//! away.
//!
//! Not here: kernels, and which variant of one a device gets.

mod adapter;
mod buffers;
mod memory;
mod pipelines;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use adapter::{AdapterFacts, Capabilities, CapabilityMask, adapters};
pub use buffers::{Params, Tensor};
pub(crate) use memory::Reservation;
pub use pipelines::{Binding, Launch};

use crate::error::GpuError;

/// How long a submission may take.
/// source: assumed, far more than a batch takes on the slowest software driver in the tests
const DEADLINE: Duration = Duration::from_mins(2);

pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    facts: AdapterFacts,
    capabilities: Capabilities,
    lost: Arc<Mutex<Option<String>>>,
    memory_budget: Arc<memory::MemoryBudget>,
    /// How long a submission may take, in nanoseconds.
    deadline: AtomicU64,
    pipelines: Mutex<BTreeMap<String, Arc<wgpu::ComputePipeline>>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// Locks a mutex even if a thread panicked while it held it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Opens the best adapter: a discrete GPU before an integrated one before a software driver. What `mask` takes away
    /// is not used, whatever the adapter has.
    pub fn open(mask: CapabilityMask) -> Result<Gpu, GpuError> {
        let (adapter, facts) = adapter::best().ok_or(GpuError::NoAdapter)?;
        let capabilities = facts.capabilities.without(mask);
        let failed = |why: String| GpuError::Open { adapter: facts.name.clone(), why };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("hearth"),
            required_features: capabilities.features(),
            required_limits: adapter.limits(),
            ..wgpu::DeviceDescriptor::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (device, queue) = opened.map_err(|error| failed(error.to_string()))?;
        let lost: Arc<Mutex<Option<String>>> = Arc::default();
        let told = Arc::clone(&lost);
        device.set_device_lost_callback(move |reason, message| {
            *lock(&told) = Some(format!("{reason:?}: {message}"));
        });
        // What no scope catches must not end the process; the next check tells of it.
        let told = Arc::clone(&lost);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&told).get_or_insert_with(|| error.to_string());
        }));
        let (pipelines, memory_budget) =
            (Mutex::default(), memory::MemoryBudget::new(&facts, mask.memory_bytes));
        let deadline = AtomicU64::new(DEADLINE.as_nanos() as u64);
        Ok(Gpu { device, queue, facts, capabilities, lost, memory_budget, deadline, pipelines })
    }

    pub fn facts(&self) -> &AdapterFacts {
        &self.facts
    }

    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Destroys the device, as if the driver had lost it: every later call fails.
    pub fn destroy(&self) {
        self.device.destroy();
        lock(&self.lost).get_or_insert_with(|| "it was given up".into());
    }

    /// Returns an error if the device is lost.
    pub fn alive(&self) -> Result<(), GpuError> {
        lock(&self.lost).clone().map_or(Ok(()), |why| Err(GpuError::Lost { why }))
    }

    /// Runs `work` and returns the first error that the device reports.
    pub(crate) fn checked<T>(
        &self,
        what: &str,
        work: impl FnOnce(&wgpu::Device) -> T,
    ) -> Result<T, GpuError> {
        self.alive()?;
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let done = work(&self.device);
        let memory = pollster::block_on(memory.pop());
        let others = [pollster::block_on(validation.pop()), pollster::block_on(internal.pop())];
        self.alive()?;
        if memory.is_some() {
            return Err(GpuError::OutOfMemory { what: what.into() });
        }
        match others.into_iter().flatten().next() {
            Some(error) => Err(GpuError::Refused { what: what.into(), why: error.to_string() }),
            None => Ok(done),
        }
    }

    /// Limits the time of a submission; one that takes longer makes the device lost.
    pub fn set_deadline(&self, deadline: Duration) {
        let deadline = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        self.deadline.store(deadline, Ordering::Relaxed);
    }

    /// Waits until all that was submitted is done.
    pub fn finished(&self) -> Result<(), GpuError> {
        self.wait("what was submitted")
    }

    /// The same; errors name the work as `what`.
    pub(crate) fn wait(&self, what: &str) -> Result<(), GpuError> {
        let deadline = Duration::from_nanos(self.deadline.load(Ordering::Relaxed));
        let poll = wgpu::PollType::Wait { submission_index: None, timeout: Some(deadline) };
        let waited = self.device.poll(poll);
        self.alive()?;
        // No time at all is over before the device is asked.
        if waited.is_ok() && !deadline.is_zero() {
            return Ok(());
        }
        let error = GpuError::Timeout { what: what.into(), seconds: deadline.as_secs_f64() };
        self.abandon(&error);
        Err(error)
    }

    /// Sends nothing to the device again. wgpu's queue waits without end for what was submitted when it is dropped, and
    /// this device does not finish: so it is kept for as long as the process lives.
    fn abandon(&self, why: &GpuError) {
        lock(&self.lost).get_or_insert_with(|| why.to_string());
        std::mem::forget((self.device.clone(), self.queue.clone()));
    }
}

impl Drop for Gpu {
    /// Waits, but not longer than the deadline.
    fn drop(&mut self) {
        if self.alive().is_ok() {
            // Whoever drops it has no use for what went wrong.
            let _ = self.finished();
        }
    }
}
