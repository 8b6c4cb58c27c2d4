//! Builds a ring from the flags of a head: key, emulated links, draft model, recovery, discovery.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Bytes;
use hearth_ring::{
    DelayedTransport, EmulatedTransport, EncryptedTransport, Key, LocalModel, MdnsScope, OnFetch,
    RecoveryPolicy, Ring, RingError, RingOptions, TcpTransport, Transport, discovery, plan_for_sequences,
    plan_with_draft,
};
use hearth_schema::Plan;
use hearth_schema::pass::MAX_PASS_TOKENS;
use hearth_schema::scenario::Workload;
use hearth_workflow::{LoadedScenario, MidRunPlanner};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::RingArgs;
use crate::diagnostics::Failure;
use crate::emulation;
use crate::machine::{open_model, read_scenario};

/// Line that a head with `--mark-tokens` prints when the prompt enters the ring.
pub const PROMPT_MARK: &str = "begins";

/// Default number of tokens drafted at a time.
/// source: assumed; appendix A.9 of the prima.cpp paper drafts a few tokens at a time
const DEFAULT_DRAFT_TOKENS: u32 = 4;

/// The plan, the model and the options of a ring.
pub struct RingBuilder {
    pub plan: Plan,
    pub model: Arc<LocalModel>,
    pub options: RingOptions,
    /// Maximum number of prompt tokens in one batch.
    pub micro_batch: u32,
    /// Number of tokens drafted at a time; 0 without a draft model.
    pub draft_tokens: u32,
    /// Time limit for finding workers without an address; `None` disables discovery.
    discovery_timeout: Option<Duration>,
}

impl RingBuilder {
    /// Creates a builder for a plan with the given number of sequences, and for a model with its path.
    pub fn new(
        args: &RingArgs,
        (plan, sequences): (Plan, u32),
        (model, path): (Arc<LocalModel>, &Path),
    ) -> Result<Self, Failure> {
        let scenario = args.scenario.as_deref().map(read_scenario).transpose()?;
        let mut plan = plan_for_sequences(plan, sequences);
        let draft = args.draft_model.as_deref().map(open_model).transpose()?.map(Arc::new);
        if let (Some(draft), None) = (&draft, &plan.draft) {
            plan = plan_with_draft(plan, &model, draft)?;
        }
        let workload = scenario.as_ref().map(|loaded| &loaded.scenario.workload);
        let drafts =
            args.draft_tokens.or_else(|| workload.map(Workload::drafted_tokens).filter(|&drafts| drafts > 0));
        let draft_tokens = plan.draft.as_ref().map_or(0, |_| drafts.unwrap_or(DEFAULT_DRAFT_TOKENS));
        let default_batch = workload.map_or(MAX_PASS_TOKENS, |workload| workload.micro_batch);
        let options = RingOptions {
            threads: args.threads.unwrap_or(0),
            pass_deadline: Duration::from_secs(args.deadline),
            draft,
            recovery: recovery_policy(args, scenario, path)?,
            on_fetch: Some(report_fetching()),
            ..RingOptions::default()
        };
        let (micro_batch, discovery_timeout) =
            (args.micro_batch.unwrap_or(default_batch), args.discover.map(Duration::from_secs));
        Ok(Self { plan, model, options, micro_batch, draft_tokens, discovery_timeout })
    }

    /// Finds the workers without an address, if requested, and connects the ring.
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

/// A task that runs over the transport that the flags select.
pub trait TransportTask {
    type Output;

    async fn run<T: Transport>(self, transport: T) -> Self::Output;
}

/// The emulation of slow links.
#[derive(Debug, Clone, Copy, Default)]
pub enum LinkEmulation<'a> {
    #[default]
    None,
    /// Delays everything that this device sends.
    Delay(Duration),
    /// Delays messages according to the paths in a file.
    Paths(&'a Path),
}

impl<'a> LinkEmulation<'a> {
    /// Returns the emulation for two flags, of which at most one is given.
    pub fn of(delay: Option<Duration>, links: Option<&'a Path>) -> Self {
        links.map(LinkEmulation::Paths).or(delay.map(LinkEmulation::Delay)).unwrap_or_default()
    }
}

/// Runs a task over TCP, encrypted with the key and with emulated links, if those are given.
pub async fn with_transport<V: TransportTask>(
    key: Option<Key>,
    emulation: LinkEmulation<'_>,
    task: V,
) -> V::Output {
    let (output, delay) = match (emulation, key) {
        (LinkEmulation::None, Some(key)) => {
            return task.run(EncryptedTransport::new(TcpTransport, key)).await;
        }
        (LinkEmulation::None, None) => return task.run(TcpTransport).await,
        (LinkEmulation::Delay(delay), Some(key)) => {
            (task.run(DelayedTransport::new(EncryptedTransport::new(TcpTransport, key), delay)).await, delay)
        }
        (LinkEmulation::Delay(delay), None) => {
            (task.run(DelayedTransport::new(TcpTransport, delay)).await, delay)
        }
        (LinkEmulation::Paths(file), key) => {
            let paths = emulation::paths(file);
            let output = match key {
                Some(key) => {
                    task.run(EmulatedTransport::new(EncryptedTransport::new(TcpTransport, key), paths)).await
                }
                None => task.run(EmulatedTransport::new(TcpTransport, paths)).await,
            };
            (output, emulation::max_delay(file))
        }
    };
    // Waits until the last delayed message is delivered.
    tokio::time::sleep(2 * delay).await;
    output
}

/// Logs, in steps of 10 %, the share of its layers that each worker has fetched.
fn report_fetching() -> OnFetch {
    let logged: Mutex<BTreeMap<String, u64>> = Mutex::default();
    Arc::new(move |name, done, total| {
        let tenth = done.saturating_mul(10) / total.max(1);
        let mut logged = logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.insert(name.to_owned(), tenth) != Some(tenth) {
            tracing::info!("{name} has fetched {} of {}", Bytes(done), Bytes(total));
        }
    })
}

/// Returns how the head reacts to the loss of a device.
fn recovery_policy(
    args: &RingArgs,
    scenario: Option<LoadedScenario>,
    model: &Path,
) -> Result<RecoveryPolicy, Failure> {
    let Some(loaded) = scenario else {
        return Ok(if args.give_up { RecoveryPolicy::Fail } else { RecoveryPolicy::Spread });
    };
    let cluster = Arc::new(loaded.cluster(Some(model))?);
    Ok(RecoveryPolicy::Replan { cluster, replanner: Arc::new(MidRunPlanner::new(loaded)) })
}

/// Waits for SIGINT or SIGTERM.
pub async fn termination_signal() {
    let Ok(mut terminated) = signal(SignalKind::terminate()) else {
        let _ = tokio::signal::ctrl_c().await;
        return;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminated.recv() => {}
    }
}

/// Exits when standard input ends, which happens when the parent process ends.
pub fn exit_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}
