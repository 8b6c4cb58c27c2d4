//! Tests of tensor-parallel plans: rejected documents, sizes of slices, and messages of an all-reduce.

use hearth_profiles::model::shipped_profile;
use hearth_profiles::{Bytes, Document};
use proptest::prelude::*;

use hearth_schema::Plan;
use hearth_schema::plan::tensor_parallel::AllReduce;

use super::*;

const PATTERNS: [AllReduce; 4] =
    [AllReduce::AllGather, AllReduce::Star, AllReduce::Ring, AllReduce::OverTheAir];

/// Returns the YAML of a plan for Llama 3 8B with these slices of key-value heads and feed-forward rows.
fn text(slices: &[(u32, u32)], kind: &str, residency: &str) -> String {
    let slice = |(index, (heads, rows)): (usize, &(u32, u32))| {
        format!("    - {{device: d{index}, kv_heads: {heads}, feed_forward: {rows}}}\n")
    };
    let device = |index: usize| {
        let role = if index == 0 { "head" } else { "worker" };
        format!("- {{name: d{index}, role: {role}, window: 32, gpu_layers: 0, residency: {{{residency}}}}}\n")
    };
    format!(
        "schema: plan/1
scenario: {{name: t, digest: 'sha256:0'}}
model: {{name: llama-8b, shape_digest: 'shape:0', layers: 32}}
planner: {{strategy: dllama}}
kind:
  tensor:
    {kind}
    slices:
{}rounds: 1
context: 64
kv_cache: f16
devices:
{}",
        slices.iter().enumerate().map(slice).collect::<String>(),
        (0..slices.len()).map(device).collect::<String>()
    )
}

const KIND: &str = "all_reduce: star
    values: f32";
const PINNED: &str = "policy: pinned, weights_as: q4_0";

fn plan(slices: &[(u32, u32)]) -> Plan {
    Plan::from_yaml(&text(slices, KIND, PINNED)).expect("a plan")
}

fn rejected(slices: &[(u32, u32)], kind: &str, residency: &str) -> String {
    Plan::from_yaml(&text(slices, kind, residency)).expect_err("a rejection").to_string()
}

#[test]
fn slices_are_read_and_written() {
    let plan = plan(&[(4, 7168), (4, 7168)]);
    assert_eq!(Plan::from_yaml(&plan.to_yaml()), Ok(plan.clone()));
    assert!(plan.to_yaml().contains("kind:\n  tensor:\n    all_reduce: star\n"), "{}", plan.to_yaml());
    assert_eq!((plan.window(1, 0), plan.window(1, 1), plan.layers_per_round()), (0..32, 0..0, 32));
    assert!(plan.simulation_only_reason().expect("a reason").contains("`dllama` can only be simulated"));
}

#[test]
fn contradictory_plans_are_rejected() {
    let whole = [(4, 7168), (4, 7168)];
    assert!(rejected(&[(8, 14336), (0, 0)], KIND, PINNED).contains("neither KV heads nor feed-forward rows"));
    assert!(rejected(&[], KIND, PINNED).contains("`devices` is empty"));
    assert!(rejected(&whole, KIND, "policy: os").contains("`pinned` or `sliding`"));
    assert!(rejected(&whole, KIND, "policy: sliding, weights_as: f32").contains("needs `blocks`"));
    assert!(rejected(&whole, KIND, "policy: sliding, blocks: 0").contains("needs `blocks`"));
    assert!(rejected(&whole, "all_reduce: star\n    values: q4_k", PINNED).contains("cannot be added up"));
    let unknown = rejected(&whole, "all_reduce: gossip\n    values: f32", PINNED);
    assert!(unknown.contains("unknown variant `gossip`"));
    let air = "all_reduce: over-the-air\n    values: f32";
    assert!(rejected(&whole, air, PINNED).contains("needs `air_time`"));
    assert!(rejected(&whole, &format!("{air}\n    air_time: 2 h"), PINNED).contains("air_time"));
    assert!(rejected(&whole, &format!("{KIND}\n    air_time: 1 ms"), PINNED).contains("remove it"));
    let sound = text(&whole, KIND, PINNED);
    let edited = |from: &str, to: &str| {
        Plan::from_yaml(&sound.replacen(from, to, 1)).expect_err("a rejection").to_string()
    };
    assert!(edited("kind:\n  tensor:", "kind:\n  pipeline:").contains("unknown variant `pipeline`"));
    assert!(edited("device: d1", "device: d0").contains("in the same order"));
    assert!(edited("rounds: 1", "rounds: 2").contains("`rounds: 1`"));
    assert!(edited("window: 32", "window: 16").contains("works on every layer"));
    assert!(edited("role: worker", "role: relay").contains("relay"));
    assert!(edited("gpu_layers: 0", "gpu_layers: 3").contains("0 or 32"));
    let ring = sound.split("kind:").next().expect("a beginning").to_owned()
        + "rounds: 1\ncontext: 64\nkv_cache: f16\ndevices:\n- {name: d0, role: head, window: 32, gpu_layers: 0, \
           residency: {policy: sliding, blocks: 4}}\n";
    assert!(Plan::from_yaml(&ring).expect_err("a rejection").to_string().contains("is for `kind: tensor`"));
}

#[test]
fn slices_that_do_not_cover_the_model_are_rejected() {
    let shape = shipped_profile("llama-8b").expect("shipped").shape;
    let check = |slices: &[(u32, u32)]| {
        let plan = plan(slices);
        let tensor = plan.kind.tensor_plan().expect("slices");
        tensor.validate_coverage(&plan, &shape).map_err(|error| error.to_string())
    };
    assert_eq!(check(&[(4, 7168), (4, 7168)]), Ok(()));
    assert_eq!(check(&[(8, 14336)]), Ok(()));
    assert!(check(&[(4, 7168), (3, 7168)]).unwrap_err().contains("`kv_heads` add up to 7"));
    assert!(check(&[(4, 7168), (4, u32::MAX)]).unwrap_err().contains("`feed_forward` add up to 4294974463"));
    assert!(check(&[(4, 7000), (4, 7336)]).unwrap_err().contains("not a multiple of the block"));
}

#[test]
fn node_sends_the_bytes_of_dllama() {
    let text = text(&[(4, 7168), (4, 7168)], "all_reduce: all-gather\n    values: q8_0", PINNED);
    let plan = Plan::from_yaml(&text).expect("a plan");
    let tensor = plan.kind.tensor_plan().expect("slices");
    let bytes_per_token = |devices: usize| {
        let all_reduce = Collective { algorithm: tensor.all_reduce, devices };
        let message = all_reduce.message_bytes(tensor.partial_result_bytes(4096, 1));
        message * (64 * all_reduce.due_messages(1, 0) as u64)
    };
    assert_eq!((bytes_per_token(2), bytes_per_token(4)), (Bytes(272 << 10), Bytes(816 << 10)));
}

#[test]
fn devices_await_all_messages_of_an_all_reduce() {
    for pattern in PATTERNS {
        for devices in 1..7usize {
            let all_reduce = Collective { algorithm: pattern, devices };
            let mut received = vec![0; devices];
            let mut sent = vec![0; devices];
            // Each round, every device sends the messages that are due.
            for _ in 0..3 * devices {
                let due: Vec<usize> =
                    (0..devices).map(|index| all_reduce.due_messages(index, received[index])).collect();
                for index in 0..devices {
                    for number in sent[index]..due[index] {
                        let to = all_reduce.receiver(index, number);
                        assert_ne!(to, index, "{pattern:?}");
                        received[to] += 1;
                    }
                    sent[index] = sent[index].max(due[index]);
                }
            }
            let awaited: Vec<usize> = (0..devices).map(|index| all_reduce.total_messages(index)).collect();
            assert_eq!(received, awaited, "{pattern:?} of {devices}");
        }
    }
}

proptest! {
    #[test]
    fn slices_sum_to_the_model_byte_for_byte(
        heads in proptest::collection::vec(0u32..5, 1..6),
        rows in proptest::collection::vec(0u32..200, 5),
        converts in any::<bool>(),
    ) {
        let model = shipped_profile("llama-8b").expect("shipped");
        let mut heads = heads;
        let left = 8u32.saturating_sub(heads.iter().sum());
        heads[0] += left;
        prop_assume!(heads.iter().sum::<u32>() == 8);
        let mut rows: Vec<u32> = rows[..heads.len()].iter().map(|rows| rows * 32 + 32).collect();
        prop_assume!(rows.iter().sum::<u32>() <= 14336);
        rows[0] += 14336 - rows.iter().sum::<u32>();
        let slices: Vec<(u32, u32)> = heads.into_iter().zip(rows).collect();
        let residency = if converts { PINNED } else { "policy: pinned" };
        let plan = Plan::from_yaml(&text(&slices, KIND, residency)).expect("a plan");
        let tensor = plan.kind.tensor_plan().expect("slices");
        prop_assert_eq!(tensor.validate_coverage(&plan, &model.shape), Ok(()));
        let parts: Vec<SlicedModel> =
            (0..slices.len()).map(|index| SlicedModel::new(&plan, tensor, index, &model)).collect();
        let whole = SlicedModel::with_single_slice(&model, plan.devices[0].residency.conversion_format);
        // Each device has all norms: two of 4096 elements per layer.
        let norms = Bytes(2 * 4096 * 4) * 32;
        let sum: Bytes = parts.iter().map(SlicedModel::layers_bytes).sum();
        prop_assert_eq!(sum, whole.layers_bytes() + norms * (slices.len() as u64 - 1));
        if !converts {
            prop_assert_eq!(whole.layers_bytes(), model.all_layers_bytes());
        }
        let heads: u32 = parts.iter().map(|part| part.attention.shape.heads).sum();
        prop_assert_eq!(heads, model.shape.heads);
    }
}
