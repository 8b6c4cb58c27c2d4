//! `hearth serve`: serves a ring over HTTP.
//!
//! If the ring fails, all active requests fail. The server connects a new ring as soon as the devices are reachable
//! again.

use std::cell::RefCell;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use hearth_ring::{
    CancelHandle, DeviceReport, Key, RecoveryPolicy, Request, ResponseEvent, Ring, ServeOptions, Transport,
    read_secret_file,
};
use hearth_runtime::{ChatTemplate, Pooling, Tokenizer};
use hearth_schema::Plan;
use hearth_schema::run_events::{RunEvent, RunEventKind};
use hearth_serve::{
    AppState, ChatFormat, Metrics, TlsAcceptor, is_valid_bearer_token, router, serve, tls_acceptor, unix_time,
};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::cli::ServeArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::interruption::termination_signal;
use crate::machine::verification;
use crate::output::say;
use crate::ring::{RingBuilder, TransportTask, exit_on_stdin_eof, open_plan_and_model, run_over_transport};

const TOKEN_VARIABLE: &str = "HEARTH_TOKEN";
/// Minimum length of the API key, in bytes. source: assumed; 16 random characters cannot be guessed remotely
const MIN_TOKEN_LEN: usize = 16;
/// Time between two attempts to connect a new ring after a failure. source: assumed
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit for sending an error to the clients of active requests when the server stops. source: assumed
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

pub fn run(args: &ServeArgs, json: bool) -> Result<ExitCode, Failure> {
    let ring = &args.ring;
    let key = Key::from_file_or_env(ring.device.key.as_deref())?;
    let token = read_api_key(args.api_key_file.as_deref())?;
    if token.is_none() && !args.address().ip().is_loopback() {
        let what = format!("other machines can reach {}, but no API key is required", args.address());
        return Err(Failure::invalid(what)
            .with_hint("set `--token FILE` (make the file with `hearth key FILE`), or listen on 127.0.0.1"));
    }
    let tls = match (&args.tls_certificate, &args.tls_key) {
        (Some(certificate), Some(key)) => Some(tls_acceptor(certificate, key).map_err(|what| {
            Failure::invalid(what).with_hint("give a certificate and its private key, as files in PEM format")
        })?),
        _ => None,
    };
    let gpu_weights = ring.device.gpu_weights;
    let (plan, model, path) = open_plan_and_model(&args.source, args.sequences.unwrap_or(1), gpu_weights)?;
    let model = Arc::new(model.with_verification(verification(&ring.device)));
    if ring.device.exit_on_stdin_eof {
        exit_on_stdin_eof();
    }
    let sequences = args.sequences.unwrap_or(plan.sequences);
    let metadata = &model.weights.model().metadata;
    let tokenizer = Arc::new(Tokenizer::new(metadata)?);
    let chat_format = ChatTemplate::new(metadata, &tokenizer)
        .map(|template| ChatFormat::new(template, &tokenizer))
        .map_err(|error| error.to_string());
    let shape = model.weights.shape();
    let embedding_length = Pooling::for_model(metadata, shape.architecture, args.pooling)
        .map(|Pooling::Last| shape.embedding_length);
    let name = args.name.clone().unwrap_or_else(|| model.profile.name.clone());
    let vocab_size = shape.vocab_size;
    let mut builder = RingBuilder::new(ring, (plan, sequences), (model, &path))?;
    if args.keep_plan
        && let RecoveryPolicy::Replan { adapts, .. } = &mut builder.options.recovery
    {
        *adapts = false;
    }
    let (request_tx, request_rx) = mpsc::unbounded_channel();
    let state = Arc::new(AppState {
        request_tx,
        tokenizer,
        chat_format,
        embedding_length,
        grammars: OnceLock::new(),
        model_name: name.into(),
        context_length: builder.plan.context_length,
        vocab_size,
        metrics: Arc::<Metrics>::default(),
        bearer_token: token,
        cors_origins: args.cors_origins.clone(),
        plan: Mutex::new(builder.plan.clone()),
        start_unix_time: unix_time(),
        request_count: AtomicU64::new(0),
    });
    state.metrics.kv_capacity.set(builder.plan.total_cache_tokens().cast_signed());
    let shared = state.clone();
    builder.options.on_run_event = Some(Arc::new(move |event, plan| report_event(&shared, event, plan)));
    let task = ServeTask { args, builder, state, request_rx, tls, json };
    run_over_transport(key, &ring.device, task)?.map(|()| ExitCode::SUCCESS)
}

/// Logs an event of the ring, and updates the plan that the HTTP path `/ring` shows.
fn report_event(state: &AppState, run_event: &RunEvent, plan: Option<&Plan>) {
    let RunEvent { kind, device, details: what, .. } = run_event;
    match (kind, device) {
        (RunEventKind::Silent, Some(name)) => tracing::info!("{name} is lost: {what}"),
        (RunEventKind::Replanned, _) => tracing::info!("the ring continues with {what}"),
        (RunEventKind::NotReplanned, Some(name)) => {
            tracing::info!("there is no new plan without {name}: {what}");
        }
        _ => tracing::info!("the ring: {what}"),
    }
    if let Some(plan) = plan {
        state.metrics.record_plan_change();
        state.set_plan(plan);
    }
}

fn read_api_key(path: Option<&Path>) -> Result<Option<String>, Failure> {
    let (text, location) = match path {
        Some(path) => (read_secret_file(path)?, path.display().to_string()),
        None => match std::env::var(TOKEN_VARIABLE) {
            Ok(text) => (text, TOKEN_VARIABLE.to_owned()),
            Err(_) => return Ok(None),
        },
    };
    let text = text.trim().to_owned();
    if text.len() < MIN_TOKEN_LEN || !is_valid_bearer_token(&text) {
        let what = format!("the API key must be one word of at least {MIN_TOKEN_LEN} printable characters");
        return Err(Failure::invalid(what)
            .with_location(location)
            .with_hint("make an API key with `hearth key FILE`"));
    }
    Ok(Some(text))
}

type RequestReceiver = mpsc::UnboundedReceiver<Request>;

struct ServeTask<'a> {
    args: &'a ServeArgs,
    builder: RingBuilder,
    state: Arc<AppState>,
    request_rx: RequestReceiver,
    tls: Option<TlsAcceptor>,
    json: bool,
}

/// The line that `hearth serve --json` prints as soon as the server accepts requests.
#[derive(Serialize)]
struct Ready<'a> {
    listening: &'a str,
    /// `http` or `https`.
    scheme: &'a str,
    model: &'a str,
    sequences: u32,
    devices: usize,
    can_chat: bool,
}

impl Ready<'_> {
    fn text(&self) -> String {
        let Ready { listening, scheme, model, sequences, devices: count, can_chat } = self;
        let chat = if *can_chat { "" } else { " (no chat: the model has no chat template)" };
        let [of_requests, of_devices] =
            [*sequences as usize, *count].map(|count| if count == 1 { "" } else { "s" });
        format!(
            "serving {model} at {scheme}://{listening}, {sequences} request{of_requests} at a time on {count} \
             device{of_devices}{chat}"
        )
    }
}

impl TransportTask for ServeTask<'_> {
    type Output = Result<(), Failure>;

    async fn run<T: Transport>(self, transport: T) -> Self::Output {
        let ServeTask { args, builder, state, request_rx, tls, json } = self;
        let listener = TcpListener::bind(args.address()).await.map_err(|error| {
            Failure::failed(format!("cannot listen on {}: {error}", args.address()))
                .with_hint("choose a different port, or stop the program that uses this one")
        })?;
        let address = listener.local_addr().map_err(Failure::failed)?;
        let mut termination = pin!(termination_signal());
        let ring = tokio::select! {
            ring = builder.connect(&transport) => ring?,
            _ = &mut termination => return Ok(()),
        };
        let supervisor =
            RingSupervisor { builder: &builder, state: &state, cancel_handle: RefCell::default() };
        // Must be done before the address is printed, because then a client may send a request.
        supervisor.record_ring_up(&ring);
        let ready = Ready {
            listening: &address.to_string(),
            scheme: if tls.is_some() { "https" } else { "http" },
            model: &state.model_name,
            sequences: builder.plan.sequences,
            devices: builder.plan.devices.len(),
            can_chat: state.chat_format.is_ok(),
        };
        let line = if json { serde_json::to_string(&ready).map_err(Failure::failed)? } else { ready.text() };
        say!("{line}\n");
        let ended = tokio::select! {
            () = serve(listener, router(state.clone()), tls) => Err(Failure::failed("the HTTP server stopped")),
            failure = supervisor.run(&transport, ring, request_rx) => Err(failure),
            _ = termination => Ok(()),
        };
        supervisor.shut_down().await;
        ended
    }
}

/// Keeps a ring connected and passes requests to it.
struct RingSupervisor<'a> {
    builder: &'a RingBuilder,
    state: &'a AppState,
    cancel_handle: RefCell<Option<CancelHandle>>,
}

impl RingSupervisor<'_> {
    /// Serves requests, and replaces the ring after a failure. Returns only if the server cannot continue.
    async fn run<T: Transport>(
        &self,
        transport: &T,
        mut ring: Ring<T>,
        mut request_rx: RequestReceiver,
    ) -> Failure {
        loop {
            let (back, ended) = ring.serve(self.serve_options(), request_rx).await;
            request_rx = back;
            ring.close().await;
            self.state.metrics.set_ring_up(false);
            match ended {
                Ok(()) => return Failure::failed("the ring closed while the server was running"),
                Err(error) => tracing::info!("the ring failed: {error}"),
            }
            ring = self.reconnect(transport, &mut request_rx).await;
            self.record_ring_up(&ring);
        }
    }

    fn record_ring_up<T: Transport>(&self, ring: &Ring<T>) {
        self.cancel_handle.replace(Some(ring.cancel_handle()));
        self.state.metrics.set_ring_up(true);
        self.state.set_plan(&self.builder.plan);
    }

    /// Connects a new ring as soon as the devices are reachable. Until the new ring is connected, requests fail.
    async fn reconnect<T: Transport>(&self, transport: &T, request_rx: &mut RequestReceiver) -> Ring<T> {
        let mut logged = String::new();
        loop {
            tokio::time::sleep(RETRY_INTERVAL).await;
            while let Ok(request) = request_rx.try_recv() {
                let _ = request.response_tx.send(ResponseEvent::Failed("the ring is down".into()));
            }
            match self.builder.connect(transport).await {
                Ok(ring) => {
                    tracing::info!("the ring is up again");
                    return ring;
                }
                Err(error) => {
                    let reason = error.to_string();
                    if reason != logged {
                        tracing::info!("the ring is down: {reason}");
                        logged = reason;
                    }
                }
            }
        }
    }

    fn serve_options(&self) -> ServeOptions {
        let AppState { tokenizer, metrics, .. } = self.state;
        let metrics = metrics.clone();
        ServeOptions {
            micro_batch: self.builder.micro_batch,
            draft_tokens: self.builder.draft_tokens,
            stop_tokens: tokenizer.stop_tokens(),
            on_device_report: Some(Arc::new(move |report| {
                let DeviceReport { device, lines, slowdown } = report;
                metrics.record_device_activity(device, &lines.records, &lines.readings);
                if let Some(slowdown) = slowdown {
                    metrics.record_slowdown(device, *slowdown);
                }
            })),
        }
    }

    /// Cancels the active requests, and waits until their clients have received the error, at most [`SHUTDOWN_GRACE`].
    async fn shut_down(&self) {
        if let Some(cancel_handle) = self.cancel_handle.borrow().as_ref() {
            cancel_handle.cancel();
        }
        let drained = async {
            while self.state.metrics.active_requests() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, drained).await;
    }
}
