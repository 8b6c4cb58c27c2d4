//! Builds a ring from the flags of the head device: key, emulated links, draft model, recovery and discovery.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Bytes;
use hearth_profiles::measure::memory;
use hearth_ring::{
    DelayedTransport, EmulatedTransport, EncryptedTransport, Key, LocalModel, MdnsScope, OnFetchProgress,
    RecoveryPolicy, Ring, RingError, RingOptions, TcpTransport, Transport, discovery, plan_for_sequences,
    plan_with_draft_model,
};
use hearth_schema::Plan;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::scenario::Workload;
use hearth_workflow::documents::read_plan;
use hearth_workflow::planning::{SingleDeviceOptions, single_device_plan};
use hearth_workflow::{LoadedScenario, ScenarioReplanner};

use crate::cli::{DeviceArgs, GpuWeightFormat, PlanOrModel, RingArgs, SingleDeviceArgs};
use crate::diagnostics::{ExitCode, Failure};
use crate::emulation;
use crate::machine::{open_model, read_scenario};

/// Line that a head device with the flag `--mark-tokens` prints when the prompt enters the ring.
pub const PROMPT_START_LINE: &str = "begins";

/// Default number of tokens that the draft model drafts for each pass of the target model.
/// source: assumed; appendix A.9 of the prima.cpp paper drafts a few tokens at a time
const DEFAULT_DRAFT_TOKENS: u32 = 4;

/// Builds a ring from a plan: finds the workers that have no address, and connects all devices.
pub struct RingBuilder {
    pub plan: Plan,
    pub model: Arc<LocalModel>,
    pub options: RingOptions,
    /// Maximum number of prompt tokens in one batch.
    pub micro_batch: u32,
    /// Number of tokens drafted for each pass of the target model; 0 without a draft model.
    pub draft_tokens: u32,
    /// Time limit for finding the workers that have no address in the plan; `None` disables discovery.
    discovery_timeout: Option<Duration>,
}

impl RingBuilder {
    /// Creates a builder from the flags of the head, a plan with its number of concurrent sequences, and a model with
    /// the path of its file.
    pub fn new(
        args: &RingArgs,
        (mut plan, sequences): (Plan, u32),
        (model, path): (Arc<LocalModel>, &Path),
    ) -> Result<Self, Failure> {
        let scenario = args.scenario.as_deref().map(read_scenario).transpose()?;
        let open_draft = |path| open_model(path, GpuWeightFormat::AsStored).map(Arc::new);
        let draft = args.draft_model.as_deref().map(open_draft).transpose()?;
        if let (Some(draft), None) = (&draft, &plan.draft_model) {
            plan = plan_with_draft_model(plan, &model, draft)?;
        }
        let plan = plan_for_sequences(plan, sequences, &model.profile.shape);
        let workload = scenario.as_ref().map(|loaded| &loaded.scenario.workload);
        let drafts =
            args.draft_tokens.or_else(|| workload.map(Workload::drafted_tokens).filter(|&drafts| drafts > 0));
        let draft_tokens = plan.draft_model.as_ref().map_or(0, |_| drafts.unwrap_or(DEFAULT_DRAFT_TOKENS));
        let default_batch = workload.map_or(MAX_PASS_TOKENS, |workload| workload.micro_batch);
        let options = RingOptions {
            threads: args.device.threads.unwrap_or(0),
            pass_timeout: Duration::from_secs(args.pass_timeout_seconds),
            draft_model: draft,
            recovery: recovery_policy(args, scenario, path, plan.planner.strategy != "manual")?,
            on_fetch_progress: Some(report_fetching()),
            ..RingOptions::default()
        };
        let micro_batch = args.micro_batch.unwrap_or(default_batch);
        let discovery_timeout = args.discovery_timeout_seconds.map(Duration::from_secs);
        Ok(Self { plan, model, options, micro_batch, draft_tokens, discovery_timeout })
    }

    /// Creates a builder for a plan of this device alone, which computes with `threads` CPU threads (0 means one for
    /// each core).
    pub fn single_device(plan: Plan, model: Arc<LocalModel>, threads: usize) -> Self {
        let options = RingOptions { threads, ..RingOptions::default() };
        Self { plan, model, options, micro_batch: MAX_PASS_TOKENS, draft_tokens: 0, discovery_timeout: None }
    }

    /// Finds the workers that have no address in the plan, if discovery is enabled, and connects the ring.
    pub async fn connect<T: Transport>(&self, transport: &T) -> Result<Ring<T>, RingError> {
        let mut plan = self.plan.clone();
        if let Some(timeout) = self.discovery_timeout {
            let unknown = plan.devices.iter().skip(1).filter(|device| device.address.is_none());
            let names: BTreeSet<String> = unknown.map(|device| device.name.clone()).collect();
            if !names.is_empty() {
                let found = discovery::find_workers(transport, &names, timeout, MdnsScope::default()).await?;
                for (name, address) in &found {
                    tracing::info!("found {name} at {address}");
                }
                for device in plan.devices.iter_mut().skip(1) {
                    device.address = device.address.take().or_else(|| found.get(&device.name).cloned());
                }
            }
        }
        Ring::connect(transport, plan, self.model.clone(), self.options.clone()).await
    }
}

/// Reads a plan and opens its model, or opens a model that this device runs alone and plans it. Returns the plan, the
/// model and the path of the model file. `sequences` is the number of concurrent sequences of a plan that is made here.
pub fn open_plan_and_model(
    source: &PlanOrModel,
    sequences: u32,
    gpu_weights: GpuWeightFormat,
) -> Result<(Plan, LocalModel, PathBuf), Failure> {
    let PlanOrModel { plan, model, single_device } = source;
    if is_model_file(plan) {
        if let Some(second) = model {
            let what =
                format!("`{}` is a model, so `--model {}` is a second one", plan.display(), second.display());
            return Err(Failure::invalid(what).with_hint("give a plan and its model, or a model alone"));
        }
        let model = open_model(plan, gpu_weights)?;
        let made = plan_for_this_device(&model, single_device, sequences)?;
        return Ok((made, model, plan.clone()));
    }
    let read = read_plan(plan)?;
    let flags = [
        ("--context", single_device.context.is_some()),
        ("--gpu-layers", single_device.gpu_layers.is_some()),
        ("--kv-cache", single_device.kv_cache.is_some()),
    ];
    if let Some((flag, _)) = flags.into_iter().find(|(_, is_set)| *is_set) {
        let what = format!("`{flag}` is for a model without a plan, but `{}` is a plan", plan.display());
        return Err(Failure::invalid(what).with_hint("the plan decides this: make a new plan"));
    }
    let Some(path) = model else {
        let what = "the plan needs a model file";
        return Err(Failure::invalid(what).with_hint("name the model file with `--model GGUF`"));
    };
    Ok((read, open_model(path, gpu_weights)?, path.clone()))
}

/// Returns whether a regular file begins like a GGUF file, or has such a name, so that the error names what is wrong with
/// it. Other files, such as pipes, could not be read again.
fn is_model_file(path: &Path) -> bool {
    let is_regular = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file());
    let mut start = [0; 4];
    let mut read = || File::open(path).and_then(|mut file| file.read_exact(&mut start));
    let is_named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    is_regular && (is_named || read().is_ok() && start == *b"GGUF")
}

/// Returns the plan of a model that this device runs alone.
pub fn plan_for_this_device(
    model: &LocalModel,
    args: &SingleDeviceArgs,
    sequences: u32,
) -> Result<Plan, Failure> {
    let options = SingleDeviceOptions {
        context_length: args.context,
        kv_format: args.kv_cache.unwrap_or_default(),
        sequences,
        gpu_layers: args.gpu_layers.unwrap_or(0),
        available_memory: memory::available_memory(),
    };
    let plan = single_device_plan(&model.profile, &options)?;
    let trained = model.profile.shape.context_length;
    if let Some(context) = args.context.filter(|&context| context > trained) {
        tracing::warn!(
            "the model was trained for a context of {trained} tokens, not {context}: later text may be wrong"
        );
    }
    Ok(plan)
}

/// A task that communicates over the transport that the flags select.
pub trait TransportTask {
    type Output;

    async fn run<T: Transport>(self, transport: T) -> Self::Output;
}

/// Runs a task over TCP: encrypted if there is a key, and with emulated links or delays if `args` has them.
pub fn run_over_transport<K: TransportTask>(
    key: Option<Key>,
    args: &DeviceArgs,
    task: K,
) -> Result<K::Output, Failure> {
    block_on(async {
        match key {
            Some(key) => run_emulated(EncryptedTransport::new(TcpTransport, key), args, task).await,
            None => run_emulated(TcpTransport, args, task).await,
        }
    })
}

/// Runs a task whose ring has no other device.
pub fn run_on_this_device<K: TransportTask>(task: K) -> Result<K::Output, Failure> {
    block_on(task.run(TcpTransport))
}

/// Runs a future in a new runtime.
fn block_on<F: Future>(future: F) -> Result<F::Output, Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    let output = runtime.block_on(future);
    // A thread may still be executing a step; the process does not wait for it.
    runtime.shutdown_background();
    Ok(output)
}

async fn run_emulated<K: TransportTask>(transport: impl Transport, args: &DeviceArgs, task: K) -> K::Output {
    let (output, delay) = match (&args.emulated_links_file, args.link_delay) {
        (Some(file), _) => {
            let transport = EmulatedTransport::new(transport, emulation::path_lookup(file));
            (task.run(transport).await, emulation::max_delay(file))
        }
        (None, Some(delay)) => (task.run(DelayedTransport::new(transport, delay)).await, delay),
        (None, None) => return task.run(transport).await,
    };
    // Waits until the last delayed message is delivered.
    tokio::time::sleep(2 * delay).await;
    output
}

/// Returns a callback that logs how many bytes of layers each worker has fetched, in steps of 10 %.
fn report_fetching() -> OnFetchProgress {
    let logged: Mutex<BTreeMap<String, u64>> = Mutex::default();
    Arc::new(move |name, done, total| {
        let tenth = done.saturating_mul(10) / total.max(1);
        let mut logged = logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.insert(name.to_owned(), tenth) != Some(tenth) {
            tracing::info!("{name} has fetched {} of {}", Bytes(done), Bytes(total));
        }
    })
}

fn recovery_policy(
    args: &RingArgs,
    scenario: Option<LoadedScenario>,
    model: &Path,
    adapts: bool,
) -> Result<RecoveryPolicy, Failure> {
    let Some(loaded) = scenario else {
        return Ok(if args.stop_on_device_loss { RecoveryPolicy::Fail } else { RecoveryPolicy::Spread });
    };
    let cluster = Arc::new(loaded.resolve_cluster(Some(model))?);
    Ok(RecoveryPolicy::Replan { cluster, replanner: Arc::new(ScenarioReplanner::new(loaded)), adapts })
}

/// Starts a thread that exits the program at the end of standard input, which comes when the parent process ends.
pub fn exit_on_stdin_eof() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ExitCode::SUCCESS.exit();
    });
}
