//! `hearth worker`: computes layers for a head.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use hearth_ring::discovery::host_name;
use hearth_ring::{
    Announcement, Key, Listener, Medium, Network, RingError, Source, Worker, WorkerOptions, bind,
};
use serde::Serialize;

use crate::cli::{Announce, WorkerArgs};
use crate::diagnostics::Failure;
use crate::gpu;
use crate::machine::open_model;
use crate::output::say;
use crate::ring::{LinkEmulation, TransportTask, end_with_stdin, stopped, with_transport};

/// Runs the verb, until it is stopped.
pub fn run(args: &WorkerArgs, json: bool) -> Result<ExitCode, Failure> {
    let key = Key::given(args.key.as_deref())?;
    let source = match (&args.fetch, &args.model) {
        (Some(folder), _) => Source::Fetch(folder.clone()),
        (None, Some(model)) => {
            Source::File(Arc::new(open_model(model)?.accelerated_by(gpu::accelerator(args.gpu_weights))))
        }
        (None, None) => return Err(Failure::unusable("neither --model nor --fetch is given")),
    };
    if args.exit_with_stdin {
        end_with_stdin();
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let ended = runtime.block_on(with_transport(
        key,
        LinkEmulation::of(args.link_delay, args.emulate_links.as_deref()),
        Serving { args, source, json },
    ));
    // A node may be in the middle of a step; the process does not wait for it.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

/// A worker at its door.
struct Serving<'a> {
    args: &'a WorkerArgs,
    source: Source,
    json: bool,
}

/// What `--json` gives once requests can come, on one line, because a worker goes on after it.
#[derive(Serialize)]
struct Ready<'a> {
    listening: &'a str,
    /// The model, if the worker has its file.
    model: Option<&'a str>,
    /// Where fetched layers go, if it has none.
    fetch: Option<&'a Path>,
    /// The name under which others hear of it.
    announced: Option<&'a str>,
}

impl TransportTask for Serving<'_> {
    type Output = Result<(), Failure>;

    async fn run<N: Network>(self, network: N) -> Self::Output {
        let Serving { args, source, json } = self;
        let listener = bind(&network, &args.listen).await?;
        let address = listener.address();
        let announcement = announced(args, &address, network.is_sealed())?;
        let (model, fetch) = match &source {
            Source::File(model) => (Some(model.profile.name.as_str()), None),
            Source::Fetch(folder) => (None, Some(folder.as_path())),
        };
        let name = announcement.as_ref().map(|(name, _)| name.as_str());
        if json {
            let said = Ready { listening: &address, model, fetch, announced: name };
            say!("{}\n", serde_json::to_string(&said).map_err(Failure::running)?);
        } else {
            let fetched = fetch.map(|folder| format!("what it fetches into {}", folder.display()));
            let with = fetched.as_deref().or(model).unwrap_or_default();
            let known = name.map_or(String::new(), |name| format!(", announced as {name}"));
            say!("listening at {address} with {with}{known}\n");
        }
        let options = WorkerOptions {
            threads: args.threads.unwrap_or(0),
            accelerator: gpu::accelerator(args.gpu_weights),
            ..WorkerOptions::default()
        };
        let worker = Worker::with(network, source, options);
        let report = |ended: Result<(), RingError>| match ended {
            Ok(()) => {}
            // Heads come and go, and whoever else tries the port.
            Err(RingError::Gone { name, why }) => tracing::info!("{name} left: {why}"),
            Err(error) => tracing::info!("a connection ended: {error}"),
        };
        let ended = tokio::select! {
            error = worker.serve(listener, report) => Err(error.into()),
            () = stopped() => Ok(()),
        };
        // Others are told that it is gone.
        drop(announcement);
        ended
    }
}

/// Says that this worker is here, if it may: under which name, until that is dropped.
fn announced(
    args: &WorkerArgs,
    listening: &str,
    sealed: bool,
) -> Result<Option<(String, Announcement)>, Failure> {
    // An address that is none was bound all the same: a network of another kind.
    let Ok(address) = listening.parse::<SocketAddr>() else { return Ok(None) };
    let loopback = address.ip().is_loopback();
    let wanted = match args.announce {
        Announce::Auto => sealed && !loopback,
        Announce::Always => true,
        Announce::Never => false,
    };
    if !wanted {
        return Ok(None);
    }
    let Some(name) = args.name.clone().or_else(host_name) else {
        if args.announce == Announce::Auto {
            tracing::info!("not announced: this system has no name; give the device one with --name");
            return Ok(None);
        }
        return Err(
            Failure::unusable("this system has no name to announce").hint("give the device one with --name")
        );
    };
    let begun = Announcement::begin(&name, address, Medium { loopback, ..Medium::default() });
    match begun {
        Ok(announcement) => Ok(Some((name, announcement))),
        // Asked for, it is an error; else the worker serves those who know where it is.
        Err(error) if args.announce == Announce::Always || args.name.is_some() => {
            Err(Failure::unusable(error))
        }
        Err(error) => {
            tracing::info!("not announced: {error}");
            Ok(None)
        }
    }
}
