//! Tuning chooses a tiling that can be stored and used, and measuring gives a valid GPU profile.

use hearth_gpu::kernels::product::Tiling;
use hearth_gpu::tuning::{self, Choices, candidates};
use hearth_gpu::{CapabilityMask, measure};
use hearth_profiles::measure::Effort;
use hearth_profiles::{Bytes, Format, Sourced};

use crate::gpu::{alone, open};

#[test]
fn the_fastest_candidate_is_remembered_for_the_adapter() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let timed = tuning::measure(&gpu).unwrap();
    assert_eq!(timed.len(), candidates(gpu.capabilities()).len());
    // Three formats, of a token and of a batch.
    assert!(timed.iter().all(|timed| timed.products.len() == 6));
    assert!(
        timed.iter().flat_map(|timed| &timed.products).all(|&seconds| seconds > 0.0 && seconds.is_finite())
    );
    let mut choices = Choices::default();
    assert_eq!(choices.get(&gpu), None);
    choices.set(&gpu, timed[0].tiling);
    assert_eq!(Choices::of_text(&choices.text()).get(&gpu), Some(timed[0].tiling));
    // What nobody has tested is no choice, whichever process wrote it down.
    choices.set(&gpu, Tiling { tokens: 3, ..timed[0].tiling });
    assert_eq!(choices.get(&gpu), None);
}

#[test]
fn a_gpu_is_measured_in_the_terms_of_a_device_document() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let (memory, buffers) = (Sourced::new(Bytes::mib(512), "a test"), Sourced::new(Bytes::mib(8), "a test"));
    let formats = [Format::Q4K, Format::F16, Format::Q2K];
    let profile = measure::measure(&gpu, Tiling::USUAL, &formats, memory, buffers, &Effort::token()).unwrap();
    // There is no kernel for the third.
    assert_eq!((profile.matvec.iter().count(), profile.matmul.iter().count()), (2, 2));
    let rates = profile.matvec.iter().chain(profile.matmul.iter()).map(|(_, rate)| rate.value.0);
    let rates: Vec<f64> =
        rates.chain([profile.read_bandwidth.value.0, profile.upload.bandwidth.value.0]).collect();
    assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{rates:?}");
    let times = [&profile.kv_copy, &profile.upload, &profile.download].map(|copy| copy.latency.value.0);
    assert!(times.iter().all(|time| time.is_finite() && *time > 0.0), "{times:?}");
    // All of the buffer that the effort allows, and no cache's worth.
    let source = &profile.read_bandwidth.source;
    assert!(source.starts_with("measured") && source.contains("reading 4.00 MiB"), "{source}");
}
