//! Predicts published speeds of a GPU from two numbers, compute rate and memory bandwidth.
//!
//! The row of a `published/1` document names a model and how its weights are stored; the system is a GPU.
//! `hearth_sim::mobile_gpu` predicts both speeds, which become the times of a simulated run. All tokens after the
//! prompt are computed at the middle of their positions.

use std::collections::BTreeMap;
use std::path::Path;

use hearth_profiles::model::ModelDocument;
use hearth_reports::published::results::{Result as Cell, Simulated};
use hearth_reports::published::speeds::{GpuPeaks, GpuRun, Quantisation};
use hearth_schema::trace::Outcome;
use hearth_sim::mobile_gpu::{MobileGpu, Weights};

use crate::Error;
use crate::documents::read;

/// The times of a pass, with the model's document in `folder`.
pub fn predicted(folder: &Path, pass: &GpuRun, gpu: &GpuPeaks) -> Result<Cell, Error> {
    let document: ModelDocument = read(&folder.join(&pass.model))?;
    let shape = document.shape();
    let GpuPeaks { compute, bandwidth } = gpu;
    let own = MobileGpu { compute: compute.value, bandwidth: bandwidth.value };
    let (weights, stored) = match pass.weights {
        Quantisation::Q8 => (Weights::Q8, "q8"),
        Quantisation::Mixed => (Weights::Mixed, "8/4/4"),
    };
    let position = pass.prompt + pass.generate / 2;
    Ok(Cell::Ran(Simulated {
        outcome: Outcome::Ok,
        tpot_ms: Some(1e3 / own.decode(&shape, weights, position)),
        ttft_ms: Some(1e3 * f64::from(pass.prompt) / own.prefill(&shape, weights, pass.prompt)),
        energy_j: None,
        pressure: BTreeMap::new(),
        footprint: Vec::new(),
        plan: format!(
            "{} in {stored}, all on a GPU of {} and {}",
            document.name, compute.value, bandwidth.value
        ),
        unvalidated: Vec::new(),
        spread: None,
    }))
}
