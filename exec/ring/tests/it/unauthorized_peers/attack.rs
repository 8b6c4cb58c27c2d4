//! What a peer without the key may send.
//!
//! Bytes made from a seed: noise, noise behind the prefix of an encrypted connection, the first flight of an honest
//! connection that was recorded (whole, damaged, cut, followed by noise), lengths far beyond every limit, and frames
//! that an unencrypted device would understand.

use hearth_ring::wire::{ENCRYPTED_PREFIX, Frame, MAGIC, Message, PROTOCOL, Purpose};
use hearth_ring::{EncryptedTransport, Key, Listener, MemoryTransport, Transport};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bytes of a handshake's first flight.
const FLIGHT: usize = 56;

/// A peer without the key.
pub struct Attacker {
    random: ChaCha8Rng,
    recorded: Vec<u8>,
}

impl Attacker {
    /// A peer that has recorded an honest device's first flight on this network.
    pub async fn listening(transport: &MemoryTransport, key: Key, seed: u64) -> Attacker {
        let mut listener = transport.bind("wire-tap").await.expect("a free name");
        let honest = EncryptedTransport::new(transport.clone(), key);
        let calling = tokio::spawn(async move {
            let mut stream = honest.connect("wire-tap").await.expect("somebody listens");
            let _ = Frame::from(Message::Goodbye).write(&mut stream).await;
        });
        let mut stream = listener.accept().await.expect("the honest device");
        let mut recorded = vec![0; FLIGHT];
        stream.read_exact(&mut recorded).await.expect("its first flight");
        drop(stream);
        let _ = calling.await;
        Attacker { random: ChaCha8Rng::seed_from_u64(seed), recorded }
    }

    /// What it sends next.
    pub fn bytes(&mut self) -> Vec<u8> {
        let count = self.random.random_range(0..200);
        let mut noise = vec![0; count];
        self.random.fill(&mut noise[..]);
        let mut flight = self.recorded.clone();
        match self.random.random_range(0..7) {
            0 => noise,
            1 => [&ENCRYPTED_PREFIX[..], &noise].concat(),
            2 => [flight, noise].concat(),
            3 => {
                let at = self.random.random_range(0..flight.len());
                flight[at] ^= 1 << self.random.random_range(0..8u32);
                flight
            }
            4 => {
                flight.truncate(self.random.random_range(0..=FLIGHT));
                flight
            }
            5 => [&[0xff; 8][..], &noise].concat(),
            _ => {
                let purpose = match self.random.random_range(0..3) {
                    0 => Purpose::Control,
                    1 => Purpose::Data { from: 1, epoch: self.random.random_range(0..4) },
                    _ => Purpose::Probe,
                };
                let session = self.random.random();
                let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL, session, purpose };
                [Frame::from(hello).encode().expect("a frame"), noise].concat()
            }
        }
    }

    /// Connects, sends, and listens until the other end hangs up. How many bytes it got.
    pub async fn connect(&mut self, transport: &MemoryTransport, address: &str) -> usize {
        let bytes = self.bytes();
        let mut stream = transport.connect(address).await.expect("the worker listens");
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        answer.len()
    }
}
