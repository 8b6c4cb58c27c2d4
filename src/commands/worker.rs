//! `hearth worker`: computes layers for the head device of a ring.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_ring::discovery::host_name;
use hearth_ring::{
    Announcement, Key, Listener, MdnsScope, ModelSource, RingError, Transport, Worker, WorkerOptions, bind,
};
use serde::Serialize;
use tokio::time::Instant;

use crate::cli::{AnnouncePolicy, WorkerArgs};
use crate::diagnostics::{ExitCode, Failure};
use crate::gpu;
use crate::interruption::termination_signal;
use crate::machine::{check_text_support, open_model, verification};
use crate::output::say;
use crate::ring::{TransportTask, exit_on_stdin_eof, run_over_transport};

pub fn run(args: &WorkerArgs, json: bool) -> Result<ExitCode, Failure> {
    let key = Key::from_file_or_env(args.device.key.as_deref())?;
    let source = match (&args.fetch_folder, &args.model) {
        (Some(folder), _) => ModelSource::Fetch(folder.clone()),
        (None, Some(model)) => {
            let path = model;
            let model = open_model(path, args.device.gpu_weights)?;
            check_text_support(&model.weights, path)?;
            ModelSource::File(Arc::new(model.with_verification(verification(&args.device))))
        }
        (None, None) => return Err(Failure::invalid("the worker needs `--model` or `--fetch`")),
    };
    if args.device.exit_on_stdin_eof {
        exit_on_stdin_eof();
    }
    run_over_transport(key, &args.device, WorkerTask { args, source, json })?.map(|()| ExitCode::SUCCESS)
}

struct WorkerTask<'a> {
    args: &'a WorkerArgs,
    source: ModelSource,
    json: bool,
}

/// The line that `hearth worker --json` prints as soon as the worker accepts connections.
#[derive(Serialize)]
struct Ready<'a> {
    listening: &'a str,
    /// The name of the model, if the worker has a model file.
    model: Option<&'a str>,
    /// The folder for the layers that the worker fetches, if it has no model file.
    fetch: Option<&'a Path>,
    /// The name under which multicast DNS announces the worker, if it is announced.
    announced: Option<&'a str>,
}

impl TransportTask for WorkerTask<'_> {
    type Output = Result<(), Failure>;

    async fn run<T: Transport>(self, transport: T) -> Self::Output {
        let WorkerTask { args, source, json } = self;
        let listener = bind(&transport, &args.listen).await?;
        let address = listener.address();
        let announcement = announce(args, &address, transport.is_private())?;
        let (model, fetch) = match &source {
            ModelSource::File(model) => (Some(model.profile.name.as_str()), None),
            ModelSource::Fetch(folder) => (None, Some(folder.as_path())),
        };
        let name = announcement.as_ref().map(|(name, _)| name.as_str());
        // Before the worker is said to be ready.
        let termination = termination_signal();
        if json {
            let ready = Ready { listening: &address, model, fetch, announced: name };
            say!("{}\n", serde_json::to_string(&ready).map_err(Failure::failed)?);
        } else {
            let fetched_into = fetch.map(|folder| format!("layers fetched into {}", folder.display()));
            let with = fetched_into.as_deref().or(model).unwrap_or_default();
            let announced_as = name.map_or(String::new(), |name| format!(", announced as {name}"));
            say!("listening on {address} with {with}{announced_as}\n");
        }
        let options = WorkerOptions {
            threads: args.device.threads.unwrap_or(0),
            backend_factory: gpu::backend_factory(args.device.gpu_weights),
            verification: verification(&args.device),
            ..WorkerOptions::default()
        };
        let worker = Worker::with_options(transport, source, options);
        let log = Arc::new(ConnectionLog::default());
        let report = move |ended: Result<(), RingError>| {
            if let Err(error) = ended {
                log.record(&error);
            }
        };
        let ended = tokio::select! {
            never = worker.serve(listener, report) => match never {},
            _ = termination => Ok(()),
        };
        // Announces that the worker is no longer available.
        drop(announcement);
        ended
    }
}

/// Logs failed connections, at most [`Self::MAX_LINES`] per minute, because anybody can make connections that fail.
struct ConnectionLog {
    /// The start of the current minute, and the number of failed connections since then.
    minute: Mutex<(Instant, u32)>,
}

impl Default for ConnectionLog {
    fn default() -> Self {
        Self { minute: Mutex::new((Instant::now(), 0)) }
    }
}

impl ConnectionLog {
    /// source: assumed; a household's devices connect less often
    const MAX_LINES: u32 = 20;

    fn record(&self, error: &RingError) {
        if !may_be_stranger(error) {
            tracing::info!("a connection ended: {error}");
            return;
        }
        let mut minute = self.minute.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, count) = &mut *minute;
        if start.elapsed() >= Duration::from_mins(1) {
            let omitted = count.saturating_sub(Self::MAX_LINES);
            if omitted > 0 {
                tracing::info!("{omitted} more connections failed");
            }
            (*start, *count) = (Instant::now(), 0);
        }
        *count = count.saturating_add(1);
        match error {
            _ if *count > Self::MAX_LINES => {}
            RingError::Disconnected { name, reason } => tracing::info!("{name} left: {reason}"),
            error => tracing::info!("a connection ended: {error}"),
        }
    }
}

/// Whether a peer that is not part of a ring can cause this error.
fn may_be_stranger(error: &RingError) -> bool {
    matches!(
        error,
        RingError::KeyMismatch { .. }
            | RingError::Disconnected { .. }
            | RingError::Refused { .. }
            | RingError::Deadline { .. }
            | RingError::Protocol { .. }
            | RingError::Wire(_)
            | RingError::CannotListen { .. }
    )
}

/// Announces this worker until the returned announcement is dropped; `None` if the worker is not announced.
fn announce(
    args: &WorkerArgs,
    listening: &str,
    is_encrypted: bool,
) -> Result<Option<(String, Announcement)>, Failure> {
    // Only TCP addresses can be announced.
    let Ok(address) = listening.parse::<SocketAddr>() else { return Ok(None) };
    let loopback = address.ip().is_loopback();
    let is_wanted = match args.announce {
        AnnouncePolicy::Auto => is_encrypted && !loopback,
        AnnouncePolicy::Always => true,
        AnnouncePolicy::Never => false,
    };
    if !is_wanted {
        return Ok(None);
    }
    let Some(name) = args.name.clone().or_else(host_name) else {
        if args.announce == AnnouncePolicy::Auto {
            tracing::info!(
                "the worker is not announced: this machine has no host name; set a name with `--name`"
            );
            return Ok(None);
        }
        let what = "the worker cannot be announced, because this machine has no host name";
        return Err(Failure::invalid(what).with_hint("set a name with `--name`"));
    };
    match Announcement::start(&name, address, MdnsScope { loopback_only: loopback, ..MdnsScope::default() }) {
        Ok(announcement) => Ok(Some((name, announcement))),
        // This is an error only if the announcement was requested: heads that know the address do not need it.
        Err(error) if args.announce == AnnouncePolicy::Always || args.name.is_some() => {
            Err(Failure::invalid(&error).with_hint(error.hint()))
        }
        Err(error) => {
            tracing::info!("the worker is not announced: {error}");
            Ok(None)
        }
    }
}
