//! Which models of the catalogue run well on the devices of a scenario.
//!
//! Each model is planned by the default strategy and simulated with a prompt of a page and a short answer, with its
//! weights in memory as after an earlier answer. Models are compared by their dense equivalent: the number of
//! parameters of a dense model of about the same quality.
//!
//! Deviation: the quality of a model also depends on its data and training. Models of one class are ordered by the
//! month of their publication, newest first.

use std::ops::Range;

use hearth_core::Cluster;
use hearth_core::metrics::{self, READING_SPEED};
use hearth_profiles::Bytes;
use hearth_profiles::model::{ModelDocument, ModelProfile, Quant, shipped_document, shipped_names};
use hearth_schema::plan::{Plan, PlannedDevice};
use hearth_schema::scenario::PlannerOptions;
use hearth_schema::trace::Outcome;
use serde::Serialize;

use crate::simulation::{MemoryOptions, simulate_with_events};
use crate::verdict::unsupported_systems;
use crate::{Error, LoadedScenario, Progress, SearchBudget, limits, parallel_jobs, planning};

/// Tokens of the prompt and of the answer that are simulated. source: assumed, a page, and enough tokens for a mean
pub const PROMPT_TOKENS: u32 = 512;
const GENERATED_TOKENS: u32 = 8;
/// The format that is tried if a model is too slow in its own.
const SMALLER_QUANT: Quant = Quant::Q3KM;
/// Weights as a multiple of all memory from which a model is not tried. source: assumed, because reading two thirds of
/// a model of some GiB from a fast disk for each token is slower than people read
const MAX_WEIGHTS: f64 = 3.0;

/// How large a dense model of about the same quality is. The limits are those of common model sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum QualityClass {
    /// Less than 2 billion parameters.
    Tiny,
    /// Less than 6 billion parameters.
    Small,
    /// Less than 12 billion parameters.
    Medium,
    /// Less than 25 billion parameters.
    Large,
    /// Less than 50 billion parameters.
    VeryLarge,
    /// At least 50 billion parameters.
    Huge,
}

/// A model of the catalogue, and how it runs on the devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    pub model: String,
    pub quant: String,
    pub quality: QualityClass,
    /// Parameters of a dense model of about the same quality.
    pub dense_equivalent: f64,
    pub parameters: u64,
    pub active_parameters: u64,
    pub license: String,
    pub released: String,
    /// The repository with files of the model, if it is known.
    pub repository: Option<String>,
    /// Increase of the perplexity by the format, as a share; `None` if it is not published.
    pub perplexity_increase: Option<f64>,
    /// The context length in tokens: that of the scenario, or the model's if it is shorter.
    pub context: u32,
    #[serde(rename = "weights_bytes", serialize_with = "Bytes::serialize_number")]
    pub weights: Bytes,
    /// Size of weights and KV cache.
    #[serde(rename = "memory_bytes", serialize_with = "Bytes::serialize_number")]
    pub memory: Bytes,
    /// Whether `hearth run` can run the model.
    pub is_runnable: bool,
    /// Whether a device has a GPU that `hearth` cannot use for this model.
    pub leaves_gpu_idle: bool,
    /// `None` if the model does not run.
    pub tokens_per_s: Option<f64>,
    /// Time to the first token after a prompt of [`PROMPT_TOKENS`], in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Whether the format is that of the model's document, of which repositories have files.
    #[serde(skip)]
    has_own_quant: bool,
    /// The devices in ring order, each with the number of its layers and, in brackets, of those on its GPU.
    pub plan: Option<String>,
    /// Why the model does not run, if it does not.
    pub reason: Option<String>,
}

impl QualityClass {
    fn of(dense_equivalent: f64) -> Self {
        match dense_equivalent {
            size if size < 2e9 => Self::Tiny,
            size if size < 6e9 => Self::Small,
            size if size < 12e9 => Self::Medium,
            size if size < 25e9 => Self::Large,
            size if size < 50e9 => Self::VeryLarge,
            _ => Self::Huge,
        }
    }
}

impl Advice {
    /// Returns whether the model answers at least as fast as people read.
    pub fn runs_well(&self) -> bool {
        self.tokens_per_s.is_some_and(|speed| speed >= READING_SPEED.0)
    }

    /// Returns the command line that downloads the model, if it can be run and a repository is known. Not every
    /// repository has smaller formats, so that they have no such line.
    pub fn download(&self) -> Option<String> {
        let repository = self.repository.as_ref().filter(|_| self.is_runnable && self.has_own_quant)?;
        Some(format!("hearth pull {repository}:{}", self.quant.to_uppercase()))
    }
}

/// Returns the number of parameters of a dense model of about the same quality.
/// source: a rule of thumb for mixtures, the geometric mean of all parameters and those that a token uses
pub fn dense_equivalent(model: &ModelProfile) -> f64 {
    (model.parameters as f64 * model.active_parameters as f64).sqrt()
}

/// Returns the models of the catalogue: the shipped documents that name a licence and a month of publication.
pub fn catalogue() -> impl Iterator<Item = ModelDocument> {
    let documents = shipped_names().filter_map(|name| shipped_document(name).ok());
    documents.filter(|document| document.license.is_some() && document.released.is_some())
}

/// The models of the catalogue on the devices of a scenario.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AdviceList {
    /// The best models are first: those that are fast enough, by class, and then by month of publication. After a
    /// cancellation some are missing.
    pub models: Vec<Advice>,
    /// A sentence about devices on which hearth does not run yet, if there are any.
    pub unsupported_systems: Option<String>,
}

/// Plans and simulates all models of the catalogue on the devices of a scenario.
pub fn advise(loaded: &LoadedScenario, threads: usize, progress: &dyn Progress) -> Result<AdviceList, Error> {
    let cluster = loaded.resolve_cluster(None)?;
    let models: Vec<ModelDocument> = catalogue().collect();
    let job = |index: usize| evaluate(loaded, &cluster, &models[index]);
    let results = parallel_jobs::run_jobs(models.len(), threads, progress, job, |_| Ok(()))?;
    let mut all = results.into_iter().map(|(_, advice)| advice).collect::<Result<Vec<_>, _>>()?;
    all.sort_by(|one, other| {
        let key = |it: &Advice| (it.runs_well(), it.quality, it.released.clone());
        let speed = |it: &Advice| it.tokens_per_s.unwrap_or(0.0);
        key(other).cmp(&key(one)).then(speed(other).total_cmp(&speed(one))).then(one.model.cmp(&other.model))
    });
    let devices = cluster.members.iter().map(|member| (member.name.as_str(), member.device.os));
    Ok(AdviceList { models: all, unsupported_systems: unsupported_systems(devices) })
}

/// Evaluates a model in its own format, and in a smaller one if it is slower than people read.
fn evaluate(loaded: &LoadedScenario, cluster: &Cluster, document: &ModelDocument) -> Result<Advice, Error> {
    let own = evaluate_format(loaded, cluster, document, &document.to_profile().map_err(Error::failed)?);
    if own.runs_well() || document.quant != Quant::Q4KM.name() {
        return Ok(own);
    }
    let smaller = ModelDocument { quant: SMALLER_QUANT.to_string(), ..document.clone() };
    let smaller = evaluate_format(loaded, cluster, document, &smaller.to_profile().map_err(Error::failed)?);
    Ok(if smaller.runs_well() { smaller } else { own })
}

fn evaluate_format(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    document: &ModelDocument,
    model: &ModelProfile,
) -> Advice {
    let weights = model.total_bytes();
    let context = cluster.context_length.min(model.shape.context_length);
    let cache = model.shape.cache_bytes(context, cluster.kv_cache_format.format());
    let dense_equivalent = dense_equivalent(model);
    let quant: Option<Quant> = model.quant.parse().ok();
    let advice = Advice {
        model: model.name.clone(),
        quant: model.quant.clone(),
        quality: QualityClass::of(dense_equivalent),
        dense_equivalent,
        parameters: model.parameters,
        active_parameters: model.active_parameters,
        license: document.license.clone().unwrap_or_default(),
        released: document.released.clone().unwrap_or_default(),
        repository: document.repository.clone(),
        perplexity_increase: quant.and_then(Quant::perplexity_increase),
        context,
        weights,
        memory: weights + cache,
        has_own_quant: model.quant == document.quant,
        is_runnable: model.shape.check_runnable().is_ok(),
        leaves_gpu_idle: !model.shape.architecture.spec().has_gpu_kernels
            && cluster.members.iter().any(|member| member.device.gpu.is_some()),
        tokens_per_s: None,
        ttft_ms: None,
        plan: None,
        reason: None,
    };
    let all_memory = total_memory(cluster);
    if weights.as_f64() > MAX_WEIGHTS * all_memory.as_f64() {
        let reason = format!("its weights have {weights}, all memory together {all_memory}");
        return Advice { reason: Some(reason), ..advice };
    }
    match simulate(loaded, cluster, model) {
        Ok((speed, first_token, plan)) => {
            Advice { tokens_per_s: Some(speed), ttft_ms: Some(first_token), plan: Some(plan), ..advice }
        }
        Err(reason) => Advice { reason: Some(reason), ..advice },
    }
}

/// Returns the available memory of all devices, and of their graphics cards.
fn total_memory(cluster: &Cluster) -> Bytes {
    let of_device = |member: &hearth_core::Member| {
        let card = member.device.gpu.as_ref().filter(|gpu| !gpu.unified_memory);
        member.device.memory.available_memory.value
            + card.map_or(Bytes::ZERO, |gpu| gpu.memory_available.value)
    };
    cluster.members.iter().map(of_device).sum()
}

/// Returns the speed, the milliseconds to the first token, and the plan of a model; or why it does not run.
fn simulate(
    loaded: &LoadedScenario,
    cluster: &Cluster,
    model: &ModelProfile,
) -> Result<(f64, f64, String), String> {
    let failed = |error: Error| error.one_line_message();
    let devices = cluster.members.iter().map(|member| member.device.clone()).collect();
    // With the checks of a scenario that names the model.
    let mut cluster = loaded.assemble_cluster(devices, model.clone(), None).map_err(failed)?;
    limits::apply_absolute_memory_limits(&loaded.scenario, &mut cluster);
    cluster.context_length = cluster.context_length.min(model.shape.context_length);
    let prompt = PROMPT_TOKENS.min(cluster.context_length.saturating_sub(GENERATED_TOKENS)).max(1);
    let workload = &mut cluster.workload;
    (workload.prompt_tokens, workload.generated_tokens, workload.sequences) = (prompt, GENERATED_TOKENS, 1);
    (workload.speculation, workload.arrivals) = (None, None);
    // The windows of a scenario are for its own model.
    let PlannerOptions { slow_disk_threshold, risk, .. } = loaded.scenario.planner;
    let options = PlannerOptions { slow_disk_threshold, risk, ..PlannerOptions::default() };
    let plan = planning::make_plan(loaded, &cluster, &options, SearchBudget::NONE).map_err(failed)?;
    limits::apply_memory_limits(&loaded.scenario, &mut cluster, &plan, Bytes::ZERO);
    let memory = MemoryOptions { warm_start: true, ignore_memory: false };
    let events = hearth_sim::ScenarioEvents::default();
    let run = simulate_with_events(&cluster, &plan, &loaded.scenario, memory, &events).map_err(failed)?;
    let metrics = metrics::compute_metrics(&run.trace);
    match (metrics.outcome, metrics.tokens_per_s, metrics.ttft_ms) {
        (Outcome::Ok, Some(speed), Some(first)) => Ok((speed, first, layers(&plan))),
        (outcome, ..) => Err(outcome.label().to_owned()),
    }
}

/// Returns the devices of a plan with the numbers of their layers in all rounds.
fn layers(plan: &Plan) -> String {
    let each = |(index, device): (usize, &PlannedDevice)| {
        let count = |layers: &dyn Fn(u32) -> Range<u32>| -> usize {
            (0..plan.rounds).map(|round| layers(round).len()).sum()
        };
        let (all, gpu) =
            (count(&|round| plan.window(index, round)), count(&|round| plan.gpu_window(index, round)));
        let gpu = if gpu > 0 { format!(" ({gpu})") } else { String::new() };
        format!("{} {all}{gpu}", device.name)
    };
    plan.devices.iter().enumerate().map(each).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalogue_has_current_models_of_every_class() {
        let models: Vec<ModelDocument> = catalogue().collect();
        assert!(models.len() >= 60, "{}", models.len());
        assert!(models.iter().filter(|model| model.experts.is_some()).count() >= 10);
        assert!(models.iter().filter(|model| model.repository.is_some()).count() >= 60);
        let size = |name: &str| dense_equivalent(&shipped_document(name).unwrap().to_profile().unwrap());
        assert_eq!(QualityClass::of(size("qwen3-30b-a3b")), QualityClass::Medium);
        assert_eq!(QualityClass::of(size("qwen3-32b")), QualityClass::VeryLarge);
    }
}
