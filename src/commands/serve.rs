//! `hearth serve`: offer a ring to programs and people.
//!
//! The ring is kept up for as long as the server runs: when it fails altogether, those who wait are told, and another is
//! brought up as soon as its devices are there.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_exec::ring::{Guest, Key, Network, Ring, Said, Service, Stopper};
use hearth_exec::{ChatTemplate, Tokenizer};
use hearth_schema::Plan;
use hearth_schema::happenings::Happening;
use hearth_schema::happenings::Sort;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::cli::ServeArgs;
use crate::diagnostics::Failure;
use crate::documents::{open_model, read_plan};
use crate::files::read_at_most;
use crate::gpu;
use crate::output::{print, tell};
use crate::ring::{OverNetwork, Raising, over, stopped};
use crate::serve::{House, is_token, now, router, serve};

/// The variable that holds the token.
const VARIABLE: &str = "HEARTH_TOKEN";
/// The shortest token. source: assumed; 16 random letters are beyond guessing over a network
const SHORTEST_TOKEN: usize = 16;
/// The longest file of a token.
const LONGEST_TOKEN: u64 = 4096;
/// Between two tries to bring a ring up again. source: assumed
const AGAIN_AFTER: Duration = Duration::from_secs(2);
/// For answers under way to be told when the server ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs the verb, until it is stopped.
pub fn run(args: &ServeArgs, json: bool) -> Result<ExitCode, Failure> {
    let key = Key::given(args.ring.key.as_deref())?;
    let token = token(args.token.as_deref())?;
    if token.is_none() && !args.listen.ip().is_loopback() {
        let what = format!("{} is reached from other machines, and there is no token", args.listen);
        return Err(Failure::unusable(what)
            .hint("give --token FILE, made with `openssl rand -hex 32 > token`, or listen on 127.0.0.1"));
    }
    let plan = read_plan(&args.plan)?;
    let accelerator = gpu::accelerator(args.ring.gpu_weights);
    let model = Arc::new(open_model(&args.model)?.accelerated_by(accelerator));
    if args.ring.exit_with_stdin {
        super::worker::end_with_stdin();
    }
    let sequences = args.sequences.unwrap_or(plan.sequences);
    let metadata = &model.weights.model().metadata;
    let tokenizer = Arc::new(Tokenizer::new(metadata)?);
    let template = ChatTemplate::new(metadata, &tokenizer).map_err(|error| error.to_string());
    let name = args.name.clone().unwrap_or_else(|| model.profile.name.clone());
    let vocabulary = model.weights.shape().vocabulary;
    let mut raising = Raising::new(&args.ring, (plan, sequences), (model, &args.model))?;
    let (door, guests) = mpsc::unbounded_channel();
    let house = Arc::new(House {
        door,
        tokenizer,
        template,
        model: name.into(),
        context: raising.plan.context,
        vocabulary,
        counters: Arc::default(),
        token,
        plan: Mutex::new(raising.plan.clone()),
        since: now(),
        asked: AtomicU64::new(0),
    });
    let told = house.clone();
    raising.options.on_happening = Some(Arc::new(move |happening, plan| tell_of(&told, happening, plan)));
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let serving = Serving { args, raising, house, guests, json };
    let ended = runtime.block_on(over(key, args.ring.slower(), serving));
    // The head's node may still be in a step; the process does not wait for it.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

/// Says what happens to the ring, and shows it as it is then.
fn tell_of(house: &House, happening: &Happening, plan: Option<&Plan>) {
    let Happening { sort, device, what, .. } = happening;
    match (sort, device) {
        (Sort::Silent, Some(name)) => tell!("{name} is gone: {what}"),
        (Sort::Replanned, _) => tell!("the ring goes on with {what}"),
        (Sort::NotReplanned, Some(name)) => tell!("the ring is not planned again without {name}: {what}"),
        _ => tell!("the ring: {what}"),
    }
    if let Some(plan) = plan {
        house.goes_by(plan);
    }
}

/// What who asks must know, if anything.
fn token(path: Option<&Path>) -> Result<Option<String>, Failure> {
    let (text, place) = match path {
        Some(path) => (read_at_most(path, LONGEST_TOKEN)?, path.display().to_string()),
        None => match std::env::var(VARIABLE) {
            Ok(text) => (text, VARIABLE.to_owned()),
            Err(_) => return Ok(None),
        },
    };
    let text = text.trim().to_owned();
    if text.len() < SHORTEST_TOKEN || !is_token(&text) {
        let what = format!("a token is one word of at least {SHORTEST_TOKEN} printable letters");
        return Err(Failure::unusable(what).at(place).hint("make one with `openssl rand -hex 32 > token`"));
    }
    Ok(Some(text))
}

/// A server and its ring.
struct Serving<'a> {
    args: &'a ServeArgs,
    raising: Raising,
    house: Arc<House>,
    guests: mpsc::UnboundedReceiver<Guest>,
    json: bool,
}

/// What `--json` gives once requests can come, on one line, because the server goes on after it.
#[derive(Serialize)]
struct Ready<'a> {
    listening: &'a str,
    model: &'a str,
    sequences: u32,
    devices: usize,
    can_chat: bool,
}

impl OverNetwork for Serving<'_> {
    type Output = Result<(), Failure>;

    async fn over<N: Network>(self, network: N) -> Self::Output {
        let Serving { args, raising, house, guests, json } = self;
        let listener = TcpListener::bind(args.listen).await.map_err(|error| {
            Failure::running(format!("cannot listen at {}: {error}", args.listen))
                .hint("choose another port with --listen, or stop the program that uses it")
        })?;
        let address = listener.local_addr().map_err(Failure::running)?;
        let ring = tokio::select! {
            ring = raising.connect(&network) => ring?,
            () = stopped() => return Ok(()),
        };
        let keeper = Keeper { raising: &raising, house: &house, stopper: RefCell::default() };
        // First: who reads that requests can come may ask at once.
        keeper.is_up(&ring);
        if json {
            let said = Ready {
                listening: &address.to_string(),
                model: &house.model,
                sequences: raising.plan.sequences,
                devices: raising.plan.devices.len(),
                can_chat: house.template.is_ok(),
            };
            print(format_args!("{}\n", serde_json::to_string(&said).map_err(Failure::running)?))?;
        } else {
            announce(&house, &raising.plan, address)?;
        }
        let ended_by = tokio::select! {
            () = serve(listener, router(house.clone())) => Failure::running("no connection is accepted any more"),
            failure = keeper.keep(&network, ring, guests) => failure,
            () = stopped() => {
                keeper.farewell().await;
                return Ok(());
            }
        };
        keeper.farewell().await;
        Err(ended_by)
    }
}

/// Says that requests can come.
fn announce(house: &House, plan: &Plan, address: SocketAddr) -> Result<(), Failure> {
    let chat = if house.template.is_ok() { "" } else { " (no chat: the model has no chat template)" };
    let ring_of = plan.devices.len();
    print(format_args!(
        "serving {} at http://{address}, {} at once over {ring_of} device{}{chat}\n",
        house.model,
        plan.sequences,
        if ring_of == 1 { "" } else { "s" }
    ))
}

/// Keeps a ring up for those who come.
struct Keeper<'a> {
    raising: &'a Raising,
    house: &'a House,
    /// Of the ring that is up.
    stopper: RefCell<Option<Stopper>>,
}

impl Keeper<'_> {
    /// For as long as guests can come.
    async fn keep<N: Network>(
        &self,
        network: &N,
        mut ring: Ring<N>,
        mut guests: mpsc::UnboundedReceiver<Guest>,
    ) -> Failure {
        loop {
            let (back, ended) = ring.serve(self.service(), guests).await;
            guests = back;
            ring.close().await;
            self.house.counters.ring(false);
            match ended {
                Ok(()) => return Failure::running("the ring ended although the server did not"),
                Err(error) => tell!("the ring failed: {error}"),
            }
            ring = self.again(network, &mut guests).await;
            self.is_up(&ring);
        }
    }

    /// From now on requests go to this ring.
    fn is_up<N: Network>(&self, ring: &Ring<N>) {
        self.stopper.replace(Some(ring.stopper()));
        self.house.counters.ring(true);
        self.house.goes_by(&self.raising.plan);
    }

    /// Another ring, as soon as its devices are there. Who comes meanwhile is told that there is none.
    async fn again<N: Network>(&self, network: &N, guests: &mut mpsc::UnboundedReceiver<Guest>) -> Ring<N> {
        loop {
            tokio::time::sleep(AGAIN_AFTER).await;
            while let Ok(guest) = guests.try_recv() {
                let _ = guest.said.send(Said::Failed("the ring is down".into()));
            }
            match self.raising.connect(network).await {
                Ok(ring) => {
                    tell!("the ring is up again");
                    return ring;
                }
                Err(error) => tell!("the ring is down: {error}"),
            }
        }
    }

    fn service(&self) -> Service {
        let House { vocabulary, tokenizer, counters, .. } = self.house;
        let counters = counters.clone();
        Service {
            micro_batch: self.raising.micro_batch,
            drafts: self.raising.drafts,
            stop: (0..*vocabulary).filter(|&token| tokenizer.is_end(token)).collect(),
            on_work: Some(Arc::new(move |name, lines| {
                counters.worked(name, &lines.records, &lines.readings);
            })),
        }
    }

    /// Ends what is under way, and lets those who wait be told.
    async fn farewell(&self) {
        if let Some(stopper) = self.stopper.borrow().as_ref() {
            stopper.stop();
        }
        let told = async {
            while self.house.counters.active() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL, told).await;
    }
}
