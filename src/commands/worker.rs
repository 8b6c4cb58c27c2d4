//! `hearth worker`: serve layers to a head.

use std::process::ExitCode;
use std::sync::Arc;

use hearth_exec::ring::{Delayed, Key, Listener, Network, Sealed, Source, Tcp, Worker, WorkerOptions, bind};

use crate::cli::WorkerArgs;
use crate::diagnostics::Failure;
use crate::documents::open_model;
use crate::output::{say, tell};

/// Runs the verb, until it is stopped.
pub fn run(args: &WorkerArgs) -> Result<ExitCode, Failure> {
    let key = Key::given(args.key.as_deref())?;
    let source = match (&args.fetch, &args.model) {
        (Some(folder), _) => Source::Fetch(folder.clone()),
        (None, Some(model)) => Source::File(Arc::new(open_model(model)?)),
        (None, None) => return Err(Failure::unusable("neither --model nor --fetch is given")),
    };
    if args.exit_with_stdin {
        end_with_stdin();
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let ended = runtime.block_on(async {
        match key {
            Some(key) => delayed(Sealed::new(Tcp, key), args, source).await,
            None => delayed(Tcp, args, source).await,
        }
    });
    // A node may be in the middle of a step; the process does not wait for it.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

async fn delayed(network: impl Network, args: &WorkerArgs, source: Source) -> Result<(), Failure> {
    match args.link_delay {
        Some(delay) => serve(Delayed::new(network, delay), args, source).await,
        None => serve(network, args, source).await,
    }
}

async fn serve(network: impl Network, args: &WorkerArgs, source: Source) -> Result<(), Failure> {
    let listener = bind(&network, &args.listen).await?;
    let with = match &source {
        Source::File(model) => model.profile.name.clone(),
        Source::Fetch(folder) => format!("what it fetches into {}", folder.display()),
    };
    say!("listening at {} with {with}\n", listener.address());
    let options = WorkerOptions { threads: args.threads.unwrap_or(0), ..WorkerOptions::default() };
    let worker = Worker::with(network, source, options);
    let report = |ended: Result<(), _>| {
        if let Err(error) = ended {
            tell!("a connection ended: {error}");
        }
    };
    tokio::select! {
        error = worker.serve(listener, report) => Err(error.into()),
        interrupted = tokio::signal::ctrl_c() => interrupted.map_err(Failure::running),
    }
}

/// Ends the process when standard input does: whoever started it is gone then, however it went.
pub fn end_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}
