//! How does long work end early without losing what it has found?
//!
//! The first Ctrl-C while a search is under way asks it to stop; any other ends the program, as usual. What has more to
//! undo reacts itself ([`at_each_signal`]).
//!
//! Not here: what the lab undoes when it is interrupted.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

/// The exit code of a program that Ctrl-C has ended, by convention 128 and the signal's number.
pub const INTERRUPTED: i32 = 130;

static UNDER_WAY: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);
static LISTENING: Once = Once::new();

/// A search that Ctrl-C stops, until this is dropped.
pub struct Stoppable(());

impl Stoppable {
    /// From now on.
    pub fn begin() -> Stoppable {
        LISTENING.call_once(|| {
            std::thread::spawn(listen);
        });
        ASKED.store(false, Ordering::SeqCst);
        UNDER_WAY.store(true, Ordering::SeqCst);
        Stoppable(())
    }

    /// Whether the search under way has been asked to stop.
    pub fn asked() -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        UNDER_WAY.store(false, Ordering::SeqCst);
    }
}

/// Reacts, in a thread of its own, whenever a person or the system asks this program to end.
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
