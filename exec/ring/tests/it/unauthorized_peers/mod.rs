//! A peer without the key cannot join, read, or stop a worker.

mod attack;

use std::sync::Arc;
use std::time::Duration;

use attack::Attacker;
use hearth_ring::{
    EncryptedTransport, GenerationRequest, LocalModel, MemoryTransport, Ring, RingError, Transport,
};
use hearth_runtime::sampler::greedy_token;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use crate::fixture::{Q4_MODEL, address, key, open_model, plan, ring_options, start_workers};

/// Number of connections without the key. The example `unauthorized_peers` can open a million connections.
const ATTACKS: usize = 3000;
/// Maximum length of a reply, in bytes: a handshake message or a refusal.
const MAX_REPLY_LEN: usize = 128;

async fn tokens(transport: &impl Transport, model: &Arc<LocalModel>) -> Result<Vec<u32>, RingError> {
    let mut ring = Ring::connect(transport, plan(model, &[4, 4]), model.clone(), ring_options()).await?;
    let request = GenerationRequest::single_sequence(vec![1, 2, 3], 4, Box::new(greedy_token));
    let generated = ring.generate(request, |_, _| {}).await.map_err(|failed| failed.error)?;
    ring.close().await;
    Ok(generated.first_sequence_tokens().to_vec())
}

/// Starts a worker with the key. Returns the unencrypted transport, the encrypted one, and the model.
async fn encrypted_worker() -> (MemoryTransport, EncryptedTransport<MemoryTransport>, Arc<LocalModel>) {
    let (transport, model) = (MemoryTransport::default(), open_model(Q4_MODEL));
    let encrypted = EncryptedTransport::new(transport.clone(), key());
    start_workers(&encrypted, &model, 1).await;
    (transport, encrypted, model)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_connections_get_nothing_and_the_worker_goes_on() {
    let (transport, encrypted, model) = encrypted_worker().await;
    let expected = tokens(&encrypted, &model).await.expect("an honest head");
    let mut attacker = Attacker::with_recorded_handshake(&transport, key(), 1).await;
    for attack in 0..ATTACKS {
        let got = timeout(Duration::from_secs(20), attacker.connect(&transport, &address(1))).await;
        let got = got.expect("an attacker is disconnected in time");
        assert!(got <= MAX_REPLY_LEN, "{got} bytes for attack {attack}");
    }
    assert_eq!(tokens(&encrypted, &model).await.expect("an honest head"), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_do_not_block_an_honest_head() {
    let (transport, encrypted, model) = encrypted_worker().await;
    let mut held = Vec::new();
    for _ in 0..500 {
        // Half of them send one byte, and the others nothing.
        let mut stream = transport.connect(&address(1)).await.expect("the worker listens");
        if held.len() % 2 == 0 {
            let _ = stream.write_all(b"h").await;
        }
        held.push(stream);
    }
    let honest = timeout(Duration::from_secs(30), tokens(&encrypted, &model)).await;
    assert_eq!(honest.expect("an honest head is not kept waiting").expect("tokens").len(), 4);
}
