//! What can somebody do who can connect to a worker and has not its key? Not join, not read, not stop it.

mod attack;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use attack::Stranger;
use hearth_profiles::Document;
use hearth_ring::{
    Key, LocalModel, Memory, Network, Request, Ring, RingError, RingOptions, Sealed, Worker, bind,
};
use hearth_schema::Plan;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

/// Connections of strangers; the example `strangers` makes a million.
const KNOCKS: usize = 3000;
/// A handshake's second flight, which is the same for everybody who sends a first one.
const LONGEST_ANSWER: usize = 128;

fn key() -> Key {
    Key::parse("a phrase for a test").expect("long enough")
}

fn model() -> Arc<LocalModel> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models/psalm-7m-q4_k.gguf");
    Arc::new(LocalModel::open(&path).expect("the trained model is part of the repository"))
}

fn plan(model: &LocalModel) -> Plan {
    let text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\nmodel: {{name: psalm, digest: '{}', \
         shape_digest: '{}', layers: 8}}\nplanner: {{strategy: manual}}\nrounds: 1\ncontext: 64\nkv_cache: f32\n\
         devices:\n- {{name: a, role: head, window: 4, gpu_layers: 0, residency: {{policy: os}}}}\n\
         - {{name: b, address: 'localhost:1', role: worker, window: 4, gpu_layers: 0, residency: {{policy: os}}}}\n",
        model.profile.digest,
        model.profile.shape_digest()
    );
    Plan::from_yaml(&text).expect("a plan")
}

async fn start(network: &Memory, model: &Arc<LocalModel>) {
    let sealed = Sealed::new(network.clone(), key());
    let listener = bind(&sealed, "localhost:1").await.expect("a free name");
    let worker = Worker::new(sealed, model.clone(), 1);
    tokio::spawn(async move { worker.serve(listener, |_| {}).await });
}

async fn tokens(network: &impl Network, model: &Arc<LocalModel>) -> Result<Vec<u32>, RingError> {
    let options = RingOptions { threads: 1, ..RingOptions::default() };
    let mut ring = Ring::connect(network, plan(model), model.clone(), options).await?;
    let sample = |logits: &[f32]| {
        (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32
    };
    let request = Request::one(vec![1, 2, 3], 4, Box::new(sample));
    let generated = ring.generate(request, |_, _| {}).await.map_err(|unfinished| unfinished.error)?;
    ring.close().await;
    Ok(generated.tokens().to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_nothing_and_the_worker_goes_on() {
    let (network, model) = (Memory::default(), model());
    start(&network, &model).await;
    let sealed = Sealed::new(network.clone(), key());
    let expected = tokens(&sealed, &model).await.expect("an honest head");
    let mut stranger = Stranger::listening(&network, key(), 1).await;
    for knock in 0..KNOCKS {
        let got = timeout(Duration::from_secs(20), stranger.knock(&network, "localhost:1")).await;
        let got = got.expect("a stranger is sent away in time");
        assert!(got <= LONGEST_ANSWER, "{got} bytes for stranger {knock}");
    }
    assert_eq!(tokens(&sealed, &model).await.expect("an honest head"), expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_say_nothing_keep_nobody_out() {
    let (network, model) = (Memory::default(), model());
    start(&network, &model).await;
    let sealed = Sealed::new(network.clone(), key());
    let mut held = Vec::new();
    for _ in 0..500 {
        // Some say nothing, some dribble.
        let mut stream = network.connect("localhost:1").await.expect("the worker listens");
        if held.len() % 2 == 0 {
            let _ = stream.write_all(b"h").await;
        }
        held.push(stream);
    }
    let honest = timeout(Duration::from_secs(30), tokens(&sealed, &model)).await;
    assert_eq!(honest.expect("the honest are not kept waiting").expect("an honest head").len(), 4);
}
