//! Handling of Ctrl-C and of signals that end the program: cancels work that can end early, otherwise exits.
//!
//! The first Ctrl-C during cancellable work cancels the work. Any other Ctrl-C exits the program. Commands that must
//! clean up install a separate handler ([`on_signal`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Once, mpsc};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::diagnostics::ExitCode;

/// Exit code after Ctrl-C: by convention 128 plus the number of the signal, which is 2 for SIGINT.
pub const EXIT_INTERRUPTED: ExitCode = ExitCode(130);

static IS_CANCELLABLE: AtomicBool = AtomicBool::new(false);
static IS_CANCELLED: AtomicBool = AtomicBool::new(false);
static LISTENING: Once = Once::new();
/// Whether another handler has decided what a signal does. A download before it may have started [`exit_or_cancel`],
/// which must then not exit before the program has cleaned up.
static HAS_OTHER_HANDLER: AtomicBool = AtomicBool::new(false);

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

/// Starts a thread that calls `handler` at every SIGINT, SIGTERM and SIGHUP from now on.
pub fn on_signal(mut handler: impl FnMut() + Send + 'static) {
    let (listening_tx, listening_rx) = mpsc::channel();
    spawn_listener(async move {
        let Ok(mut signals) = Signals::listen() else { return };
        let _ = listening_tx.send(());
        loop {
            signals.next().await;
            handler();
        }
    });
    // If the thread cannot listen, a signal exits the program.
    let _ = listening_rx.recv();
}

/// Listens from now on to SIGINT, SIGTERM and SIGHUP. The future ends at the first of them, and returns whether it was
/// SIGINT (Ctrl-C).
pub fn termination_signal() -> impl Future<Output = bool> {
    let signals = Signals::listen();
    async move {
        match signals {
            Ok(mut signals) => signals.next().await,
            Err(_) => false,
        }
    }
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if the program was started, for example by `nohup`, so that it ignores SIGHUP.
    hangup: Option<Signal>,
}

impl Signals {
    fn listen() -> std::io::Result<Signals> {
        let signals = Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: (!*IGNORES_HANGUP).then(|| signal(SignalKind::hangup())).transpose()?,
        };
        HAS_OTHER_HANDLER.store(true, Ordering::SeqCst);
        Ok(signals)
    }

    /// Waits for the next signal. Returns whether it was SIGINT.
    async fn next(&mut self) -> bool {
        let hung_up = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.terminate.recv() => false,
            _ = hung_up => false,
        }
    }
}

/// Whether the program ignored SIGHUP before this module listened to it.
static IGNORES_HANGUP: LazyLock<bool> = LazyLock::new(|| {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call only writes the current one to `action`, which is valid for that.
    if unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call succeeded, so it wrote the action.
    unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
});

async fn exit_or_cancel() {
    while tokio::signal::ctrl_c().await.is_ok() {
        let cancels = IS_CANCELLABLE.load(Ordering::SeqCst) && !IS_CANCELLED.swap(true, Ordering::SeqCst);
        if !cancels && !HAS_OTHER_HANDLER.load(Ordering::SeqCst) {
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
