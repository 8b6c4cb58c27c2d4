//! Tests of the recovery: single cases, and properties for random sequences of events.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::schedule::tests::plan;

fn name(index: usize) -> String {
    format!("d{index}")
}

fn devices(count: usize) -> BTreeSet<String> {
    (0..count).map(name).collect()
}

/// Returns a plan of 8 layers for the named devices, each with a window of one layer.
fn plan_for(names: &BTreeSet<String>) -> Plan {
    let mut plan = plan(8, &vec![1; names.len().max(1)], false);
    for (device, name) in plan.devices.iter_mut().zip(names) {
        device.name.clone_from(name);
    }
    plan
}

fn planned(count: usize) -> Event {
    Event::Planned(Box::new(plan_for(&devices(count))))
}

fn lost(index: usize) -> Event {
    Event::DeviceLost { device: name(index), since: 7, reason: "it hung up".into() }
}

fn loss(index: usize) -> Step {
    Step::RecordLoss { device: name(index), since: 7, reason: "it hung up".into() }
}

fn cut(epoch: u32, by: usize, peer: usize) -> Event {
    Event::LinkCut { epoch, reporter: name(by), peer: name(peer), since: 7, reason: "it hung up".into() }
}

fn returned(index: usize, rejoins: RejoinTime) -> Event {
    Event::DeviceReturned { device: name(index), rejoins }
}

fn ready(index: usize, epoch: u32) -> Event {
    Event::Ready { device: name(index), epoch }
}

fn prepared(index: usize, epoch: u32) -> Event {
    Event::Prepared { device: name(index), epoch }
}

fn replanned(missing: usize) -> Step {
    Step::Replanned { missing: Some(name(missing)) }
}

fn new(count: usize) -> Recovery {
    Recovery::new(Arc::new(plan_for(&devices(count))))
}

fn prepare_all(head: &mut Recovery, count: usize, epoch: u32) {
    for index in 1..count {
        head.react(prepared(index, epoch));
    }
}

fn running(count: usize) -> Recovery {
    let mut head = new(count);
    assert_eq!(head.react(Event::Start).first(), Some(&Step::Prepare { epoch: 1 }));
    prepare_all(&mut head, count, 1);
    assert!(!head.has_ever_run());
    let responses = (0..count).map(|index| head.react(ready(index, 1)));
    assert_eq!(responses.last(), Some(vec![Step::Begin { epoch: 1 }]));
    assert!(head.has_ever_run());
    assert_eq!(head, Recovery::with_running_ring(head.plan.clone()));
    head
}

#[test]
fn no_device_is_configured_before_all_are_prepared() {
    let mut head = new(3);
    assert_eq!(head.react(Event::Start), [Step::Prepare { epoch: 1 }]);
    assert_eq!(head.react(prepared(1, 1)), []);
    assert_eq!(head.react(prepared(1, 1)), [], "a duplicate response");
    assert_eq!(head.react(prepared(2, 1)), [Step::Configure { epoch: 1 }]);
}

#[test]
fn lost_device_is_excluded_from_the_next_plan() {
    let mut head = running(3);
    assert_eq!(head.react(lost(2)), [loss(2), Step::Plan]);
    assert_eq!(head.react(lost(2)), [], "the loss is known");
    assert_eq!(head.react(planned(2)), [replanned(2), Step::Prepare { epoch: 2 }]);
    assert_eq!(head.react(ready(1, 1)), [], "a late response");
    assert_eq!(head.react(lost(1)), [loss(1), Step::Plan]);
    assert_eq!(
        head.react(planned(1)),
        [replanned(1), Step::Prepare { epoch: 3 }, Step::Configure { epoch: 3 }],
        "a single device waits for no other"
    );
    assert_eq!(head.react(ready(0, 3)), [Step::Begin { epoch: 3 }]);
}

#[test]
fn one_cut_is_forgiven_and_the_next_loses_the_unreachable_device() {
    let mut head = running(3);
    assert_eq!(head.react(cut(1, 1, 2)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 2 }]);
    assert_eq!(head.react(cut(1, 1, 2)), [], "the other end reports the same cut");
    prepare_all(&mut head, 3, 2);
    assert_eq!(head.react(cut(2, 1, 2)), [loss(2), Step::Plan]);
    assert_eq!(head.unavailable_devices(), BTreeSet::from([name(2)]));
    let mut head = running(3);
    head.react(cut(1, 2, 0));
    prepare_all(&mut head, 3, 2);
    head.react(cut(2, 2, 0));
    assert_eq!(head.unavailable_devices(), BTreeSet::from([name(2)]), "the head is never treated as lost");
}

#[test]
fn returned_device_is_used_by_the_next_request() {
    let mut head = running(2);
    assert_eq!(head.react(Event::Request), [Step::Reset { epoch: 2 }]);
    head.react(lost(1));
    let give_up = head.react(Event::NoPlan { reason: "too little memory".into() });
    let [reason, again] = [(); 2].map(|()| "too little memory".to_owned());
    let not_replanned = Step::NotReplanned { missing: Some(name(1)), reason };
    assert_eq!(give_up, [not_replanned, Step::GiveUp { lost: "it hung up".into(), reason: again }]);
    head.react(returned(1, RejoinTime::NextRequest));
    assert_eq!(head.react(Event::Request), [Step::Plan]);
    assert_eq!(head.react(planned(2)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 3 }]);
}

#[test]
fn device_may_rejoin_between_tokens() {
    let mut head = running(3);
    head.react(lost(2));
    head.react(planned(2));
    prepare_all(&mut head, 2, 2);
    for index in 0..2 {
        head.react(ready(index, 2));
    }
    head.react(returned(2, RejoinTime::BetweenTokens));
    assert_eq!((head.is_ring_running(), head.unavailable_devices()), (true, BTreeSet::new()));
    let mut same = head.clone();
    assert_eq!(head.react(Event::Token), [Step::Plan]);
    assert_eq!(head.react(planned(3)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 3 }]);
    // The current ring continues if the new plan does not use the device, or if there is no plan.
    assert_eq!(same.react(Event::Token), [Step::Plan]);
    let mut none = same.clone();
    assert_eq!((same.react(planned(2)), same.is_ring_running()), (vec![], true));
    let reason = "too little memory".to_owned();
    let recorded = [Step::NotReplanned { missing: None, reason: reason.clone() }];
    assert_eq!((none.react(Event::NoPlan { reason }), none.is_ring_running()), (recorded.into(), true));
    assert_eq!(none.react(Event::Token), [], "there is no second attempt");
}

#[test]
fn lost_head_ends_the_ring_and_isolated_head_continues_alone() {
    let mut head = running(3);
    let mut alone = head.clone();
    let steps = head.react(lost(0));
    assert!(matches!(&steps[..], [Step::NotReplanned { .. }, Step::GiveUp { .. }]), "{steps:?}");
    let steps = alone.react(Event::HeadIsolated { since: 7, reason: "it hung up".into() });
    assert_eq!(steps, [loss(0), Step::Plan]);
    assert_eq!(alone.unavailable_devices(), BTreeSet::from([name(1), name(2)]));
    assert_eq!(alone.react(planned(1)).len(), 3);
}

#[test]
fn unusable_plans_are_rejected() {
    let other_head = BTreeSet::from(["d1".to_owned()]);
    for (plan, complaint) in
        [(plan_for(&devices(3)), "uses `d2`, which is unavailable"), (plan_for(&other_head), "would be `d1`")]
    {
        let mut head = running(3);
        head.react(lost(2));
        let steps = head.react(Event::Planned(Box::new(plan)));
        let Some(Step::GiveUp { reason, .. }) = steps.last() else { panic!("{steps:?}") };
        assert!(reason.contains(complaint), "{reason}");
    }
}

fn plan_for_available(head: &Recovery, count: usize) -> Event {
    let available = devices(count).difference(&head.unavailable_devices()).cloned().collect();
    Event::Planned(Box::new(plan_for(&available)))
}

proptest! {
    /// Applies random events, each with a kind, two devices, and the age of its epoch.
    #[test]
    fn epochs_begin_with_all_available_devices_and_retries_are_bounded(
        count in 1usize..6,
        events in proptest::collection::vec((0u8..8, 0usize..5, 0usize..5, 0u32..3), 0..200),
    ) {
        let mut head = new(count);
        let mut steps = head.react(Event::Start);
        let (mut prepared, mut ready) = (BTreeSet::new(), BTreeSet::new());
        let (mut last, mut since_token) = (0, 0);
        for (kind, one, other, back) in events {
            let mut queue = VecDeque::from(std::mem::take(&mut steps));
            while let Some(step) = queue.pop_front() {
                match step {
                    Step::Plan => queue = head.react(plan_for_available(&head, count)).into(),
                    Step::Prepare { epoch } => {
                        prop_assert!(epoch > last, "epochs go up");
                        (last, since_token) = (epoch, since_token + 1);
                        (prepared, ready) = (BTreeSet::new(), BTreeSet::new());
                    }
                    Step::Reset { epoch } => {
                        prop_assert!(epoch > last, "epochs go up");
                        (last, ready) = (epoch, BTreeSet::new());
                    }
                    Step::Configure { epoch } => {
                        prop_assert_eq!(epoch, last);
                        prop_assert_eq!(prepared.len() + 1, head.members.len());
                    }
                    Step::Begin { epoch } => {
                        prop_assert_eq!(epoch, last);
                        prop_assert_eq!(&ready, &head.members);
                        prop_assert!(head.members.is_disjoint(&head.unavailable_devices()));
                    }
                    Step::RecordLoss { device, .. } => prop_assert!(head.is_unavailable(&device)),
                    Step::Replanned { .. } => prop_assert_eq!(&names(&head.plan), &head.members),
                    Step::NotReplanned { .. } | Step::GiveUp { .. } => prop_assert!(false, "the head remains"),
                }
            }
            // One epoch for each loss, and one for the forgiven cut.
            prop_assert!(since_token <= count + 1, "{since_token} epochs without a token");
            let (one, other) = (one % count, other % count);
            let epoch = head.epoch().saturating_sub(back);
            let opened = head.connected.saturating_sub(back);
            let awaits = head.awaited_devices().contains(&name(one)) && epoch == head.epoch();
            let event = match kind {
                0 | 1 => self::prepared(one, epoch),
                2 | 3 => self::ready(one, epoch),
                4 if one != 0 => lost(one),
                5 if one != other => cut(opened, one, other),
                6 if head.is_ring_running() => { since_token = 0; Event::Token }
                7 if head.is_ring_running() => { since_token = 0; Event::Request }
                _ => continue,
            };
            let responses = match &event {
                Event::Prepared { .. } if awaits && head.phase == Phase::Preparing => Some(&mut prepared),
                Event::Ready { .. } if awaits && head.phase != Phase::Preparing => Some(&mut ready),
                _ => None,
            };
            if let Some(responses) = responses {
                responses.insert(name(one));
            }
            steps = head.react(event);
        }
    }

    /// Checks that simulator and executor lead to the same decisions. In the simulator all devices respond at once and
    /// are checked before planning. In the executor they respond one by one in any order, mixed with late responses.
    #[test]
    fn simulator_and_executor_decide_the_same(
        count in 2usize..6,
        incidents in proptest::collection::vec((0u8..6, 1usize..5), 0..20),
        order in any::<u64>(),
        plans in any::<u32>(),
    ) {
        let mut decided = [(); 2].map(|()| Vec::new());
        for (is_simulated, decided) in [true, false].into_iter().zip(&mut decided) {
            let mut head = Recovery::with_running_ring(Arc::new(plan_for(&devices(count))));
            let mut available = devices(count);
            let mut searches = 0u32;
            for &(kind, one) in &incidents {
                let one = one % count;
                if one == 0 { continue; }
                match kind {
                    0 | 1 => available.remove(&name(one)),
                    2 | 3 => available.insert(name(one)),
                    _ => false,
                };
                let event = match kind {
                    0 | 1 => lost(one),
                    2 => returned(one, RejoinTime::BetweenTokens),
                    3 => returned(one, RejoinTime::NextRequest),
                    _ => Event::Token,
                };
                let mut queue = VecDeque::from(head.react(event));
                while let Some(step) = queue.pop_front() {
                    let epoch = head.epoch();
                    let mut members: Vec<usize> = (0..count).filter(|&at| head.members.contains(&name(at))).collect();
                    if !is_simulated {
                        let by = order as usize % members.len();
                        members.rotate_left(by);
                    }
                    let responses = match &step {
                        Step::Prepare { .. } => members.iter().map(|&at| prepared(at, epoch)).collect(),
                        Step::Configure { .. } => members.iter().map(|&at| ready(at, epoch)).collect(),
                        Step::Plan => {
                            if is_simulated {
                                let absent: Vec<_> = devices(count).difference(&available).cloned().collect();
                                for device in absent {
                                    head.react(Event::DeviceAbsent { device });
                                }
                            }
                            searches += 1;
                            vec![if plans >> (searches % 32) & 1 == 1 {
                                plan_for_available(&head, count)
                            } else {
                                Event::NoPlan { reason: "no plan".into() }
                            }]
                        }
                        _ => vec![],
                    };
                    decided.push(step);
                    for response in responses {
                        if !is_simulated {
                            // A late response of an earlier epoch.
                            prop_assert_eq!(head.react(ready(0, epoch.saturating_sub(1))), []);
                        }
                        queue.extend(head.react(response));
                    }
                }
            }
        }
        prop_assert_eq!(&decided[0], &decided[1]);
    }
}

#[test]
fn changed_conditions_lead_to_another_plan_only_if_it_differs() {
    let mut head = running(3);
    assert_eq!(head.react(Event::ConditionsChanged), [Step::Plan]);
    assert_eq!(head.react(planned(3)), [], "the same plan");
    assert!(head.is_ring_running());
    // A device has returned, and the requests do not wait for it to be idle.
    head.react(lost(2));
    head.react(planned(2));
    prepare_all(&mut head, 2, 2);
    (0..2).for_each(|index| drop(head.react(ready(index, 2))));
    head.react(returned(2, RejoinTime::NextRequest));
    assert!(head.must_plan());
    assert_eq!(head.react(Event::ConditionsChanged), [Step::Plan]);
    let steps = head.react(planned(3));
    assert_eq!(steps, [Step::Replanned { missing: None }, Step::Prepare { epoch: 3 }]);
    assert!(head.react(Event::ConditionsChanged).is_empty(), "the ring is not running");
    prepare_all(&mut head, 3, 3);
    (0..3).for_each(|index| drop(head.react(ready(index, 3))));
    assert!(head.is_ring_running() && !head.must_plan());
}
