//! `hearth worker`: serve layers to a head.

use std::process::ExitCode;
use std::sync::Arc;

use hearth_exec::ring::{Key, Listener, LocalModel, Network, Sealed, Tcp, Worker, bind};

use crate::cli::WorkerArgs;
use crate::diagnostics::Failure;
use crate::documents::open_model;
use crate::output::{say, tell};

/// Runs the verb, until it is stopped.
pub fn run(args: &WorkerArgs) -> Result<ExitCode, Failure> {
    let key = Key::given(args.key.as_deref())?;
    let model = Arc::new(open_model(&args.model)?);
    if args.exit_with_stdin {
        end_with_stdin();
    }
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::running)?;
    let ended = runtime.block_on(async {
        match key {
            Some(key) => serve(Sealed::new(Tcp, key), args, model).await,
            None => serve(Tcp, args, model).await,
        }
    });
    // A node may be in the middle of a step; the process does not wait for it.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

async fn serve(network: impl Network, args: &WorkerArgs, model: Arc<LocalModel>) -> Result<(), Failure> {
    let listener = bind(&network, &args.listen).await?;
    say!("listening at {} with {}\n", listener.address(), model.profile.name);
    let worker = Worker::new(network, model, args.threads.unwrap_or(0));
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
