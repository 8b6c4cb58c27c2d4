//! Handling of Ctrl-C: cancels work that can end early, otherwise exits the program.
//!
//! The first Ctrl-C during cancellable work cancels the work. Any other Ctrl-C exits the program. Commands that must
//! clean up install a separate handler ([`on_signal`]).

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use crate::diagnostics::ExitCode;

/// Exit code after Ctrl-C: by convention 128 plus the number of the signal, which is 2 for SIGINT.
pub const EXIT_INTERRUPTED: ExitCode = ExitCode(130);

static IS_CANCELLABLE: AtomicBool = AtomicBool::new(false);
static IS_CANCELLED: AtomicBool = AtomicBool::new(false);
static LISTENING: Once = Once::new();

/// A guard during whose lifetime Ctrl-C cancels the current work instead of exiting the program.
pub struct CancellationGuard(());

impl CancellationGuard {
    pub fn begin() -> CancellationGuard {
        LISTENING.call_once(|| spawn_listener(exit_or_cancel()));
        IS_CANCELLED.store(false, Ordering::SeqCst);
        IS_CANCELLABLE.store(true, Ordering::SeqCst);
        CancellationGuard(())
    }

    pub fn is_cancelled() -> bool {
        IS_CANCELLED.load(Ordering::SeqCst)
    }
}

impl Drop for CancellationGuard {
    fn drop(&mut self) {
        IS_CANCELLABLE.store(false, Ordering::SeqCst);
    }
}

/// Starts a thread that calls `handler` at every SIGINT and SIGTERM.
pub fn on_signal(mut handler: impl FnMut() + Send + 'static) {
    spawn_listener(async move {
        while next_signal().await.is_ok() {
            handler();
        }
    });
}

/// Waits for SIGINT or SIGTERM.
pub async fn termination_signal() {
    let _ = next_signal().await;
}

async fn next_signal() -> std::io::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

async fn exit_or_cancel() {
    while tokio::signal::ctrl_c().await.is_ok() {
        if !IS_CANCELLABLE.load(Ordering::SeqCst) || IS_CANCELLED.swap(true, Ordering::SeqCst) {
            EXIT_INTERRUPTED.exit();
        }
    }
}

/// Starts a thread that runs `listener`, a future that waits for signals.
fn spawn_listener(listener: impl Future<Output = ()> + Send + 'static) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(listener);
    });
}
