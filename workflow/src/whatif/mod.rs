//! Ranks changes of a scenario (devices, memory, disks, network, graphics cards, weight format, model) by the time per
//! token that they save, or by the time that they save for their price.
//!
//! Each variant of the scenario has one change. A new plan is made for each variant and simulated.

mod variants;

use std::collections::BTreeMap;

use hearth_profiles::DeviceProfile;
use hearth_profiles::model::ModelProfile;
use serde::Serialize;

pub use self::variants::{Variant, VariantKind};
use crate::evaluation::Evaluation;
use crate::planning::REFINE_STRATEGY;
use crate::{Error, LoadedScenario, Progress, parallel_jobs};

/// The evaluations of the unchanged scenario and of its variants.
#[derive(Debug)]
pub struct VariantRanking {
    /// Evaluation of the unchanged scenario; `None` if the command was cancelled before it was complete.
    pub baseline: Option<Evaluation>,
    /// Evaluated variants in descending order of saved time; variants without a time are last.
    pub variants: Vec<RankedVariant>,
    /// Number of all variants. After a cancellation not all of them are evaluated.
    pub variant_count: usize,
}

/// The evaluation of a variant, and the time per token that it saves.
#[derive(Debug, Serialize)]
pub struct RankedVariant {
    #[serde(rename = "what")]
    pub description: String,
    pub kind: VariantKind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Time per token that the variant saves, in milliseconds; negative if the variant is slower.
    pub saved_ms: Option<f64>,
    /// The price of what must be bought, if it is known.
    pub price: Option<f64>,
    /// Increase of the perplexity by another weight format, as a share; `None` if it is not published.
    pub perplexity_increase: Option<f64>,
    #[serde(flatten)]
    pub evaluation: Evaluation,
}

/// The prices that the user gives: by the name of a graphics card, for a `disk`, for a `cable`, and for a GiB of
/// `memory`.
pub type Prices = BTreeMap<String, f64>;

impl RankedVariant {
    /// Returns the saved milliseconds for each unit of money; `None` if the price is unknown.
    pub fn saved_for_price(&self) -> Option<f64> {
        Some(self.saved_ms? / self.price.filter(|price| *price > 0.0)?)
    }
}

/// Evaluates a scenario and all its variants. Variants with a price are first, by the time that they save for it.
pub fn rank_variants(
    loaded: &LoadedScenario,
    model: &ModelProfile,
    prices: &Prices,
    threads: usize,
    progress: &dyn Progress,
) -> Result<VariantRanking, Error> {
    if loaded.scenario.planner.strategy.as_deref() == Some(REFINE_STRATEGY) {
        let what =
            format!("strategy `{REFINE_STRATEGY}` ends after a time limit, so variants cannot be compared");
        return Err(Error::invalid(what).with_hint("choose a different strategy with `--strategy`"));
    }
    let devices = loaded.resolve_devices(|_, entry| loaded.resolve_device(entry))?;
    let priced: Vec<&str> = prices.keys().map(String::as_str).collect();
    let variants = variants::all_variants(&loaded.scenario, &devices, model, &priced);
    let job = |index: usize| match index.checked_sub(1) {
        None => evaluate(loaded, devices.clone(), model.clone()),
        Some(index) => evaluate_variant(loaded, &variants[index]),
    };
    let mut results =
        parallel_jobs::run_jobs(variants.len() + 1, threads, progress, job, |_| Ok(()))?.into_iter();
    let Some((0, base)) = results.next() else {
        return Ok(VariantRanking { baseline: None, variants: Vec::new(), variant_count: variants.len() });
    };
    let ranked = results.map(|(index, evaluation)| {
        let Variant { kind, device, description, purchase, perplexity_increase, .. } = &variants[index - 1];
        let saved_ms = base.tpot_ms.zip(evaluation.tpot_ms).map(|(base, time)| base - time);
        let price = purchase.as_ref().and_then(|(what, count)| Some(prices.get(what)? * count));
        RankedVariant {
            description: description.clone(),
            kind: *kind,
            device: device.clone(),
            saved_ms,
            price,
            perplexity_increase: *perplexity_increase,
            evaluation,
        }
    });
    let mut ranked: Vec<RankedVariant> = ranked.collect();
    let key = |it: &RankedVariant| it.evaluation.tpot_ms.unwrap_or(f64::INFINITY);
    let value = |it: &RankedVariant| it.saved_for_price().unwrap_or(f64::NEG_INFINITY);
    ranked.sort_by(|one, other| value(other).total_cmp(&value(one)).then(key(one).total_cmp(&key(other))));
    Ok(VariantRanking { baseline: Some(base), variants: ranked, variant_count: variants.len() })
}

fn evaluate_variant(loaded: &LoadedScenario, variant: &Variant) -> Evaluation {
    match (variant.validation_error(), &variant.model) {
        (Some(why), _) => Evaluation::rejected(&why),
        (None, Err(why)) => Evaluation::rejected(why),
        (None, Ok(model)) => {
            let loaded = loaded.with_scenario(variant.scenario.clone());
            evaluate(&loaded, variant.devices.clone(), model.clone())
        }
    }
}

fn evaluate(loaded: &LoadedScenario, devices: Vec<DeviceProfile>, model: ModelProfile) -> Evaluation {
    let cluster =
        loaded.resolve_draft_model_profile().and_then(|draft| loaded.assemble_cluster(devices, model, draft));
    cluster.map_or_else(
        |error| Evaluation::rejected(&error.one_line_message()),
        |cluster| Evaluation::new(loaded, cluster, None),
    )
}
