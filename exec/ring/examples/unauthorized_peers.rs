//! Opens malformed connections to a worker with a key, and measures how long the worker takes to reject them.
//!
//!     cargo run --release -p hearth-ring --example unauthorized_peers [COUNT]
//!
//! The bytes of each connection come from `tests/it/unauthorized_peers/attack.rs`. Afterwards the worker must still
//! serve a peer with the key.

#[path = "../tests/it/unauthorized_peers/attack.rs"]
mod attack;

use std::sync::Arc;

use attack::Attacker;
use hearth_ring::probe::{ProbeOptions, measure_link};
use hearth_ring::{EncryptedTransport, Key, LocalModel, MemoryTransport, Worker, bind};
use hearth_runtime::clock::monotonic_nanos;

const WORKER: &str = "localhost:1";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count: u64 = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/models/psalm-7m-q4_k.gguf");
        let (transport, model) = (MemoryTransport::default(), Arc::new(LocalModel::open(file.as_ref())?));
        let key = Key::parse("a phrase for an example")?;
        let encrypted = EncryptedTransport::new(transport.clone(), key.clone());
        let listener = bind(&encrypted, WORKER).await?;
        let worker = Worker::new(encrypted.clone(), model, 1);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
        let mut attacker = Attacker::with_recorded_handshake(&transport, key, 1).await;
        let (begun, mut answered) = (monotonic_nanos(), 0u64);
        for _ in 0..count {
            answered += u64::from(attacker.connect(&transport, WORKER).await > 0);
        }
        let seconds = (monotonic_nanos() - begun) as f64 * 1e-9;
        let options = ProbeOptions { latency_probes: 3, max_bandwidth_probes: 1, ..ProbeOptions::quick() };
        measure_link(&encrypted, WORKER, options).await?;
        println!(
            "{count} malformed connections in {seconds:.1} s; {answered} of them received a handshake message or a \
             refusal, and nothing else; the worker still serves peers with the key"
        );
        Ok(())
    })
}
