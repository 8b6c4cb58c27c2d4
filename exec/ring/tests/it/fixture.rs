//! Fixtures of the ring's tests: the trained models, plans, workers and token listeners.
//!
//! Devices are tasks of this process, connected by pipes. They run the same code as separate processes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_core::schedule::ModelPart;
use hearth_profiles::Layers;
use hearth_ring::{
    Key, Listener, LocalModel, MemoryTransport, ModelSource, Ring, RingError, RingOptions, Transport, Worker,
    WorkerOptions, bind,
};
use hearth_schema::Plan;
use hearth_schema::plan::{KvFormat, PlannedDevice, PlannedModel, PlannerRecord, Role, ScenarioRecord};
use hearth_schema::residency::{Residency, ResidencyOptions};

pub const Q4_MODEL: &str = "psalm-7m-q4_k.gguf";
pub const Q8_MODEL: &str = "psalm-7m-q8_0.gguf";
pub const F16_MODEL: &str = "psalm-7m-f16.gguf";
pub const MIXTURE_MODEL: &str = "psalm-moe-f16.gguf";
/// Number of layers of the trained model.
pub const LAYERS: u32 = 8;

pub fn model_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models").join(name)
}

pub fn open_model(name: &str) -> Arc<LocalModel> {
    Arc::new(LocalModel::open(&model_path(name)).expect("the trained models are part of the repository"))
}

/// Returns the prompts of the golden texts, which have different lengths, and as the last prompt their concatenation.
pub fn prompts() -> Vec<Vec<u32>> {
    let mut prompts: Vec<_> = golden_runs(Q4_MODEL).into_iter().map(|[prompt, _]| prompt).collect();
    prompts.push(prompts.concat());
    prompts
}

/// Returns the ids of the prompt and of the generated tokens of each golden text of a model.
pub fn golden_runs(model: &str) -> Vec<[Vec<u32>; 2]> {
    let golden = std::fs::read(model_path("golden.json")).expect("part of the repository");
    let golden: serde_json::Value = serde_json::from_slice(&golden).expect("JSON");
    let ids = |run: &serde_json::Value, name: &str| {
        let ids = run[name].as_array().expect("ids").iter();
        ids.map(|id| id.as_u64().expect("a number") as u32).collect::<Vec<_>>()
    };
    let runs = golden["files"][model].as_array().expect("runs").iter();
    runs.map(|run| ["prompt_ids", "greedy_ids"].map(|name| ids(run, name))).collect()
}

pub fn key() -> Key {
    Key::parse("a phrase for a test").expect("long enough")
}

/// Returns the address of the worker with this index in the ring.
pub fn address(device_index: usize) -> String {
    format!("localhost:{}", 9000 + device_index)
}

/// The residency options with which the weights of the next window are read ahead.
pub const READ_AHEAD: ResidencyOptions = ResidencyOptions::with_policy(Residency::Windowed);
/// The residency options with which weights are read only by page faults.
pub const NO_PREFETCH: ResidencyOptions = READ_AHEAD.without_prefetch();

/// Creates a plan with these windows, whose workers have the addresses of [`address`].
pub fn plan(model: &LocalModel, windows: &[u32]) -> Plan {
    let Layers(layers) = model.profile.shape.layers;
    let devices = windows.iter().enumerate().map(|(index, &window)| {
        let role = if index == 0 { Role::Head } else { Role::Worker };
        let address = (index > 0).then(|| address(index));
        let device = PlannedDevice::new(format!("d{index}"), role, window);
        PlannedDevice { address, residency: NO_PREFETCH, ..device }
    });
    let scenario = ScenarioRecord { name: "test".into(), digest: String::new() };
    let planner = PlannerRecord { strategy: "manual".into(), options: vec![] };
    Plan {
        rounds: layers.div_ceil(windows.iter().sum()),
        context_length: 128,
        kv_cache_format: KvFormat::F32,
        devices: devices.collect(),
        ..Plan::empty(scenario, PlannedModel::from_profile(&model.profile), planner)
    }
}

pub fn with_residency(mut plan: Plan, residency: ResidencyOptions) -> Plan {
    plan.devices.iter_mut().for_each(|device| device.residency = residency);
    plan
}

/// Starts the worker with this index in the ring, which computes on one thread.
pub async fn start_worker(transport: &impl Transport, device_index: usize, source: ModelSource) {
    start_worker_at(transport, &address(device_index), source).await;
}

/// Starts a worker that listens on an address and computes on one thread. Returns the address that it listens on.
pub async fn start_worker_at(transport: &impl Transport, address: &str, source: ModelSource) -> String {
    let listener = bind(transport, address).await.expect("a free address");
    let own_address = listener.address();
    let options = WorkerOptions { threads: 1, ..WorkerOptions::default() };
    let worker = Worker::with_options(transport.clone(), source, options);
    tokio::spawn(async move { worker.serve(listener, |_| {}).await });
    own_address
}

/// Starts workers with the ring indices 1 to `count`.
pub async fn start_workers(transport: &impl Transport, model: &Arc<LocalModel>, count: usize) {
    for device_index in 1..=count {
        start_worker(transport, device_index, ModelSource::File(model.clone())).await;
    }
}

/// Starts workers with the ring indices 1 to `count` on a new transport within this process. Returns the transport.
pub async fn workers(model: &Arc<LocalModel>, count: usize) -> MemoryTransport {
    let transport = MemoryTransport::default();
    start_workers(&transport, model, count).await;
    transport
}

pub fn ring_options() -> RingOptions {
    RingOptions { threads: 1, pass_timeout: Duration::from_mins(1), ..RingOptions::default() }
}

pub async fn connect<T: Transport>(transport: &T, plan: Plan, model: &Arc<LocalModel>) -> Ring<T> {
    Ring::connect(transport, plan, model.clone(), ring_options()).await.expect("a ring")
}

pub async fn connect_error(transport: &impl Transport, plan: Plan, model: &Arc<LocalModel>) -> RingError {
    Ring::connect(transport, plan, model.clone(), ring_options()).await.err().expect("no ring")
}

/// The tokens that a listener has received, by sequence.
pub type ReceivedTokens = Arc<Mutex<Vec<Vec<u32>>>>;

/// Creates a listener for tokens. Returns the tokens that it receives, and the listener.
pub fn token_listener(sequences: usize) -> (ReceivedTokens, impl FnMut(u32, u32) + Send + 'static) {
    let seen = Arc::new(Mutex::new(vec![Vec::new(); sequences]));
    let own = seen.clone();
    (seen, move |sequence, token| own.lock().expect("no panic")[sequence as usize].push(token))
}

/// Returns whether the model file is on a disk. Pages of a file on a tmpfs cannot be evicted.
pub fn is_on_disk(model: &LocalModel) -> bool {
    let extent = model.weights.part_extents(&ModelPart::Layers(0..1)).into_iter().next().expect("a tensor");
    let bytes = model.weights.mapped_bytes(extent).expect("its bytes");
    hearth_runtime::pages::populate(bytes);
    model.weights.evict(extent);
    hearth_runtime::pages::resident_bytes(bytes) < bytes.len() as u64 / 2
}
