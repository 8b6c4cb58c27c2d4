//! Requests that arrive during a run: waits, slots and losses.

use hearth_core::Cluster;
use hearth_core::metrics::compute_metrics;
use hearth_core::schedule::arrivals::arrivals;
use hearth_profiles::{Bytes, PerSecond};
use hearth_schema::Plan;
use hearth_schema::request_trace::Arrival;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::trace::Trace;
use hearth_schema::workload::{Arrivals, Workload};
use hearth_sim::{Input, Options, SimError, simulate};

use crate::small_rings::{cluster, planned};

fn ring(workload: Workload, devices: usize) -> (Cluster, Plan) {
    let memories = vec![Bytes::from_mib(16 << 10); devices];
    let cluster = Cluster { workload, ..cluster("llama-8b", &memories, 1) };
    let windows = [vec![32], vec![16, 16]][devices - 1].clone();
    let plan = planned(&cluster, &windows, ResidencyOptions::default());
    (cluster, plan)
}

fn run((cluster, plan): &(Cluster, Plan)) -> Trace {
    let options = Options { starts_warm: true, ..Options::default() };
    simulate(&Input { cluster, plan, options: &options }).expect("the plan fits")
}

fn workload(sequences: u32, rate: f64, requests: u32) -> Workload {
    let arrivals = Arrivals { rate: Some(PerSecond(rate)), file: None, requests: Some(requests) };
    Workload { sequences, arrivals: Some(arrivals), ..Workload::new(4, 8) }
}

/// With one slot, requests are served one after the other: the wait of each follows from the wait and the service of the
/// one before it (Lindley, 1952).
#[test]
fn waits_for_one_slot_follow_the_recursion_of_a_queue() {
    let alone = compute_metrics(&run(&ring(Workload::new(4, 8), 1)));
    let tpot = alone.tpot_ms.expect("several tokens").mean_ms;
    // Requests arrive as fast as they are served on average, so most of them wait.
    let ring = ring(workload(1, 1e3 / (8.0 * tpot), 40), 1);
    let trace = run(&ring);
    let metrics = compute_metrics(&trace);
    assert_eq!((trace.admissions.len(), metrics.sequences.len()), (40, 40));
    let times = arrivals(&ring.0).expect("random arrivals");
    let mut free_at = 0.0_f64;
    for ((sequence, admission), arrival) in metrics.sequences.iter().zip(&trace.admissions).zip(&*times) {
        assert_eq!((admission.arrival_ns, admission.request), (arrival.at_ns, sequence.sequence));
        let [arrival, entry] = [admission.arrival_ns, admission.admitted_ns].map(|ns| ns as f64 / 1e6);
        assert!((entry - free_at.max(arrival)).abs() < 1e-3 * tpot, "{sequence:?}: {free_at}");
        free_at = arrival + sequence.ttft_ms + 7.0 * sequence.tpot_ms.expect("several tokens");
    }
    let requests = metrics.requests.expect("requests");
    assert!(requests.queue_ms.p95 > 8.0 * tpot && requests.queue_ms.p50 < requests.queue_ms.p95);
    let itl = requests.itl_ms.expect("several tokens");
    assert!((itl.p50 / tpot - 1.0).abs() < 0.02, "{requests:?}");
}

#[test]
fn slots_and_batches_shorten_waits() {
    let of = |sequences| {
        let metrics = compute_metrics(&run(&ring(workload(sequences, 3.0, 30), 2)));
        metrics.requests.expect("requests")
    };
    let (one, four) = (of(1), of(4));
    assert_eq!((one.count, four.count), (30, 30));
    assert!(four.ttft_ms.p95 < 0.5 * one.ttft_ms.p95, "{four:?} {one:?}");
    assert!(four.output_tokens_per_s > 1.5 * one.output_tokens_per_s, "{four:?} {one:?}");
    // The price: a batch of several tokens takes longer than one token.
    let [one, four] = [one, four].map(|run| run.itl_ms.expect("several tokens"));
    assert!(four.p95 >= one.p95);
}

#[test]
fn requests_that_arrive_together_are_a_batch_of_sequences() {
    let (mut cluster, plan) = ring(workload(3, 1.0, 3), 2);
    let arrival = Arrival { at_ns: 0, prompt_tokens: 4, generated_tokens: 8 };
    cluster.recorded_arrivals = Some([arrival; 3].into());
    let together = compute_metrics(&run(&(cluster, plan)));
    let sequences = Workload { sequences: 3, ..Workload::new(4, 8) };
    let batch = compute_metrics(&run(&ring(sequences, 2)));
    let [together, batch] = [together, batch].map(|run| run.tpot_ms.expect("several tokens").mean_ms);
    assert!((together / batch - 1.0).abs() < 1e-6, "{together} {batch}");
}

#[test]
fn caches_with_too_little_memory_make_requests_leave_and_continue() {
    let (cluster, plan) = ring(workload(4, 100.0, 8), 1);
    // Each request has 208 tokens; there is room for two, and some slack.
    let plan = Plan { cache_tokens: Some(512), ..plan };
    let cluster = Cluster { workload: Workload { prompt_tokens: 200, ..cluster.workload }, ..cluster };
    let trace = run(&(cluster, plan));
    let metrics = compute_metrics(&trace);
    assert_eq!(metrics.requests.as_ref().map(|requests| requests.count), Some(8));
    assert!(metrics.sequences.iter().all(|sequence| sequence.decoded_tokens == 7), "{metrics:?}");
    assert!(trace.admissions.len() >= 8, "{:?}", trace.admissions);
}

#[test]
fn plans_that_cannot_be_executed_are_refused() {
    let (cluster, plan) = ring(workload(1, 1.0, 2), 1);
    let devices = plan.devices.into_iter().map(|mut device| {
        device.residency.policy = hearth_schema::residency::Residency::Pinned;
        device
    });
    let plan = Plan { devices: devices.collect(), ..plan };
    let error = simulate(&Input { cluster: &cluster, plan: &plan, options: &Options::default() });
    assert!(matches!(error, Err(SimError::NotExecutable { key: "workload.arrivals", .. })), "{error:?}");
}
