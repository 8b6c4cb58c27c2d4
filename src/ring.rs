//! Connects a ring as the flags of a head say: key, emulated links, draft model, recovery, discovery.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_profiles::Bytes;
use hearth_ring::{
    Delayed, Emulated, Key, LocalModel, Medium, Network, OnFetch, Renewal, Ring, RingError, RingOptions,
    Sealed, Tcp, discovery, for_sequences, with_draft,
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

/// What a head with `--mark-tokens` prints when the prompt enters the ring.
pub const BEGINS: &str = "begins";

/// Tokens drafted at a time, if nothing says how many.
/// source: assumed; appendix A.9 of the prima.cpp paper drafts a few at a time
const DRAFT_TOKENS: u32 = 4;

/// Everything that is needed to connect a ring.
pub struct RingBuilder {
    pub plan: Plan,
    /// The model on this device.
    pub model: Arc<LocalModel>,
    pub options: RingOptions,
    /// The most tokens of a prompt that enter the ring as one batch.
    pub micro_batch: u32,
    /// Tokens that are drafted at a time.
    pub drafts: u32,
    /// How long to search for workers without an address.
    discover: Option<Duration>,
}

impl RingBuilder {
    /// For a plan and a number of sequences, with a model and its path.
    pub fn new(
        args: &RingArgs,
        (plan, sequences): (Plan, u32),
        (model, path): (Arc<LocalModel>, &Path),
    ) -> Result<Self, Failure> {
        let scenario = args.scenario.as_deref().map(read_scenario).transpose()?;
        let mut plan = for_sequences(plan, sequences);
        let draft = args.draft_model.as_deref().map(open_model).transpose()?.map(Arc::new);
        if let (Some(draft), None) = (&draft, &plan.draft) {
            plan = with_draft(plan, &model, draft)?;
        }
        let workload = scenario.as_ref().map(|loaded| &loaded.scenario.workload);
        let drafts =
            args.draft_tokens.or_else(|| workload.map(Workload::drafts).filter(|&drafts| drafts > 0));
        let drafts = plan.draft.as_ref().map_or(0, |_| drafts.unwrap_or(DRAFT_TOKENS));
        let usual = workload.map_or(MAX_PASS_TOKENS, |workload| workload.micro_batch);
        let options = RingOptions {
            threads: args.threads.unwrap_or(0),
            pass_deadline: Duration::from_secs(args.deadline),
            draft,
            renewal: renewal(args, scenario, path)?,
            on_fetch: Some(report_fetching()),
            ..RingOptions::default()
        };
        let (micro_batch, discover) =
            (args.micro_batch.unwrap_or(usual), args.discover.map(Duration::from_secs));
        Ok(Self { plan, model, options, micro_batch, drafts, discover })
    }

    /// Connects the ring, after finding workers without an address if that was asked for.
    pub async fn connect<N: Network>(&self, network: &N) -> Result<Ring<N>, RingError> {
        let mut plan = self.plan.clone();
        if let Some(limit) = self.discover {
            let unknown = plan.devices.iter().skip(1).filter(|device| device.address.is_none());
            let names: BTreeSet<String> = unknown.map(|device| device.name.clone()).collect();
            if !names.is_empty() {
                let found = discovery::find(network, &names, limit, Medium::default()).await?;
                for (name, address) in &found {
                    tracing::info!("found {name} at {address}");
                }
                for device in plan.devices.iter_mut().skip(1) {
                    device.address = device.address.take().or_else(|| found.get(&device.name).cloned());
                }
            }
        }
        Ring::connect(network, plan, self.model.clone(), self.options.clone()).await
    }
}

/// Work over the transport that the flags select.
pub trait TransportTask {
    type Output;

    async fn run<N: Network>(self, network: N) -> Self::Output;
}

/// How links are made slower.
#[derive(Debug, Clone, Copy, Default)]
pub enum LinkEmulation<'a> {
    /// Not at all.
    #[default]
    No,
    /// Everything that this device sends is delayed.
    By(Duration),
    /// Everything is delayed as the paths in this file say.
    As(&'a Path),
}

impl<'a> LinkEmulation<'a> {
    /// From two flags, of which at most one is given.
    pub fn of(delay: Option<Duration>, links: Option<&'a Path>) -> Self {
        links.map(LinkEmulation::As).or(delay.map(LinkEmulation::By)).unwrap_or_default()
    }
}

/// Runs a task over TCP, encrypted with the key and with emulated links, if those are given.
pub async fn with_transport<V: TransportTask>(
    key: Option<Key>,
    slower: LinkEmulation<'_>,
    task: V,
) -> V::Output {
    let (output, way) = match (slower, key) {
        (LinkEmulation::No, Some(key)) => return task.run(Sealed::new(Tcp, key)).await,
        (LinkEmulation::No, None) => return task.run(Tcp).await,
        (LinkEmulation::By(delay), Some(key)) => {
            (task.run(Delayed::new(Sealed::new(Tcp, key), delay)).await, delay)
        }
        (LinkEmulation::By(delay), None) => (task.run(Delayed::new(Tcp, delay)).await, delay),
        (LinkEmulation::As(file), key) => {
            let ways = emulation::ways(file);
            let output = match key {
                Some(key) => task.run(Emulated::new(Sealed::new(Tcp, key), ways)).await,
                None => task.run(Emulated::new(Tcp, ways)).await,
            };
            (output, emulation::longest(file))
        }
    };
    // The last message is still delayed when it has been written.
    tokio::time::sleep(2 * way).await;
    output
}

/// Reports every tenth of what a worker fetches.
fn report_fetching() -> OnFetch {
    let told: Mutex<BTreeMap<String, u64>> = Mutex::default();
    Arc::new(move |name, done, total| {
        let tenth = done.saturating_mul(10) / total.max(1);
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(name.to_owned(), tenth) != Some(tenth) {
            tracing::info!("{name} has fetched {} of {}", Bytes(done), Bytes(total));
        }
    })
}

/// What a head does when a device is lost.
fn renewal(args: &RingArgs, scenario: Option<LoadedScenario>, model: &Path) -> Result<Renewal, Failure> {
    let Some(loaded) = scenario else {
        return Ok(if args.give_up { Renewal::Never } else { Renewal::Spread });
    };
    let cluster = Arc::new(loaded.cluster(Some(model))?);
    Ok(Renewal::Planner { cluster, replanner: Arc::new(MidRunPlanner::new(loaded)) })
}

/// Waits for SIGINT or SIGTERM.
pub async fn stopped() {
    let Ok(mut terminated) = signal(SignalKind::terminate()) else {
        let _ = tokio::signal::ctrl_c().await;
        return;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminated.recv() => {}
    }
}

/// Exits when standard input ends, because the parent process is gone then.
pub fn end_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}
