//! Redistribution: moves the layers of lost devices to the remaining devices, without a planner.
//!
//! The layers are distributed in proportion to the windows of the remaining devices, because the windows of the plan
//! are the only known measure of the speed of the devices. A round has as many layers as before, so the number of
//! rounds does not change. Windows are rounded to whole layers by the largest remainder method.
//!
//! Not here: whether the new layers fit in the memory of a device, which the device checks itself.

use std::collections::BTreeSet;

use hearth_profiles::Document;

use super::ReplanError;
use hearth_schema::plan::{DroppedDevice, Plan, PlannerRecord, Processor};

/// Returns the plan with the layers of the lost devices moved to the remaining devices. Fails if the head is lost.
pub fn redistribute_layers(plan: &Plan, lost: &BTreeSet<String>) -> Result<Plan, ReplanError> {
    let head = &plan.devices[0].name;
    if lost.contains(head) {
        let tokens = "it holds the generated tokens, so the run cannot continue";
        return Err(ReplanError { reason: format!("the head `{head}` is lost; {tokens}") });
    }
    let mut new = plan.clone();
    new.devices.retain(|device| !lost.contains(&device.name));
    let layers = plan.layers_per_round().min(plan.model.layers);
    // The layers may run out in the last window of round 0, so its actual length counts.
    let remaining = (0..plan.devices.len()).filter(|&index| !lost.contains(&plan.devices[index].name));
    let before: Vec<u32> = remaining.map(|index| plan.window(index, 0).len() as u32).collect();
    let windows = share_out(layers, &before);
    for (device, window) in new.devices.iter_mut().zip(windows) {
        device.window = window;
        // The GPU may have no memory for more layers than before.
        device.gpu_layers = device.gpu_layers.min(window);
        device.predicted_terms = None;
    }
    if new.devices[0].gpu_layers < new.devices[0].window {
        new.output_processor = Processor::Cpu;
    }
    new.rounds = new.model.layers.div_ceil(new.layers_per_round().max(1));
    let names: Vec<&str> = lost.iter().map(String::as_str).collect();
    new.planner =
        PlannerRecord { strategy: "spread".into(), options: vec![format!("without={}", names.join(","))] };
    let dropped =
        |name: &String| DroppedDevice { name: name.clone(), reason: "it was lost during the run".into() };
    new.dropped_devices.extend(lost.iter().map(dropped));
    (new.prediction, new.explanation) = (None, vec![]);
    new.validate().map_err(|error| ReplanError { reason: error.message() })?;
    Ok(new)
}

/// Returns windows with `layers` layers in proportion to the given windows. If all are empty, the head gets all layers.
fn share_out(layers: u32, windows: &[u32]) -> Vec<u32> {
    let before: u64 = windows.iter().map(|&window| u64::from(window)).sum();
    if before == 0 {
        return (0..windows.len()).map(|index| if index == 0 { layers } else { 0 }).collect();
    }
    let scaled = |window: u32| u64::from(window) * u64::from(layers);
    let mut shares: Vec<u32> = windows.iter().map(|&window| (scaled(window) / before) as u32).collect();
    let mut order: Vec<usize> = (0..windows.len()).collect();
    // The largest remainder first; of equal ones the first device.
    order.sort_by_key(|&index| (std::cmp::Reverse(scaled(windows[index]) % before), index));
    let missing = layers.saturating_sub(shares.iter().sum());
    order.iter().take(missing as usize).for_each(|&index| shares[index] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::tests::plan;

    fn lost(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.into()).collect()
    }

    #[test]
    fn layers_are_distributed_in_proportion_to_windows() {
        let plan = plan(12, &[1, 2, 3], false);
        let names: Vec<String> = plan.devices.iter().map(|device| device.name.clone()).collect();
        let new = redistribute_layers(&plan, &lost(&[&names[2]])).expect("two are left");
        // Six layers per round in the ratio 1 : 2.
        assert_eq!(new.devices.iter().map(|device| device.window).collect::<Vec<_>>(), [2, 4]);
        assert_eq!((new.rounds, new.layers_per_round()), (2, 6));
        let alone = redistribute_layers(&plan, &lost(&[&names[1], &names[2]])).expect("the head is left");
        assert_eq!((alone.devices.len(), alone.devices[0].window, alone.rounds), (1, 6, 2));
        let error = redistribute_layers(&plan, &lost(&[&names[0]])).expect_err("the tokens are lost");
        assert!(error.reason.contains("the head"), "{error}");
    }

    proptest! {
        #[test]
        fn loss_of_any_workers_leaves_a_valid_plan(
            windows in proptest::collection::vec(0u32..9, 1..6), layers in 1u32..40, mask in 0u32..32
        ) {
            let ring: u32 = windows.iter().sum();
            prop_assume!(ring > 0);
            let plan = plan(layers, &windows, false);
            prop_assume!(plan.validate().is_ok());
            let lost = |index: usize| index > 0 && mask >> index & 1 == 1;
            let names = (0..windows.len()).filter(|&index| lost(index));
            let lost: BTreeSet<String> = names.map(|index| plan.devices[index].name.clone()).collect();
            let new = redistribute_layers(&plan, &lost).expect("the head is left");
            prop_assert!(new.validate().is_ok());
            prop_assert_eq!(new.layers_per_round(), ring.min(layers));
            prop_assert!(new.devices.iter().all(|device| !lost.contains(&device.name)));
        }
    }
}
