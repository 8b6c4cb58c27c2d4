//! Ranks the gains of another device, disk, network or weight format.
//!
//! Each variant changes one thing of a scenario and is planned again and simulated.

mod variants;

use hearth_profiles::Device;
use hearth_profiles::model::ModelProfile;
use serde::Serialize;

pub use self::variants::{Kind, Variant};
use crate::evaluation::Evaluation;
use crate::planning::REFINE;
use crate::{Error, LoadedScenario, Progress, workers};

/// The scenario as it is, and its variants.
#[derive(Debug)]
pub struct Ranking {
    /// Absent if it was cancelled before.
    pub base: Option<Evaluation>,
    /// Sorted by saved time; those without a time last.
    pub variants: Vec<RankedVariant>,
    /// The number of variants; fewer are ranked if the run was cancelled.
    pub count: usize,
}

#[derive(Debug, Serialize)]
pub struct RankedVariant {
    pub what: String,
    pub kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The saved time per token relative to the unchanged scenario; negative if it takes longer.
    pub saved_ms: Option<f64>,
    #[serde(flatten)]
    pub evaluation: Evaluation,
}

/// Evaluates a scenario and all its variants.
pub fn rank(
    loaded: &LoadedScenario,
    model: &ModelProfile,
    threads: usize,
    progress: &dyn Progress,
) -> Result<Ranking, Error> {
    if loaded.scenario.planner.strategy.as_deref() == Some(REFINE) {
        let what = format!("strategy `{REFINE}` ends after a time: variants could not be compared");
        return Err(Error::invalid(what).hint("choose another with `--strategy`"));
    }
    let devices = loaded.devices(|_, entry| loaded.device(entry))?;
    let variants = variants::of(&loaded.scenario, &devices, model);
    let job = |index: usize| match index.checked_sub(1) {
        None => evaluate(loaded, devices.clone(), model.clone()),
        Some(index) => evaluate_variant(loaded, &variants[index]),
    };
    let mut results = workers::run(variants.len() + 1, threads, progress, job, |_| Ok(()))?.into_iter();
    let Some((0, base)) = results.next() else {
        return Ok(Ranking { base: None, variants: Vec::new(), count: variants.len() });
    };
    let ranked = sorted(&variants, results, base.tpot_ms);
    Ok(Ranking { base: Some(base), variants: ranked, count: variants.len() })
}

fn evaluate_variant(loaded: &LoadedScenario, variant: &Variant) -> Evaluation {
    match (variant.contradiction(), &variant.model) {
        (Some(why), _) => Evaluation::refused(&why),
        (None, Err(why)) => Evaluation::refused(why),
        (None, Ok(model)) => {
            let loaded = loaded.with(variant.scenario.clone());
            evaluate(&loaded, variant.devices.clone(), model.clone())
        }
    }
}

fn evaluate(loaded: &LoadedScenario, devices: Vec<Device>, model: ModelProfile) -> Evaluation {
    let cluster = loaded.draft_profile().and_then(|draft| loaded.assemble(devices, model, draft));
    match cluster {
        Ok(cluster) => Evaluation::new(loaded, cluster, None),
        Err(error) => Evaluation::refused(&error.what()),
    }
}

/// The shortest times first; then those without a time, in their order.
fn sorted(
    variants: &[Variant],
    results: impl Iterator<Item = (usize, Evaluation)>,
    base: Option<f64>,
) -> Vec<RankedVariant> {
    let mut ranked: Vec<RankedVariant> = results
        .map(|(index, evaluation)| {
            let Variant { kind, device, what, .. } = &variants[index - 1];
            let saved_ms = base.zip(evaluation.tpot_ms).map(|(base, time)| base - time);
            RankedVariant { what: what.clone(), kind: *kind, device: device.clone(), saved_ms, evaluation }
        })
        .collect();
    let key = |it: &RankedVariant| it.evaluation.tpot_ms.unwrap_or(f64::INFINITY);
    ranked.sort_by(|one, other| key(one).total_cmp(&key(other)));
    ranked
}
