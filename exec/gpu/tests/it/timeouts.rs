//! Tests of the timeout: a GPU that does not finish a submission in time counts as lost.

use std::time::Duration;

use hearth_gpu::device::KernelParams;
use hearth_gpu::{CapabilityMask, GpuError};
use hearth_runtime::clock::monotonic_nanos;

use crate::gpu::open_and_lock;

/// Number of loop iterations that keep one GPU thread busy for several seconds.
const STEPS: u32 = 300_000_000;

/// Maximum duration of a wait that ends at the timeout. [`STEPS`] iterations take far longer.
const MAX_WAIT: Duration = Duration::from_millis(1500);

/// Returns the WGSL source of a kernel with [`STEPS`] iterations, which takes several seconds.
fn busy_kernel() -> String {
    format!(
        "{}@group(0) @binding(1) var<storage, read_write> out: array<u32>;\n\
         @compute @workgroup_size(1)\n\
         fn main() {{\n    var x = params.first_position + 1u;\n    \
         for (var i = 0u; i < params.end; i++) {{\n        \
         x ^= x << 13u;\n        x ^= x >> 17u;\n        x ^= x << 5u;\n    }}\n    out[0] = x;\n}}\n",
        KernelParams::WGSL_DECLARATION
    )
}

#[test]
fn gpu_that_times_out_stays_lost() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let tensor = gpu.allocate("a tensor", 16).unwrap();
    gpu.set_timeout(Duration::ZERO);
    let error = gpu.read::<f32>(&tensor, 4).unwrap_err();
    assert!(matches!(error, GpuError::Timeout { .. }), "{error}");
    // A longer timeout does not make the device usable again.
    gpu.set_timeout(Duration::from_mins(1));
    let error = gpu.write(&tensor, &[1.0f32]).unwrap_err();
    assert!(matches!(&error, GpuError::Lost { why } if why.contains("did not finish")), "{error}");
}

#[test]
fn waiting_for_a_busy_gpu_ends_at_the_timeout() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    if gpu.info().is_software() {
        eprintln!("SKIPPED: a software driver computes during the submission itself");
        return;
    }
    gpu.set_timeout(Duration::from_millis(50));
    let (params, out) = (gpu.create_params_buffer().unwrap(), gpu.allocate("out", 16).unwrap());
    gpu.write(&params, &[KernelParams { end: STEPS, ..KernelParams::for_pass(1, 0) }]).unwrap();
    let launch = gpu.prepare_launch("busy", &busy_kernel(), &[&params, &out], [1, 1, 1]).unwrap();
    gpu.submit([&launch]).unwrap();
    let begin = monotonic_nanos();
    let error = gpu.wait("a submission").unwrap_err();
    assert!(matches!(error, GpuError::Timeout { .. }), "{error}");
    drop((launch, gpu));
    let waited = Duration::from_nanos(monotonic_nanos() - begin);
    assert!(waited < MAX_WAIT, "{waited:?}");
}
