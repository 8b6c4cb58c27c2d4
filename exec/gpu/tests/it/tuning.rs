//! Tests of tuning, whose result can be stored and loaded, and of the measurement of a GPU profile.

use hearth_gpu::kernels::matmul::Tiling;
use hearth_gpu::tuning::{self, TunedTilings, candidate_tilings};
use hearth_gpu::{CapabilityMask, measure};
use hearth_profiles::measure::MeasurementOptions;
use hearth_profiles::{Bytes, Format, Sourced};

use crate::gpu::open_and_lock;

#[test]
fn fastest_candidate_is_stored_for_the_adapter() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let timed = tuning::time_candidates(&gpu).unwrap();
    assert_eq!(timed.len(), candidate_tilings(gpu.capabilities()).len());
    // Three formats, each with one token and with a batch.
    assert!(timed.iter().all(|timed| timed.matmul_seconds.len() == 6));
    let mut seconds = timed.iter().flat_map(|timed| &timed.matmul_seconds);
    assert!(seconds.all(|&seconds| seconds > 0.0 && seconds.is_finite()));
    let mut tunings = TunedTilings::default();
    assert_eq!(tunings.get(&gpu), None);
    tunings.set(&gpu, timed[0].tiling);
    assert_eq!(TunedTilings::parse(&tunings.to_text()).get(&gpu), Some(timed[0].tiling));
    // A tiling that is not a candidate is ignored, because no test covers it.
    tunings.set(&gpu, Tiling { tokens_per_thread: 3, ..timed[0].tiling });
    assert_eq!(tunings.get(&gpu), None);
}

#[test]
fn measured_profile_has_all_values_of_a_device_document() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let (memory, buffers) =
        (Sourced::new(Bytes::from_mib(512), "a test"), Sourced::new(Bytes::from_mib(8), "a test"));
    let (formats, options) = ([Format::Q4K, Format::F16, Format::Q2K], MeasurementOptions::minimal());
    let profile = measure::measure_gpu(&gpu, Tiling::DEFAULT, &formats, memory, buffers, &options).unwrap();
    // There is no kernel for the third format.
    assert_eq!((profile.matvec.iter().count(), profile.matmul.iter().count()), (2, 2));
    let rates = profile.matvec.iter().chain(profile.matmul.iter()).map(|(_, rate)| rate.value.0);
    let rates: Vec<f64> =
        rates.chain([profile.read_bandwidth.value.0, profile.upload.bandwidth.value.0]).collect();
    assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
    let times = [&profile.kv_copy, &profile.upload, &profile.download].map(|copy| copy.latency.value.0);
    assert!(times.iter().all(|time| time.is_finite() && *time > 0.0), "{times:?}");
    // The whole buffer that the options allow, not only as much as a cache holds.
    let source = &profile.read_bandwidth.source;
    assert!(source.starts_with("measured") && source.contains("reading 4.00 MiB"), "{source}");
}
