//! This machine as a device of a scenario: measures its profile, opens model files and reads scenarios.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hearth_profiles::DeviceProfile;
use hearth_profiles::measure::MeasurementOptions;
use hearth_profiles::model::ModelProfile;
use hearth_ring::probe::{self, ProbeOptions};
use hearth_ring::{LocalModel, OnVerificationProgress, Verification};
use hearth_runtime::profile::{ProfileOptions, profile};
use hearth_runtime::weights::digest_cache::DigestCache;
use hearth_runtime::{ChatTemplate, Tokenizer, Weights};
use hearth_schema::hub_model::HubModelName;
use hearth_schema::plan::WeightDigests;
use hearth_schema::scenario::DeviceEntry;
use hearth_workflow::{Error, LoadedScenario, ReferenceResolver, check_model_exists};
use indicatif::ProgressBar;

use crate::cli::{DeviceArgs, GpuWeightFormat, PlanningArgs};
use crate::diagnostics::Failure;
use crate::gpu;
use crate::hub;
use crate::output::escape_line;
use crate::profile_cache::ProfileCache;
use crate::progress;

/// Environment variable that makes measurements of a device as short as possible, for tests that need no correct
/// rates.
const MINIMAL_MEASUREMENTS: &str = "HEARTH_MINIMAL_MEASUREMENTS";

/// Returns the options that determine for how long a device is measured.
pub fn measurement_options(quick: bool) -> MeasurementOptions {
    if std::env::var_os(MINIMAL_MEASUREMENTS).is_some() {
        tracing::warn!("the measured rates are meaningless, because {MINIMAL_MEASUREMENTS} is set");
        MeasurementOptions::minimal()
    } else if quick {
        MeasurementOptions::quick()
    } else {
        MeasurementOptions::full()
    }
}

/// Resolves the references in a scenario: measures this machine, and opens model files.
#[derive(Debug)]
pub struct LocalMachineResolver;

impl ReferenceResolver for LocalMachineResolver {
    fn measure(&self, entry: &DeviceEntry) -> Result<DeviceProfile, Error> {
        let threads = entry.limits.as_ref().and_then(|limits| limits.threads).unwrap_or(0) as usize;
        let measurement = measurement_options(true);
        let options =
            ProfileOptions { name: entry.name.clone(), measurement, threads, ..ProfileOptions::default() };
        let cache = ProfileCache::new(&options);
        if let Some(device) = cache.as_ref().and_then(ProfileCache::read) {
            return Ok(device);
        }
        tracing::info!("measuring this machine as `{}` (about half a minute)", entry.name);
        let spinner = progress::spinner();
        let links = || Ok(probe::measure_links(&[], None, ProbeOptions::quick())?);
        let device = profile(&options, links, &mut |what| {
            spinner.set_message(format!("{}: {what}", escape_line(&entry.name)));
        });
        let device = device.map_err(Error::failed)?;
        if let Some(cache) = cache {
            cache.write(&device);
        }
        Ok(device)
    }

    fn hub_model(&self, name: &HubModelName) -> Result<PathBuf, Error> {
        hub::locate_for_document(name)
    }

    fn model(&self, path: &Path) -> Result<ModelProfile, Error> {
        let model = open_model(path, GpuWeightFormat::AsStored).and_then(|model| {
            check_text_support(&model.weights, path)?;
            Ok(model)
        });
        model.map(|model| model.profile).map_err(Failure::into_error)
    }
}

/// Reads a scenario, resolves its references on this machine, and logs a warning for each deprecated key.
pub fn read_scenario(path: &Path) -> Result<LoadedScenario, Error> {
    let loaded = LoadedScenario::read(path, &LocalMachineResolver)?;
    for deprecation in &loaded.deprecations {
        tracing::warn!("{}: {deprecation}", path.display());
    }
    Ok(loaded)
}

/// Reads a scenario, and applies the planning flags and the value of the flag `--tokens`.
pub fn read_scenario_with_overrides(
    path: &Path,
    planning: &PlanningArgs,
    tokens: Option<u32>,
) -> Result<LoadedScenario, Error> {
    let mut loaded = read_scenario(path)?;
    planning.overrides().apply(&mut loaded)?;
    if let Some(tokens) = tokens {
        loaded.set_generated_tokens(tokens)?;
    }
    Ok(loaded)
}

/// Returns the folder for files that hearth can make again; `None` if the user has no cache folder.
pub fn cache_folder() -> Option<PathBuf> {
    user_folder("XDG_CACHE_HOME", ".cache")
}

/// Returns the folder for files that a user may want to keep, but that matter only to this machine; `None` if the user
/// has no home folder.
pub fn state_folder() -> Option<PathBuf> {
    user_folder("XDG_STATE_HOME", ".local/state")
}

/// Returns the folder `hearth` in the folder that an environment variable names, by default the folder `default` of the
/// home folder.
fn user_folder(variable: &str, default: &str) -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let parent = folder(variable).or_else(|| Some(folder("HOME")?.join(default)))?;
    Some(parent.join("hearth"))
}

fn digest_cache() -> Option<DigestCache> {
    Some(DigestCache::new(cache_folder()?.join("weight-digests.json")))
}

/// Returns how this device verifies its weights, if the flag `--verify` is set.
pub fn verification(args: &DeviceArgs) -> Option<Verification> {
    let bar = WeightProgress::default();
    let on_progress: OnVerificationProgress =
        Arc::new(move |done, total| bar.report("verifying", done, total));
    args.verify_weights.then(|| Verification { cache: digest_cache(), on_progress: Some(on_progress) })
}

/// Hashes all weights of a model file, for the flag `--hash-weights` of `hearth plan`.
pub fn hash_weights(path: &Path) -> Result<WeightDigests, Failure> {
    let model = open_model(path, GpuWeightFormat::AsStored)?;
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let bar = WeightProgress::default();
    let on_progress = |done, total| {
        bar.report("hashing", done, total);
        true
    };
    Ok(model.weights.compute_digests(threads, digest_cache().as_ref(), &on_progress)?)
}

/// A progress bar for weights, shown from the first report until all bytes are done.
#[derive(Default)]
struct WeightProgress(Mutex<Option<ProgressBar>>);

impl WeightProgress {
    fn report(&self, what: &'static str, done: u64, total: u64) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shown
            .get_or_insert_with(|| progress::progress_bar(what, total, progress::BYTES_TEMPLATE))
            .set_position(done);
        if done == total
            && let Some(bar) = shown.take()
        {
            bar.finish_and_clear();
        }
    }
}

/// Opens a model file for the CPU and the GPU of this machine, with its packed weights if there are any. `gpu_weights` is
/// the format of the weights on the GPU.
pub fn open_model(path: &Path, gpu_weights: GpuWeightFormat) -> Result<LocalModel, Failure> {
    check_model_exists(path)?;
    let opened = LocalModel::open(path);
    let mut model = opened.map_err(|error| Failure::from(error).with_location(path.display()))?;
    if let Err(error) = model.use_packed_weights() {
        tracing::warn!("{error}");
    }
    Ok(model.with_backend_factory(gpu::backend_factory(gpu_weights)))
}

/// Checks that this program can tokenize text for a model, and warns if it cannot use the model's chat template. So
/// a model that is planned for or served to a ring does not fail when the first text arrives.
pub fn check_text_support(weights: &Weights, path: &Path) -> Result<(), Failure> {
    let metadata = &weights.model().metadata;
    let tokenizer =
        Tokenizer::new(metadata).map_err(|error| Failure::from(error).with_location(path.display()))?;
    if let Err(error) = ChatTemplate::find(metadata, &tokenizer) {
        tracing::warn!("{}: no chat with this model: {error}", path.display());
    }
    drop(tokenizer);
    return_freed_memory();
    Ok(())
}

/// Returns freed memory to the operating system. A worker keeps running without a tokenizer, and its memory is better
/// used for weights.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function only releases memory that the allocator does not use.
    unsafe {
        libc::malloc_trim(0);
    }
}
