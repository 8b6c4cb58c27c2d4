//! An attacker without the key, which opens connections and sends pseudorandom malformed bytes.
//!
//! The attacker sends random bytes, the prefix of an encrypted connection with random bytes, the recorded first
//! handshake message of an honest device (whole, damaged, truncated, extended), lengths above the limits, and valid
//! unencrypted frames.

use hearth_ring::wire::{ConnectionPurpose, ENCRYPTED_PREFIX, Frame, MAGIC, Message, PROTOCOL_VERSION};
use hearth_ring::{EncryptedTransport, Key, Listener, MemoryTransport, Transport};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Length of the first handshake message, in bytes.
const HANDSHAKE_MESSAGE_LEN: usize = 56;

pub struct Attacker {
    random: ChaCha8Rng,
    recorded: Vec<u8>,
}

impl Attacker {
    /// Creates an attacker that has recorded the first handshake message of an honest device with `key`.
    pub async fn with_recorded_handshake(transport: &MemoryTransport, key: Key, seed: u64) -> Attacker {
        let mut listener = transport.bind("wire-tap").await.expect("a free name");
        let honest = EncryptedTransport::new(transport.clone(), key);
        let connecting = tokio::spawn(async move {
            let mut stream = honest.connect("wire-tap").await.expect("somebody listens");
            let _ = Frame::from(Message::Goodbye).write(&mut stream).await;
        });
        let mut stream = listener.accept().await.expect("the honest device");
        let mut recorded = vec![0; HANDSHAKE_MESSAGE_LEN];
        stream.read_exact(&mut recorded).await.expect("its first message");
        drop(stream);
        let _ = connecting.await;
        Attacker { random: ChaCha8Rng::seed_from_u64(seed), recorded }
    }

    /// Returns the bytes to send on the next malformed connection.
    pub fn next_bytes(&mut self) -> Vec<u8> {
        let count = self.random.random_range(0..200);
        let mut noise = vec![0; count];
        self.random.fill(&mut noise[..]);
        let mut message = self.recorded.clone();
        match self.random.random_range(0..7) {
            0 => noise,
            1 => [&ENCRYPTED_PREFIX[..], &noise].concat(),
            2 => [message, noise].concat(),
            3 => {
                let at = self.random.random_range(0..message.len());
                message[at] ^= 1 << self.random.random_range(0..8u32);
                message
            }
            4 => message[..self.random.random_range(0..=HANDSHAKE_MESSAGE_LEN)].to_vec(),
            5 => [&[0xff; 8][..], &noise].concat(),
            _ => {
                let purpose = match self.random.random_range(0..3) {
                    0 => ConnectionPurpose::Control,
                    1 => ConnectionPurpose::Data { from: 1, epoch: self.random.random_range(0..4) },
                    _ => ConnectionPurpose::Probe,
                };
                let session = self.random.random();
                let hello = Message::Hello { magic: MAGIC, protocol: PROTOCOL_VERSION, session, purpose };
                [Frame::from(hello).encode().expect("a frame"), noise].concat()
            }
        }
    }

    /// Sends malformed bytes on a new connection. Returns the number of bytes received until the connection ends.
    pub async fn connect(&mut self, transport: &MemoryTransport, address: &str) -> usize {
        let bytes = self.next_bytes();
        let mut stream = transport.connect(address).await.expect("the worker listens");
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        answer.len()
    }
}
