//! Estimates the uncertainty of a predicted time, and the parameters to which the time is most sensitive.
//!
//! The source of a parameter determines its uncertainty: the spread of the repeats for a measurement, the rounding for
//! a published number, the error of the fit for an inferred one, and a large value for an assumed one. All quantities
//! with a unit and a source are drawn together from log-normal distributions around their values, and the same plan is
//! simulated with each draw. If the run ends out of memory, the time of the draw is infinite. In short runs, each
//! parameter alone is decreased and increased by its uncertainty, and those that change the time most are reported.
//!
//! Not here: errors of the device model. Only measured runs show them.

use hearth_core::{Cluster, LinkTable, metrics};
use hearth_profiles::uncertainty::relative_uncertainty;
use hearth_reports::published_results::results::PredictionInterval;
use hearth_schema::trace::Outcome;
use hearth_schema::{Plan, Scenario};
use hearth_sim::ScenarioEvents;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use serde_yaml::Value;

use crate::parallel_jobs::{run_jobs, thread_count};
use crate::quantities::{Quantity, quantities};
use crate::score::with_short_run;
use crate::simulation::{MemoryOptions, simulate_with_events};
use crate::{Error, Progress};

const MAX_SENSITIVE_PARAMETERS: usize = 3;

/// The relative change of the time per token from which a parameter is named. source: assumed, rounded to percents
const MIN_CHANGE: f64 = 5e-3;

/// Number of the random stream for the draws of the parameters.
const RNG_STREAM: u64 = 0x0050_4152_414d_5321;

/// A quantity of a document that has a unit and a source.
struct Parameter {
    /// Index of the document in [`ClusterDocuments`].
    owner: usize,
    /// Keys from the root of the document to the quantity.
    keys: Vec<String>,
    /// Standard deviation of the logarithm of the quantity.
    sigma: f64,
}

/// Names and YAML values of the documents of a cluster: the devices in the order of the cluster, and then the links.
struct ClusterDocuments(Vec<(String, Value)>);

/// Simulates a plan with each of `draws` random draws of the parameters, and returns the interval of its time per
/// token; `None` if the caller cancels the simulations.
pub fn estimate_prediction_interval(
    plan: &Plan,
    cluster: &Cluster,
    scenario: &Scenario,
    memory: MemoryOptions,
    events: &ScenarioEvents,
    draws: usize,
    progress: &dyn Progress,
) -> Result<Option<PredictionInterval>, Error> {
    let documents = ClusterDocuments::new(cluster)?;
    let parameters = documents.parameters(Some(plan));
    let time = |cluster: &Cluster, factors: &[f64]| -> Result<f64, Error> {
        let scaled = documents.scaled(&parameters, factors, cluster)?;
        let trace = simulate_with_events(&scaled, plan, scenario, memory, events)?.trace;
        let tpot = metrics::compute_metrics(&trace).tpot_ms.map(|tpot| tpot.mean_ms);
        Ok(tpot.filter(|_| trace.outcome == Outcome::Ok).unwrap_or(f64::INFINITY))
    };
    let random: Vec<Vec<f64>> = draw_factors(&parameters, cluster.seed).take(draws).collect();
    let single = single_changes(&parameters);
    // A few tokens show what a parameter changes. Events belong to times of the whole run.
    let short = if events.events.is_empty() { with_short_run(cluster) } else { cluster.clone() };
    let job = |index: usize| match index.checked_sub(draws) {
        None => time(cluster, &random[index]),
        Some(index) => time(&short, &single[index]),
    };
    let count = draws + single.len();
    let results = run_jobs(count, thread_count(None), progress, job, |_| Ok(()))?;
    if results.len() < count {
        return Ok(None);
    }
    let mut times = results.into_iter().map(|(_, time)| time).collect::<Result<Vec<f64>, Error>>()?;
    let single_times = times.split_off(draws);
    times.sort_by(f64::total_cmp);
    let failed_draw_count = times.iter().filter(|time| time.is_infinite()).count();
    let at = |share: f64| times.get(((times.len() as f64 - 1.0) * share).round() as usize).copied();
    let [p10_ms, p90_ms] = [0.1, 0.9].map(|share| at(share).unwrap_or(f64::INFINITY));
    let names = parameters.iter().map(|parameter| documents.name(parameter));
    let sensitive_parameters = most_sensitive(names, &single_times);
    Ok(Some(PredictionInterval {
        p10_ms,
        p90_ms,
        failed_draw_count,
        draw_count: draws,
        sensitive_parameters,
    }))
}

/// Returns copies of a cluster in which all parameters of the devices and links are drawn at random.
pub fn draw_clusters(cluster: &Cluster, draws: usize) -> Result<Vec<Cluster>, Error> {
    let documents = ClusterDocuments::new(cluster)?;
    let parameters = documents.parameters(None);
    let factors = draw_factors(&parameters, cluster.seed).take(draws);
    factors.map(|factors| documents.scaled(&parameters, &factors, cluster)).collect()
}

/// Returns an endless sequence of random draws, each with a factor for each parameter.
fn draw_factors(parameters: &[Parameter], seed: u64) -> impl Iterator<Item = Vec<f64>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(RNG_STREAM);
    std::iter::repeat_with(move || {
        let mut draw = || -> f64 { StandardNormal.sample(&mut random) };
        parameters.iter().map(|parameter| (parameter.sigma * draw()).exp()).collect()
    })
}

/// Returns the factors of the simulations that show the effect of single parameters: one with all parameters as they
/// are, then two for each parameter, which decrease and increase it by one standard deviation.
fn single_changes(parameters: &[Parameter]) -> Vec<Vec<f64>> {
    let unchanged = vec![1.0; parameters.len()];
    let mut all = vec![unchanged.clone()];
    for (index, parameter) in parameters.iter().enumerate() {
        for direction in [-1.0, 1.0] {
            let mut factors = unchanged.clone();
            factors[index] = (direction * parameter.sigma).exp();
            all.push(factors);
        }
    }
    all
}

/// Returns the parameters to which the time per token is most sensitive. Each has the relative change of the time if
/// the parameter changes by one standard deviation: the greater change of an increase and a decrease. `times` are those
/// of [`single_changes`].
fn most_sensitive(names: impl Iterator<Item = String>, times: &[f64]) -> Vec<(String, f64)> {
    let Some((&base, times)) = times.split_first().filter(|(base, _)| base.is_finite()) else {
        return Vec::new();
    };
    let change = |time: &f64| time / base - 1.0;
    let greatest = |pair: &[f64]| {
        pair.iter().map(change).max_by(|one, other| one.abs().total_cmp(&other.abs())).unwrap_or(0.0)
    };
    let mut changes: Vec<(String, f64)> = names.zip(times.chunks(2).map(greatest)).collect();
    changes.sort_by(|one, other| other.1.abs().total_cmp(&one.1.abs()));
    changes.truncate(MAX_SENSITIVE_PARAMETERS);
    changes.retain(|(_, change)| change.abs() >= MIN_CHANGE);
    changes
}

impl ClusterDocuments {
    fn new(cluster: &Cluster) -> Result<Self, Error> {
        let mut documents = Vec::new();
        for member in &cluster.members {
            let device = serde_yaml::to_value(&member.device).map_err(Error::failed)?;
            documents.push((member.name.clone(), device));
        }
        let links = serde_yaml::to_value(cluster.links.links()).map_err(Error::failed)?;
        documents.push(("links".to_owned(), links));
        Ok(Self(documents))
    }

    /// Returns the parameters of the links and of the devices of a plan; without a plan, of all devices.
    fn parameters(&self, plan: Option<&Plan>) -> Vec<Parameter> {
        let mut parameters = Vec::new();
        let last = self.0.len() - 1;
        for (owner, (name, document)) in self.0.iter().enumerate() {
            if owner == last || plan.is_none_or(|plan| plan.device_index(name).is_some()) {
                let uncertain = quantities(document).into_iter().filter(|quantity| !is_built_in(quantity));
                parameters.extend(uncertain.map(|quantity| {
                    let spread = quantity.spread.and_then(|text| text.parse().ok());
                    let sigma = relative_uncertainty(quantity.source, spread);
                    Parameter { owner, keys: quantity.keys, sigma }
                }));
            }
        }
        parameters
    }

    fn name(&self, parameter: &Parameter) -> String {
        format!("{} {}", self.0[parameter.owner].0, parameter.keys.join("."))
    }

    /// Returns a copy of the cluster with each parameter multiplied by its factor.
    fn scaled(&self, parameters: &[Parameter], factors: &[f64], cluster: &Cluster) -> Result<Cluster, Error> {
        let mut documents: Vec<Value> = self.0.iter().map(|(_, document)| document.clone()).collect();
        for (parameter, &factor) in parameters.iter().zip(factors) {
            if factor.to_bits() != 1.0_f64.to_bits() {
                multiply(&mut documents[parameter.owner], &parameter.keys, factor);
            }
        }
        let mut scaled = cluster.clone();
        let links = documents.pop().unwrap_or_default();
        scaled.links = LinkTable::new(serde_yaml::from_value(links).map_err(Error::failed)?);
        for (member, document) in scaled.members.iter_mut().zip(documents) {
            member.device = serde_yaml::from_value(document).map_err(Error::failed)?;
            let memory = &mut member.device.memory;
            memory.available_memory.value = memory.available_memory.value.min(memory.total_memory.value);
        }
        Ok(scaled)
    }
}

/// Returns whether a quantity is known: the installed memory, and that of a graphics card.
fn is_built_in(quantity: &Quantity) -> bool {
    matches!(
        quantity.keys.iter().map(String::as_str).collect::<Vec<_>>()[..],
        [.., "total"] | [.., "gpu", "memory_available"]
    )
}

/// Multiplies the quantity at a path of a document by a factor, and keeps its unit.
fn multiply(document: &mut Value, keys: &[String], factor: f64) {
    let value = keys.iter().try_fold(document, |value, key| match value {
        Value::Mapping(map) => map.get_mut(key.as_str()),
        Value::Sequence(items) => items.get_mut(key.parse::<usize>().ok()?),
        _ => None,
    });
    if let Some(Value::String(text)) = value.and_then(|value| value.get_mut("value"))
        && let Some((number, unit)) = text.split_once(' ')
        && let Ok(number) = number.parse::<f64>()
    {
        // Bytes are integers.
        let number = if unit == "B" { (number * factor).round() } else { number * factor };
        *text = format!("{number} {unit}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_is_multiplied_in_its_unit() {
        let text = "disk: {sequential: {value: 2.5 GB/s, source: x}}\nsize: {value: 3 B, source: x}";
        let mut document: Value = serde_yaml::from_str(text).expect("YAML");
        multiply(&mut document, &["disk".into(), "sequential".into()], 2.0);
        multiply(&mut document, &["size".into()], 1.2);
        assert_eq!(document["disk"]["sequential"]["value"], Value::from("5 GB/s"));
        assert_eq!(document["size"]["value"], Value::from("4 B"));
    }

    #[test]
    fn greater_change_of_each_parameter_counts() {
        let found = |times: &[f64]| {
            let names = ["a", "b", "c", "d"].map(String::from).into_iter();
            most_sensitive(names, times)
        };
        // The base, then a decrease and an increase of each parameter: -20 %, out of memory, nothing, and 10 %.
        let times = [100.0, 80.0, 105.0, 100.0, f64::INFINITY, 100.1, 100.0, 98.0, 110.0];
        let names: Vec<String> = found(&times).iter().map(|(name, _)| name.clone()).collect();
        assert_eq!(names, ["b", "a", "d"]);
        let changes: Vec<f64> = found(&times).iter().map(|(_, change)| *change).collect();
        assert!(
            changes[0].is_infinite() && (changes[1] + 0.2).abs() < 1e-9 && changes[2] > 0.0,
            "{changes:?}"
        );
        assert!(found(&[f64::INFINITY, 1.0, 1.0]).is_empty(), "the plan itself runs out of memory");
    }
}
