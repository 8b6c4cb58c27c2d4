//! Predicts published speeds of a GPU from its compute rate and its memory bandwidth.
//!
//! The row of a `published/1` document names a model and the quantisation of its weights; the system is a GPU.
//! `hearth_sim::mobile_gpu` predicts the speeds of prefill and decode, which are reported as the times of a simulated
//! run. All generated tokens are computed at the mean of their positions.

use std::collections::BTreeMap;
use std::path::Path;

use hearth_profiles::model::ModelDocument;
use hearth_reports::published::results::{CellResult, SimulatedRun};
use hearth_reports::published::speeds::{GpuPeaks, GpuRun, Quantisation};
use hearth_schema::trace::Outcome;
use hearth_sim::mobile_gpu::{MobileGpu, WeightFormat};

use crate::Error;
use crate::documents::read;

/// Predicts the times of a run. The path of the model document is relative to `folder`.
pub fn predict(folder: &Path, pass: &GpuRun, gpu: &GpuPeaks) -> Result<CellResult, Error> {
    let document: ModelDocument = read(&folder.join(&pass.model))?;
    let shape = document.shape();
    let GpuPeaks { compute, bandwidth } = gpu;
    let own = MobileGpu { arithmetic_rate: compute.value, bandwidth: bandwidth.value };
    let (weights, stored) = match pass.weights {
        Quantisation::Q8 => (WeightFormat::Q8, "q8"),
        Quantisation::Mixed => (WeightFormat::Mixed, "8/4/4"),
    };
    let position = pass.prompt_tokens + pass.generated_tokens / 2;
    Ok(CellResult::Ran(SimulatedRun {
        outcome: Outcome::Ok,
        tpot_ms: Some(1e3 / own.decode_speed(&shape, weights, position)),
        ttft_ms: Some(
            1e3 * f64::from(pass.prompt_tokens) / own.prefill_speed(&shape, weights, pass.prompt_tokens),
        ),
        energy_j: None,
        pressure: BTreeMap::new(),
        footprint: Vec::new(),
        plan_summary: format!(
            "{} in {stored}, all on a GPU of {} and {}",
            document.name, compute.value, bandwidth.value
        ),
        unvalidated_parts: Vec::new(),
        spread: None,
    }))
}
