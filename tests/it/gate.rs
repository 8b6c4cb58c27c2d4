//! A proxy with which a test breaks the link between two processes.
//!
//! With a gate in front of an address, which carries bytes until it is told to drop or to break them, or until it has
//! carried so many.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A link that can be broken.
pub struct Gate {
    /// Where the other side is reached through it.
    pub address: String,
    state: Arc<State>,
}

struct State {
    dropped: AtomicBool,
    /// Bytes that came from the address behind the gate, and after how many everything breaks.
    carried: AtomicU64,
    limit: u64,
    open: Mutex<Vec<TcpStream>>,
}

impl Gate {
    /// Before an address.
    pub fn before(address: &str) -> Gate {
        Self::breaking_after(address, u64::MAX)
    }

    /// Before an address; when so many bytes have come from there, all connections break.
    pub fn breaking_after(address: &str, limit: u64) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let own = listener.local_addr().expect("bound").to_string();
        let state = State {
            dropped: AtomicBool::new(false),
            carried: AtomicU64::new(0),
            limit,
            open: Mutex::default(),
        };
        let state = Arc::new(state);
        let (target, shared) = (address.to_owned(), state.clone());
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                // What is dropped is neither answered nor refused.
                let drops = || shared.dropped.load(Ordering::SeqCst);
                let far = if drops() { None } else { TcpStream::connect(&target).ok() };
                let mut streams = shared.open.lock().expect("no panic");
                streams.push(near.try_clone().expect("a socket"));
                let Some(far) = far else {
                    if !drops() {
                        let _ = near.shutdown(Shutdown::Both);
                    }
                    continue;
                };
                streams.push(far.try_clone().expect("a socket"));
                let (near_too, far_too) =
                    (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"));
                for (from, to, counts) in [(near, far_too, false), (far, near_too, true)] {
                    let shared = shared.clone();
                    let _ = from.set_nodelay(true);
                    std::thread::spawn(move || shared.carry(from, to, counts));
                }
            }
        });
        Gate { address: own, state }
    }

    /// From now on nothing passes.
    pub fn drop_all(&self) {
        self.state.dropped.store(true, Ordering::SeqCst);
    }

    /// Breaks the connections that are open.
    pub fn break_off(&self) {
        self.state.break_off();
    }

    /// Bytes that have come from the address behind it.
    pub fn carried(&self) -> u64 {
        self.state.carried.load(Ordering::SeqCst)
    }
}

impl State {
    fn carry(&self, mut from: TcpStream, mut to: TcpStream, counts: bool) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if counts && self.carried.fetch_add(count as u64, Ordering::SeqCst) >= self.limit {
                self.break_off();
            }
            if !self.dropped.load(Ordering::SeqCst) && to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    fn break_off(&self) {
        for stream in self.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
