//! Opened GPUs: device, queue, buffers and pipelines.
//!
//! Drivers list adapters; [`Gpu`] is an adapter that was opened. All driver calls that can fail run inside
//! `Gpu::try_run`, which converts errors of the driver to a [`GpuError`], so that nothing panics when a device is
//! lost.
//!
//! Not here: the kernels, and the selection of their variant for a device (`crate::kernels`).

mod adapter;
mod buffers;
mod memory;
mod pipelines;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use adapter::{AdapterInfo, Capabilities, CapabilityMask, enumerate_adapters};
pub use buffers::{GpuBuffer, KernelParams};
pub(crate) use memory::Reservation;
pub use pipelines::{Binding, Launch};

use crate::error::GpuError;

/// Default maximum duration of a submission.
/// source: assumed, far more than a batch takes on the slowest software driver in the tests
const DEFAULT_TIMEOUT: Duration = Duration::from_mins(2);

/// An opened GPU, with the memory that is reserved on it and the kernels that are compiled for it.
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: AdapterInfo,
    capabilities: Capabilities,
    /// The reason why the device is lost; `None` if the device works.
    lost: Arc<Mutex<Option<String>>>,
    memory_budget: Arc<memory::MemoryBudget>,
    /// Maximum duration of a submission, in nanoseconds.
    timeout_nanos: AtomicU64,
    /// The compiled kernels. The key is the WGSL source.
    pipelines: Mutex<BTreeMap<String, Arc<wgpu::ComputePipeline>>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Locks a mutex, even if another thread panicked while it held the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Opens the preferred adapter. The order of preference is: discrete GPU, integrated GPU, another adapter, software
    /// driver. The capabilities that `mask` disables are not used.
    pub fn open(mask: CapabilityMask) -> Result<Gpu, GpuError> {
        let (adapter, info) = adapter::find_adapters().into_iter().next().ok_or(GpuError::NoAdapter)?;
        let capabilities = info.capabilities.with_mask(mask);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("hearth"),
            required_features: capabilities.required_features(),
            required_limits: adapter.limits(),
            ..wgpu::DeviceDescriptor::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (device, queue) = opened
            .map_err(|error| GpuError::OpenFailed { adapter: info.name.clone(), why: error.to_string() })?;
        let lost: Arc<Mutex<Option<String>>> = Arc::default();
        let reason_sink = Arc::clone(&lost);
        device.set_device_lost_callback(move |_, message| {
            *lock(&reason_sink) = Some(message);
        });
        // An error outside of all error scopes must not end the process; the next check returns it.
        let reason_sink = Arc::clone(&lost);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&reason_sink).get_or_insert_with(|| error.to_string());
        }));
        let memory_budget = memory::MemoryBudget::new(&info, mask.max_memory_bytes);
        let (timeout_nanos, pipelines) =
            (AtomicU64::new(DEFAULT_TIMEOUT.as_nanos() as u64), Mutex::default());
        Ok(Gpu { device, queue, info, capabilities, lost, memory_budget, timeout_nanos, pipelines })
    }

    pub fn info(&self) -> &AdapterInfo {
        &self.info
    }

    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Destroys the device. Every later call fails as if the device were lost.
    pub fn destroy(&self) {
        self.device.destroy();
        lock(&self.lost).get_or_insert_with(|| "the device was destroyed".into());
    }

    /// Returns an error if the device is lost.
    pub fn check_not_lost(&self) -> Result<(), GpuError> {
        lock(&self.lost).clone().map_or(Ok(()), |why| Err(GpuError::Lost { why }))
    }

    /// Calls `run` inside wgpu error scopes. Returns an error if the device reports one; `what` names the work in it.
    pub(crate) fn try_run<T>(&self, what: &str, run: impl FnOnce(&wgpu::Device) -> T) -> Result<T, GpuError> {
        self.check_not_lost()?;
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let done = run(&self.device);
        let memory = pollster::block_on(memory.pop());
        let others = [pollster::block_on(validation.pop()), pollster::block_on(internal.pop())];
        self.check_not_lost()?;
        if memory.is_some() {
            return Err(GpuError::OutOfMemory { what: what.into() });
        }
        match others.into_iter().flatten().next() {
            Some(error) => Err(GpuError::Failed { what: what.into(), why: error.to_string() }),
            None => Ok(done),
        }
    }

    /// Sets the maximum duration of a submission. If a submission takes longer, the device counts as lost.
    pub fn set_timeout(&self, timeout: Duration) {
        let timeout_nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.timeout_nanos.store(timeout_nanos, Ordering::Relaxed);
    }

    /// Waits until all submissions have finished, up to the maximum duration. `what` names the work in errors.
    pub fn wait(&self, what: &str) -> Result<(), GpuError> {
        let timeout = Duration::from_nanos(self.timeout_nanos.load(Ordering::Relaxed));
        let poll = wgpu::PollType::Wait { submission_index: None, timeout: Some(timeout) };
        let waited = self.device.poll(poll);
        self.check_not_lost()?;
        // A timeout of zero has always elapsed.
        if waited.is_ok() && !timeout.is_zero() {
            return Ok(());
        }
        let error = GpuError::Timeout { what: what.into(), seconds: timeout.as_secs_f64() };
        self.abandon(&error);
        Err(error)
    }

    /// Marks the device as lost and leaks device and queue. A wgpu queue waits without a timeout for all submissions
    /// when it is dropped, but this device does not finish its submissions.
    fn abandon(&self, why: &GpuError) {
        lock(&self.lost).get_or_insert_with(|| why.to_string());
        std::mem::forget((self.device.clone(), self.queue.clone()));
    }
}

impl Drop for Gpu {
    /// Waits for all submissions, up to the maximum duration of a submission.
    fn drop(&mut self) {
        if self.check_not_lost().is_ok() {
            // Nobody can handle an error during a drop.
            let _ = self.wait("a submission");
        }
    }
}
