//! `hearth serve`: offer a ring to programs and people.
//!
//! The ring is kept up for as long as the server runs: when it fails altogether, those who wait are told, and another is
//! brought up as soon as its devices are there.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hearth_exec::ring::{Guest, Key, Network, Service};
use hearth_exec::{ChatTemplate, Tokenizer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::cli::ServeArgs;
use crate::diagnostics::Failure;
use crate::documents::{open_model, read_plan};
use crate::output::{print, tell};
use crate::ring::{OverNetwork, Raising, over, stopped};
use crate::serve::{Counters, House, is_token, now, router};

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
pub fn run(args: &ServeArgs) -> Result<ExitCode, Failure> {
    let key = Key::given(args.ring.key.as_deref())?;
    let token = token(args.token.as_deref())?;
    if token.is_none() && !args.listen.ip().is_loopback() {
        let what = format!("{} is reached from other machines, and there is no token", args.listen);
        return Err(Failure::unusable(what)
            .hint("give --token FILE, made with `openssl rand -hex 32 > token`, or listen on 127.0.0.1"));
    }
    let plan = read_plan(&args.plan)?;
    let model = Arc::new(open_model(&args.model)?);
    if args.ring.exit_with_stdin {
        super::worker::end_with_stdin();
    }
    let sequences = args.sequences.unwrap_or(plan.sequences);
    let metadata = &model.weights.model().metadata;
    let tokenizer = Arc::new(Tokenizer::new(metadata)?);
    let template = ChatTemplate::new(metadata, &tokenizer).map_err(|error| error.to_string());
    let name = args.name.clone().unwrap_or_else(|| model.profile.name.clone());
    let vocabulary = model.weights.shape().vocabulary;
    let raising = Raising::new(&args.ring, (plan, sequences), (model, &args.model))?;
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
        plan: raising.plan.clone(),
        since: now(),
        asked: AtomicU64::new(0),
    });
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let serving = Serving { args, raising, house, guests };
    let ended = runtime.block_on(over(key, args.ring.slower(), serving));
    // The head's node may still be in a step; the process does not wait for it.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

/// What who asks must know, if anything.
fn token(path: Option<&Path>) -> Result<Option<String>, Failure> {
    let (text, place) = match path {
        Some(path) => {
            let length = std::fs::metadata(path).map_err(|error| Failure::file(path, "open", &error))?.len();
            if length > LONGEST_TOKEN {
                let what = format!("a token of {length} bytes; it has at most {LONGEST_TOKEN}");
                return Err(Failure::unusable(what).at(path.display()).hint("is this the file you meant?"));
            }
            let text = std::fs::read_to_string(path).map_err(|error| Failure::file(path, "read", &error))?;
            (text, path.display().to_string())
        }
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
}

impl OverNetwork for Serving<'_> {
    type Output = Result<(), Failure>;

    async fn over<N: Network>(self, network: N) -> Self::Output {
        let Serving { args, raising, house, guests } = self;
        let listener = TcpListener::bind(args.listen).await.map_err(|error| {
            Failure::running(format!("cannot listen at {}: {error}", args.listen))
                .hint("choose another port with --listen, or stop the program that uses it")
        })?;
        let address = listener.local_addr().map_err(Failure::running)?;
        let ring = tokio::select! {
            ring = raising.connect(&network) => ring?,
            () = stopped() => return Ok(()),
        };
        house.counters.ring(true);
        let chat = if house.template.is_ok() { "" } else { " (no chat: the model has no chat template)" };
        let ring_of = raising.plan.devices.len();
        print(format_args!(
            "serving {} at http://{address}, {} at once over {ring_of} device{}{chat}\n",
            house.model,
            raising.plan.sequences,
            if ring_of == 1 { "" } else { "s" }
        ))?;
        let service = || Service {
            micro_batch: raising.micro_batch,
            drafts: raising.drafts,
            stop: (0..house.vocabulary).filter(|&token| house.tokenizer.is_end(token)).collect(),
            on_work: Some(on_work(house.counters.clone())),
        };
        let http = async { axum::serve(listener, router(house.clone())).await };
        let mut ring = Some(ring);
        let stopper = std::cell::RefCell::new(ring.as_ref().map(hearth_exec::ring::Ring::stopper));
        let keep = async {
            let mut guests = guests;
            loop {
                let Some(mut up) = ring.take() else {
                    // Whoever has come meanwhile has been told by the handler, or is told now.
                    while guests.try_recv().is_ok() {}
                    tokio::time::sleep(AGAIN_AFTER).await;
                    match raising.connect(&network).await {
                        Ok(up) => {
                            stopper.replace(Some(up.stopper()));
                            house.counters.ring(true);
                            tell!("the ring is up again");
                            ring = Some(up);
                        }
                        Err(error) => tell!("the ring is down: {error}"),
                    }
                    continue;
                };
                let (back, ended) = up.serve(service(), guests).await;
                guests = back;
                up.close().await;
                house.counters.ring(false);
                match ended {
                    Ok(()) => return Err(Failure::running("the ring ended although the server did not")),
                    Err(error) => tell!("the ring failed: {error}"),
                }
            }
        };
        let ended_by = tokio::select! {
            ended = http => ended.map_err(Failure::running),
            ended = keep => ended,
            () = stopped() => Ok(()),
        };
        if let Some(stopper) = stopper.borrow().as_ref() {
            stopper.stop();
        }
        let told = async {
            while house.counters.seen().active > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL, told).await;
        ended_by
    }
}

/// Counts what devices do.
fn on_work(counters: Arc<Counters>) -> hearth_exec::ring::OnWork {
    Arc::new(move |name, lines| counters.worked(name, &lines.records, &lines.readings))
}
