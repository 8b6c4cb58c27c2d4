//! Ctrl-C: cancels work that can end early, and ends the program otherwise.
//!
//! The first Ctrl-C during cancellable work asks it to stop; any other ends the program. Verbs that must clean up install
//! their own handler ([`at_each_signal`]).

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

/// The exit code after Ctrl-C, by convention 128 and the number of the signal.
pub const INTERRUPTED: i32 = 130;

static UNDER_WAY: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);
static LISTENING: Once = Once::new();

/// Makes Ctrl-C cancel the work under way, until this is dropped.
pub struct Stoppable(());

impl Stoppable {
    pub fn begin() -> Stoppable {
        LISTENING.call_once(|| {
            std::thread::spawn(listen);
        });
        ASKED.store(false, Ordering::SeqCst);
        UNDER_WAY.store(true, Ordering::SeqCst);
        Stoppable(())
    }

    /// Returns whether the work under way shall stop.
    pub fn asked() -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        UNDER_WAY.store(false, Ordering::SeqCst);
    }
}

/// Calls `react` in its own thread at every SIGINT and SIGTERM.
pub fn at_each_signal(mut react: impl FnMut() + Send + 'static) {
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
            let (Ok(mut interrupted), Ok(mut terminated)) = signals else { return };
            loop {
                tokio::select! {
                    _ = interrupted.recv() => {}
                    _ = terminated.recv() => {}
                }
                react();
            }
        });
    });
}

fn listen() {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    runtime.block_on(async {
        while tokio::signal::ctrl_c().await.is_ok() {
            if !UNDER_WAY.load(Ordering::SeqCst) || ASKED.swap(true, Ordering::SeqCst) {
                std::process::exit(INTERRUPTED);
            }
        }
    });
}
