//! Tests of the adaptation: when a plan is evaluated and changed, what a measurement is, and the bound of the lost time.

use hearth_profiles::device::shipped_profile as shipped_device;
use hearth_profiles::model::shipped_profile;
use hearth_profiles::{BytesPerSecond, Link, Sourced};
use hearth_schema::pass::Pass;
use hearth_schema::scenario::{ActivationFormat, KvFormat, Links, Workload};
use hearth_schema::trace::StepCost;
use proptest::prelude::*;

use super::*;
use crate::schedule::tests::plan;
use crate::{LinkTable, Member};

fn cluster() -> Arc<Cluster> {
    let member = |(index, name): (usize, &str)| Member {
        name: format!("d{index}"),
        address: None,
        device: shipped_device(name).expect("shipped"),
        residency: None,
    };
    let latency = Sourced::new(Seconds(0.001), "test");
    let bandwidth = Sourced::new(BytesPerSecond(1e8), "test");
    Arc::new(Cluster {
        members: ["d2", "d3"].into_iter().enumerate().map(member).collect(),
        head: 0,
        links: LinkTable::new(Links::uniform(Link::constant(latency, bandwidth))),
        model: shipped_profile("1b").expect("shipped"),
        draft_model: None,
        routes: None,
        recorded_arrivals: None,
        context_length: 512,
        kv_cache_format: KvFormat::F16,
        activation_format: ActivationFormat::F32,
        workload: Workload::new(4, 4),
        seed: 7,
    })
}

fn measured(device: &str, computed: f64, expected: f64, available_memory: Option<Bytes>) -> Event {
    let measurement =
        Measurement { computed: Seconds(computed), expected: Seconds(expected), available_memory };
    Event::Measured { device: device.into(), measurement }
}

fn evaluation(current: f64, new: f64, load_time: f64, prompt_token_time: f64) -> Event {
    let [current, new, load_time, prompt_token_time] =
        [current, new, load_time, prompt_token_time].map(Seconds);
    Event::Evaluated(Some(Evaluation { current, new, load_time, prompt_token_time }))
}

fn completed(cached_tokens: u64) -> Event {
    Event::BatchCompleted { cached_tokens, in_flight: 1 }
}

#[test]
fn plan_is_evaluated_when_a_device_changes() {
    let mut ring = Adaptation::new(cluster());
    assert_eq!(ring.react(measured("d1", 0.2, 0.01, None)), [], "not measured for long enough");
    assert_eq!(ring.react(measured("d0", 2.0, 1.9, None)), [], "as its profile says");
    assert_eq!(ring.react(measured("d1", 2.0, 1.0, None)), [Step::Evaluate]);
    assert_eq!(ring.react(measured("d1", 2.0, 0.5, None)), [], "the evaluation is awaited");
    ring.react(Event::Evaluated(None));
    assert_eq!(ring.react(measured("d1", 4.0, 1.0, None)), [Step::Evaluate]);
    ring.react(Event::Evaluated(None));
    // The ring is planned with the conditions of this evaluation, and is not evaluated for the same ones again.
    assert!((ring.slowdown("d1") - 4.0).abs() < 0.6, "{}", ring.slowdown("d1"));
    assert_eq!(ring.react(measured("d1", 4.0, 1.0, None)), []);
    let (profiles, planned) = (cluster(), ring.cluster());
    let bandwidth =
        |cluster: &Cluster, name| cluster.member(name).expect("a member").device.cpu.read_bandwidth.value.0;
    assert_eq!(bandwidth(&planned, "d0"), bandwidth(&profiles, "d0") / ring.slowdown("d0"));
    let ratio = bandwidth(&profiles, "d1") / bandwidth(&planned, "d1");
    assert!((ratio / ring.slowdown("d1") - 1.0).abs() < 0.1, "{ratio}");
    assert!(ring.summary().is_some_and(|text| text.starts_with("d1 computes ")), "{:?}", ring.summary());
    assert_eq!(ring.react(Event::Outdated { device: "d1".into() }), [Step::Evaluate]);
    assert_eq!(bandwidth(&ring.cluster(), "d1"), bandwidth(&profiles, "d1"));
}

#[test]
fn profile_bounds_the_memory_of_a_device() {
    let profiles = cluster();
    let available = |cluster: &Cluster| cluster.members[1].device.memory.available_memory.value;
    let planned = available(&profiles);
    let mut ring = Adaptation::new(profiles);
    assert_eq!(ring.react(measured("d1", 0.0, 0.0, Some(planned * 2))), []);
    let half = Bytes(planned.0 / 2);
    assert_eq!(ring.react(measured("d1", 0.0, 0.0, Some(half))), [Step::Evaluate]);
    assert_eq!(available(&ring.cluster()), half);
    assert!(ring.summary().is_some_and(|text| text.contains(" and has ")), "{:?}", ring.summary());
    ring.react(Event::Evaluated(None));
    assert_eq!(ring.react(measured("d1", 0.0, 0.0, Some(planned * 2))), [Step::Evaluate]);
    assert_eq!(available(&ring.cluster()), planned);
}

#[test]
fn plan_changes_when_the_lost_time_pays_for_it() {
    let mut ring = Adaptation::new(cluster());
    ring.react(evaluation(1.0, 0.5, 0.9, 0.01));
    // 0.9 s to load, and 0.01 s for each of 100 cached tokens: four batches that are half a second too long.
    assert_eq!(ring.react(Event::Idle), []);
    let decisions: Vec<_> = (0..4).map(|_| ring.react(completed(100))).collect();
    assert_eq!(decisions, [vec![], vec![], vec![], vec![Step::Replan]]);
    assert_eq!(ring.react(completed(0)), [], "once");
    ring.react(Event::Replanned);
    // An idle ring has nothing to compute again.
    ring.react(evaluation(1.0, 0.5, 0.9, 0.01));
    ring.react(completed(1000));
    assert_eq!(ring.react(Event::Idle), []);
    ring.react(completed(1000));
    assert_eq!(ring.react(Event::Idle), [Step::Replan]);
    for (current, new) in [(1.0, 0.95), (1.0, 2.0), (f64::INFINITY, f64::INFINITY)] {
        ring.react(evaluation(current, new, 0.0, 0.0));
        assert_eq!(ring.react(completed(0)), [], "{new} instead of {current}");
    }
    ring.react(evaluation(f64::INFINITY, 2.0, 100.0, 1.0));
    assert_eq!(ring.react(Event::Idle), [Step::Replan], "the plan does not run any more");
}

#[test]
fn measurement_compares_steps_with_the_profile() {
    let ring = Adaptation::new(cluster());
    let batch = Batch::from(Pass::new(3, 5, 1, true));
    let batches = BTreeMap::from([(3, batch.clone())]);
    let cluster = cluster();
    let cost =
        ComputeCost::for_main_memory(&cluster.members[1].device, &cluster.model, KvFormat::F16.format());
    let expected: Seconds = (2..6).map(|layer| cost.layer_time(layer, batch.passes())).sum();
    let step =
        |pass_index, layers| StepRecord { pass_index, layers, end_ns: 5_000_000, ..StepRecord::default() };
    let from_disk = StepRecord {
        cost: Some(StepCost {
            cpu_ns: 1_000_000,
            queue_ns: 1_000_000,
            faulted_bytes: 1,
            ..StepCost::default()
        }),
        ..step(3, Some([2, 6]))
    };
    let records =
        [step(3, Some([2, 6])), from_disk, step(9, Some([2, 6])), step(3, Some([2, 1 << 30])), step(3, None)];
    let reading =
        |counter, value| CounterReading { device_index: 1, counter, pass_index: 3, time_ns: 0, value };
    let readings =
        [reading(Counter::Available, 5), reading(Counter::Available, 7), reading(Counter::Resident, 9)];
    let found = ring.measure("d1", &batches, (&records, &readings));
    assert!((found.expected / (expected * 2.0) - 1.0).abs() < 1e-9, "{found:?}");
    // The step from disk counts without its wait; those without known layers or batch do not count.
    assert!((found.computed.0 - 0.007).abs() < 1e-9, "{found:?}");
    assert_eq!(found.available_memory, Some(Bytes(7)));
    let unknown = ring.measure("d7", &batches, (&records, &readings));
    assert_eq!(unknown, Measurement::default());
}

#[test]
fn layers_that_move_are_loaded() {
    let cluster = cluster();
    let layers = cluster.model.layers.len() as u32;
    let (current, new) = (plan(layers, &[layers - 4, 4], false), plan(layers, &[layers - 8, 8], false));
    let bytes: Bytes = cluster.model.layers[(layers - 8) as usize..(layers - 4) as usize]
        .iter()
        .map(TensorGroup::bytes)
        .sum();
    let expected = bytes / stream_rate(&cluster.members[1].device.disk);
    assert!((load_time(&cluster, &current, &new) / expected - 1.0).abs() < 1e-9);
    assert_eq!(load_time(&cluster, &new, &new), Seconds(0.0));
}

#[test]
fn claims_of_a_device_are_bounded() {
    for (computed, expected, slowdown) in
        [(1e9, 1e-9, 100.0), (1e300, 1e-300, 1.0), (1.0, 0.0, 1.0), (1.0, 1e300, 0.25)]
    {
        let mut ring = Adaptation::new(cluster());
        ring.react(measured("d1", computed, expected, Some(Bytes(u64::MAX))));
        assert_eq!(ring.slowdown("d1"), slowdown, "{computed} s instead of {expected} s");
        let device = &ring.cluster().members[1].device;
        assert!(device.cpu.read_bandwidth.value.0.is_normal(), "{:?}", device.cpu.read_bandwidth);
    }
}

#[test]
fn conditions_are_evaluated_again_for_a_new_ring() {
    let mut ring = Adaptation::new(cluster());
    assert_eq!(ring.react(measured("d1", 2.0, 1.0, None)), [Step::Evaluate]);
    ring.react(evaluation(1.0, 0.5, 0.9, 0.01));
    // A connection broke, and the ring has the same plan again.
    ring.react(Event::Replanned);
    assert_eq!(ring.react(completed(0)), []);
    assert_eq!(ring.react(measured("d1", 2.0, 1.0, None)), [Step::Evaluate]);
}

#[test]
fn batches_in_flight_lose_their_time_together() {
    let mut ring = Adaptation::new(cluster());
    ring.react(evaluation(1.0, 0.5, 0.9, 0.0));
    let steps: Vec<_> =
        (0..4).map(|_| ring.react(Event::BatchCompleted { cached_tokens: 0, in_flight: 2 }).len()).collect();
    assert_eq!(steps, [0, 0, 0, 1]);
}

proptest! {
    /// For every duration of a slow phase, waiting and changing cost at most twice as much as the best decision in
    /// hindsight, and one token more.
    #[test]
    fn lost_time_is_bounded(slow_tokens in 0u32..200, cost in 0.0f64..60.0, saving in 0.2f64..0.9) {
        let mut ring = Adaptation::new(cluster());
        ring.react(evaluation(1.0, 1.0 - saving, cost, 0.0));
        let mut lost = 0.0;
        for _ in 0..slow_tokens {
            lost += saving;
            if ring.react(completed(0)) == [Step::Replan] {
                lost += cost;
                break;
            }
        }
        let best = cost.min(saving * f64::from(slow_tokens));
        prop_assert!(lost <= 2.0 * best + saving + 1e-9, "{lost} s lost, {best} s with hindsight");
    }
}
