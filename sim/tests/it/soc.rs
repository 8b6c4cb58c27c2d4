//! Tests of a phone whose GPU and NPU compute together: times alone and in a ring, and the trace.

use hearth_core::soc::interval::total_time;
use hearth_core::soc::{SocLatencyModel, SocMetrics};
use hearth_core::{Cluster, metrics};
use hearth_profiles::device::shipped_profile;
use hearth_profiles::device::soc::{PartitionPolicy, SocOptions, SocStrategy, Synchronisation};
use hearth_profiles::{Format, Fraction, Seconds};
use hearth_schema::events::Event;
use hearth_schema::pass::Pass;
use hearth_schema::plan::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::Workload;
use hearth_schema::trace::{Outcome, Resource, StepKind, StepRecord, Trace};
use proptest::prelude::*;

use crate::events::run_with;
use crate::small_rings::{PLENTY, assert_near, tpot, warm};

fn cluster(options: SocOptions, prompt: u32, generate: u32) -> Cluster {
    let mut cluster = crate::small_rings::cluster("llama-8b", &[PLENTY], 1);
    let device = &mut cluster.members[0].device;
    *device = shipped_profile("snapdragon-8-gen-3").expect("it is shipped");
    device.soc.as_mut().expect("a SoC").default_options = options;
    Cluster { context_length: 4096, workload: Workload::new(prompt, generate), ..cluster }
}

fn plan(cluster: &Cluster) -> Plan {
    let plan = crate::small_rings::plan(&cluster.model, &[32], ResidencyOptions::default());
    Plan { context_length: cluster.context_length, ..plan }
}

fn run(cluster: &Cluster) -> Trace {
    let trace = warm(cluster, &plan(cluster));
    assert_eq!(trace.outcome, Outcome::Ok);
    trace
}

fn soc_metrics(cluster: &Cluster) -> SocMetrics {
    let soc = cluster.members[0].device.soc.as_ref().expect("a SoC");
    SocMetrics::from_trace(&run(cluster), soc, soc.default_options.strategy).expect("a SoC's trace")
}

#[test]
fn soc_time_is_the_sum_of_its_stages() {
    for strategy in SocStrategy::ALL_EXCEPT_BEST {
        let cluster = cluster(SocOptions::with_strategy(strategy), 256, 3);
        let metrics = metrics::compute_metrics(&run(&cluster));
        let soc = cluster.members[0].device.soc.as_ref().expect("a SoC");
        let latency_model = SocLatencyModel::new(soc, &cluster.model, Format::F16);
        let time = |pass| {
            let forward = latency_model.forward_cost(pass);
            let layers = total_time(&forward.layer_intervals) * 32.0;
            (layers + forward.output_interval.time() + forward.preparation_time).as_millis()
        };
        // Times are rounded to nanoseconds about a thousand times, and 256 rows of the embedding are read.
        let ttft = metrics.ttft_ms.expect("a token");
        assert_near(ttft, time(Pass::new(0, 0, 256, true)), 1e-4, strategy.name());
        let expected = f64::midpoint(time(Pass::new(1, 256, 1, true)), time(Pass::new(2, 257, 1, true)));
        assert_near(tpot(&metrics), expected, 1e-4, strategy.name());
        assert!((metrics.terms_ms.sum() - tpot(&metrics)).abs() < 1e-6);
    }
}

#[test]
fn device_path_agrees_with_soc_path_in_memory() {
    let options = SocOptions::with_strategy(SocStrategy::HeteroTensor);
    let alone = metrics::compute_metrics(&run(&cluster(options, 256, 4)));
    // An event after the end of the run selects the simulation of a ring with a page cache.
    let cluster = cluster(options, 256, 4);
    let plan = plan(&cluster);
    let (start_time, clock_rate_fraction) = (Some(Seconds(1000.0)), Some(Fraction(0.5)));
    let event = Event { start_time, device: Some("d0".into()), clock_rate_fraction, ..Event::default() };
    let ring = metrics::compute_metrics(&run_with(&cluster, &plan, &[event], None).trace);
    assert_near(tpot(&ring), tpot(&alone), 0.005, "ms");
}

#[test]
fn game_keeps_its_frames_unless_the_gpu_computes_alone() {
    let queue = |strategy| soc_metrics(&cluster(SocOptions::with_strategy(strategy), 256, 1)).prefill_queue;
    let tensor = queue(SocStrategy::HeteroTensor);
    assert!(tensor.max_kernel_ms <= 14.0 && tensor.frame_deadlines_met, "{tensor:?}");
    let gpu = queue(SocStrategy::GpuOnly);
    assert!(gpu.max_busy_ms > 4000.0 && !gpu.frame_deadlines_met, "{gpu:?}");
    assert!(queue(SocStrategy::HeteroLayer).frame_deadlines_met);
}

#[test]
fn fast_synchronisation_events_per_layer() {
    let events =
        |strategy| soc_metrics(&cluster(SocOptions::with_strategy(strategy), 256, 1)).sync_overhead.events_ms;
    assert!((events(SocStrategy::HeteroTensor) - 14.0 * 32.0 * 15.9e-3).abs() < 1e-3);
    assert!((events(SocStrategy::HeteroLayer) - 8.0 * 32.0 * 15.9e-3).abs() < 1e-3);
    assert!(events(SocStrategy::GpuOnly) == 0.0);
}

#[test]
fn long_prompts_are_split_by_graph_size() {
    let trace = run(&cluster(SocOptions::with_strategy(SocStrategy::HeteroTensor), 2500, 1));
    let tokens: Vec<u32> = trace.passes.iter().map(|pass| pass.tokens).collect();
    assert_eq!(tokens, [1024, 1024, 452]);
}

proptest! {
    #![proptest_config(crate::cases(24))]

    #[test]
    fn detail_records_lie_within_their_pass(
        prompt in 1_u32..700, generate in 1_u32..4, strategy in 0_usize..8, slow: bool, fixed: bool,
    ) {
        let options = SocOptions {
            synchronisation: if slow { Synchronisation::Slow } else { Synchronisation::Fast },
            partition_policy: if fixed { PartitionPolicy::Fixed } else { PartitionPolicy::Solved },
            ..SocOptions::with_strategy(SocStrategy::ALL_EXCEPT_BEST[strategy])
        };
        let cluster = cluster(options, prompt, generate);
        let trace = run(&cluster);
        prop_assert_eq!(&trace, &run(&cluster), "a second run is the same");
        let details = [StepKind::Kernel, StepKind::Synchronise];
        let whole: Vec<_> = trace.records.iter().filter(|it| !details.contains(&it.kind)).collect();
        for detail in trace.records.iter().filter(|it| details.contains(&it.kind)) {
            let within = |record: &&StepRecord| {
                record.pass_index == detail.pass_index && record.start_ns <= detail.start_ns && record.end_ns >= detail.end_ns
            };
            prop_assert!(whole.iter().any(within));
        }
        // One kernel at a time on a processor.
        for processor in [Resource::Gpu, Resource::Npu] {
            let kernels = trace.records.iter().filter(|it| it.kind == StepKind::Kernel && it.resource == processor);
            let mut spans: Vec<_> = kernels.map(|it| (it.start_ns, it.end_ns)).collect();
            spans.sort_unstable();
            prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
    }
}
