//! A TCP proxy that can break the connections between two processes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub struct Proxy {
    pub address: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    drops: AtomicBool,
    /// Number of bytes that the proxy has received from the target so far.
    received: AtomicU64,
    /// Number of bytes received from the target after which the proxy closes all connections.
    limit: u64,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn new(target: &str) -> Proxy {
        Self::with_byte_limit(target, u64::MAX)
    }

    /// Creates a proxy that closes all connections after it has received `limit` bytes from the target.
    pub fn with_byte_limit(target: &str, limit: u64) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let state = Arc::new(State { limit, ..State::default() });
        let (target, shared) = (target.to_owned(), state.clone());
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                shared.connect(&target, near);
            }
        });
        Proxy { address, state }
    }

    /// Drops all bytes from now on, without closing a connection.
    pub fn drop_all_bytes(&self) {
        self.state.drops.store(true, Ordering::SeqCst);
    }

    pub fn disconnect(&self) {
        self.state.disconnect();
    }

    pub fn received_bytes(&self) -> u64 {
        self.state.received.load(Ordering::SeqCst)
    }
}

impl State {
    fn connect(self: &Arc<Self>, target: &str, near: TcpStream) {
        // If bytes are dropped, new connections are neither refused nor forwarded.
        let drops = self.drops.load(Ordering::SeqCst);
        let far = if drops { None } else { TcpStream::connect(target).ok() };
        let clone = |stream: &TcpStream| stream.try_clone().expect("a socket");
        let mut open = self.open.lock().expect("no panic");
        open.push(clone(&near));
        let Some(far) = far else {
            if !drops {
                let _ = near.shutdown(Shutdown::Both);
            }
            return;
        };
        open.push(clone(&far));
        for (from, to, counts) in [(clone(&near), clone(&far), false), (far, near, true)] {
            let shared = self.clone();
            let _ = from.set_nodelay(true);
            std::thread::spawn(move || shared.forward(from, to, counts));
        }
    }

    fn forward(&self, mut from: TcpStream, mut to: TcpStream, counts: bool) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if counts && self.received.fetch_add(count as u64, Ordering::SeqCst) >= self.limit {
                self.disconnect();
            }
            if !self.drops.load(Ordering::SeqCst) && to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }

    fn disconnect(&self) {
        for stream in self.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
