//! Tests that the simulator and the executor run the same steps for a plan.
//!
//! The records of every device must have the same kinds, passes, rounds, layers and peers; only times may differ.
//! Records of reading ahead are not compared, because they are written only if something was read.

use std::path::Path;
use std::sync::Arc;

use hearth_core::{Cluster, LinkTable, Member};
use hearth_profiles::{Document, device};
use hearth_ring::{
    GenerationRequest, LocalModel, MemoryTransport, Ring, RingOptions, SequenceRequest, Worker, bind,
    plan_for_sequences,
};
use hearth_schema::Plan;
use hearth_schema::scenario::{ActivationFormat, KvFormat, Scenario, Workload};
use hearth_schema::trace::{StepKind, Trace};
use hearth_sim::{Input, Options, simulate};

use crate::folder::scenario_yaml;
use crate::processes::{model_path, plan_yaml};

/// A step without its times: pass, round, kind, layers and peer.
type Step = (u32, u32, StepKind, Option<[u32; 2]>, Option<u16>);

/// Returns the sorted steps of a device. Sorting is needed because a reply may be recorded before its message.
fn steps(trace: &Trace, device: u16) -> Vec<Step> {
    let own = trace
        .records
        .iter()
        .filter(|record| record.device_index == device && record.kind != StepKind::Prefetch);
    let mut steps: Vec<Step> = own.map(|it| (it.pass_index, it.round, it.kind, it.layers, it.peer)).collect();
    steps.sort_unstable();
    steps
}

async fn executed(
    plan: Plan,
    model: &Arc<LocalModel>,
    network: &MemoryTransport,
    workload: &Workload,
) -> Trace {
    let options = RingOptions { threads: 1, ..RingOptions::default() };
    let mut ring = Ring::connect(network, plan, model.clone(), options).await.expect("the ring comes up");
    let sequence = |_| SequenceRequest {
        prompt: (0..workload.prompt_tokens).map(|index| index % 2000).collect(),
        sampler: Box::new(|_| 7),
    };
    let request = GenerationRequest {
        sequences: (0..workload.sequences).map(sequence).collect(),
        micro_batch: workload.micro_batch,
        ..GenerationRequest::single_sequence(vec![], workload.generated_tokens, Box::new(|_| 7))
    };
    let generated = ring.generate(request, |_, _| {}).await.expect("tokens");
    ring.close().await;
    generated.trace
}

fn simulated(plan: &Plan, model: &LocalModel, workload: Workload) -> Trace {
    let links = Scenario::from_yaml(&scenario_yaml("  - {name: a, profile: d3}")).expect("a scenario").links;
    let member = |name: &str| Member {
        name: name.into(),
        address: None,
        device: device::shipped_profile("d3").expect("shipped"),
        residency: None,
    };
    let cluster = Cluster {
        members: plan.devices.iter().map(|device| member(&device.name)).collect(),
        head: 0,
        links: LinkTable::new(links),
        model: model.profile.clone(),
        context_length: plan.context_length,
        kv_cache_format: KvFormat::F32,
        activation_format: plan.activation_format,
        draft_model: None,
        routes: None,
        recorded_arrivals: None,
        workload,
        seed: 1,
    };
    let options = Options::default();
    simulate(&Input { cluster: &cluster, plan, options: &options }).expect("a plan that can be run")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulator_and_executor_run_the_same_steps() {
    let local = Arc::new(LocalModel::open(Path::new(&model_path("q8_0"))).expect("a test model"));
    let network = MemoryTransport::default();
    let mut addresses = Vec::new();
    for port in 0..2 {
        let address = format!("localhost:{}", 9000 + port);
        let listener = bind(&network, &address).await.expect("a free name");
        let worker = Worker::new(network.clone(), local.clone(), 1);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
        addresses.push(address);
    }
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    // One round, several rounds, a partial last round; a prompt of one chunk and of three; several sequences. On several
    // devices all prompts are one batch, because times decide which batch a later prompt joins.
    for (windows, prompt, sequences, micro_batch) in [
        (vec![8], 5, 1, 512),
        (vec![3, 3, 2], 5, 1, 512),
        (vec![2, 1, 1], 5, 1, 512),
        (vec![2, 2, 1], 5, 1, 512),
        (vec![1, 2], 1100, 1, 512),
        (vec![3, 3, 2], 10, 2, 20),
        (vec![2, 1, 1], 9, 3, 512),
        (vec![8], 40, 4, 7),
    ] {
        let plan = Plan::from_yaml(&plan_yaml("q8_0", &windows, &addresses, 1200)).expect("a plan");
        let plan = plan_for_sequences(plan, sequences, &local.profile.shape);
        let workload = Workload { sequences, micro_batch, ..Workload::new(prompt, 3) };
        let real = executed(plan.clone(), &local, &network, &workload).await;
        let model = simulated(&plan, &local, workload.clone());
        assert_eq!(real.passes, model.passes);
        for device in 0..windows.len() as u16 {
            assert_eq!(steps(&real, device), steps(&model, device), "windows {windows:?}, device {device}");
        }
        assert_eq!(sent(&real), sent(&model), "windows {windows:?}");
        // f16 activations need half the bytes in both.
        let f16_plan = Plan { activation_format: ActivationFormat::F16, ..plan };
        let other = executed(f16_plan.clone(), &local, &network, &workload).await;
        assert_eq!(2 * sent(&other), sent(&real), "windows {windows:?}");
        assert_eq!(sent(&other), sent(&simulated(&f16_plan, &local, workload)), "windows {windows:?}");
    }
}

fn sent(trace: &Trace) -> u64 {
    trace.records.iter().filter(|record| record.kind == StepKind::Send).map(|record| record.bytes).sum()
}
