//! How many malformed connections does a worker with a key survive, and how long do they take?
//!
//!     cargo run --release -p hearth-ring --example strangers [COUNT]
//!
//! Each connection brings bytes of `tests/strangers/attack.rs`; afterwards the worker must still answer somebody who
//! has the key.

#[path = "../tests/it/strangers/attack.rs"]
mod attack;

use std::sync::Arc;

use attack::Stranger;
use hearth_ring::probe::{ProbeEffort, link};
use hearth_ring::{Key, LocalModel, Memory, Sealed, Worker, bind};
use hearth_runtime::clock::wall_nanos;

const WORKER: &str = "localhost:1";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count: u64 = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/models/psalm-7m-q4_k.gguf");
        let (network, model) = (Memory::default(), Arc::new(LocalModel::open(file.as_ref())?));
        let key = Key::parse("a phrase for an example")?;
        let sealed = Sealed::new(network.clone(), key.clone());
        let listener = bind(&sealed, WORKER).await?;
        let worker = Worker::new(sealed.clone(), model, 1);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
        let mut stranger = Stranger::listening(&network, key, 1).await;
        let (begun, mut answered) = (wall_nanos(), 0u64);
        for _ in 0..count {
            answered += u64::from(stranger.knock(&network, WORKER).await > 0);
        }
        let seconds = (wall_nanos() - begun) as f64 * 1e-9;
        link(&sealed, WORKER, ProbeEffort { short: 3, long: 1, ..ProbeEffort::quick() }).await?;
        println!(
            "{count} malformed connections in {seconds:.1} s, {answered} of them got a handshake's second flight or a \
             refusal and nothing else; the worker still answers who has the key"
        );
        Ok(())
    })
}
