//! Tests of the recovery: unit cases, and properties over random sequences of events.

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

/// A plan for these devices, each with one layer, of a ring with as many rounds as it takes.
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

fn missed(index: usize) -> Step {
    Step::Missed { device: name(index), since: 7, reason: "it hung up".into() }
}

fn cut(epoch: u32, by: usize, peer: usize) -> Event {
    Event::LinkCut { epoch, by: name(by), peer: name(peer), since: 7, reason: "it hung up".into() }
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

/// A head that has not brought up its ring of `count` devices yet.
fn new(count: usize) -> Recovery {
    Recovery::new(Arc::new(plan_for(&devices(count))))
}

/// A head whose ring of `count` devices runs.
fn running(count: usize) -> Recovery {
    let mut head = new(count);
    assert_eq!(head.react(Event::Start).first(), Some(&Step::Prepare { epoch: 1 }));
    for index in 1..count {
        head.react(prepared(index, 1));
    }
    assert!(!head.has_begun());
    let answers = (0..count).map(|index| head.react(ready(index, 1)));
    assert_eq!(answers.last(), Some(vec![Step::Begin { epoch: 1 }]));
    assert!(head.has_begun());
    assert_eq!(head, Recovery::running(head.plan.clone()));
    head
}

#[test]
fn no_device_is_configured_before_all_are_prepared() {
    let mut head = new(3);
    assert_eq!(head.react(Event::Start), [Step::Prepare { epoch: 1 }]);
    assert_eq!(head.react(prepared(1, 1)), []);
    assert_eq!(head.react(prepared(1, 1)), [], "once is enough");
    assert_eq!(head.react(prepared(2, 1)), [Step::Configure { epoch: 1 }]);
}

#[test]
fn lost_device_is_planned_without() {
    let mut head = running(3);
    assert_eq!(head.react(lost(2)), [missed(2), Step::Plan]);
    assert_eq!(head.react(lost(2)), [], "it is known");
    assert_eq!(head.react(planned(2)), [replanned(2), Step::Prepare { epoch: 2 }]);
    assert_eq!(head.react(ready(1, 1)), [], "a late answer");
    assert_eq!(head.react(lost(1)), [missed(1), Step::Plan]);
    assert_eq!(
        head.react(planned(1)),
        [replanned(1), Step::Prepare { epoch: 3 }, Step::Configure { epoch: 3 }],
        "alone it need not wait"
    );
    assert_eq!(head.react(ready(0, 3)), [Step::Begin { epoch: 3 }]);
}

#[test]
fn one_cut_is_forgiven_and_the_next_loses_the_unreachable_device() {
    let mut head = running(3);
    assert_eq!(head.react(cut(1, 1, 2)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 2 }]);
    assert_eq!(head.react(cut(1, 1, 2)), [], "the other end says so too");
    for index in 1..3 {
        head.react(prepared(index, 2));
    }
    assert_eq!(head.react(cut(2, 1, 2)), [missed(2), Step::Plan]);
    assert_eq!(head.gone(), BTreeSet::from([name(2)]));
    let mut head = running(3);
    head.react(cut(1, 2, 0));
    for index in 1..3 {
        head.react(prepared(index, 2));
    }
    head.react(cut(2, 2, 0));
    assert_eq!(head.gone(), BTreeSet::from([name(2)]), "the head cannot leave");
}

#[test]
fn request_takes_returned_device_in() {
    let mut head = running(2);
    assert_eq!(head.react(Event::Request), [Step::Reset { epoch: 2 }]);
    head.react(lost(1));
    let give_up = head.react(Event::NoPlan { reason: "too little memory".into() });
    let (missing, reason) = (Some(name(1)), "too little memory".to_owned());
    let lost = "it hung up".into();
    assert_eq!(
        give_up,
        [Step::NotReplanned { missing, reason: reason.clone() }, Step::GiveUp { lost, reason }]
    );
    head.react(Event::DeviceReturned { device: name(1), rejoins: Return::NextRequest });
    assert_eq!(head.react(Event::Request), [Step::Plan]);
    assert_eq!(head.react(planned(2)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 3 }]);
}

#[test]
fn device_may_rejoin_between_tokens() {
    let mut head = running(3);
    head.react(lost(2));
    head.react(planned(2));
    head.react(prepared(1, 2));
    for index in 0..2 {
        head.react(ready(index, 2));
    }
    head.react(Event::DeviceReturned { device: name(2), rejoins: Return::BetweenTokens });
    assert_eq!((head.is_running(), head.gone()), (true, BTreeSet::new()));
    let mut same = head.clone();
    assert_eq!(head.react(Event::Token), [Step::Plan]);
    assert_eq!(head.react(planned(3)), [Step::Replanned { missing: None }, Step::Prepare { epoch: 3 }]);
    // The current ring continues if the planner does without the device, or has no plan with it.
    assert_eq!(same.react(Event::Token), [Step::Plan]);
    let mut none = same.clone();
    assert_eq!((same.react(planned(2)), same.is_running()), (vec![], true));
    let reason = "too little memory".to_owned();
    let recorded = [Step::NotReplanned { missing: None, reason: reason.clone() }];
    assert_eq!((none.react(Event::NoPlan { reason }), none.is_running()), (recorded.into(), true));
    assert_eq!(none.react(Event::Token), [], "it is tried once");
}

#[test]
fn head_that_is_lost_ends_the_ring_and_one_that_is_isolated_goes_on_alone() {
    let mut head = running(3);
    let mut alone = head.clone();
    let steps = head.react(lost(0));
    assert!(matches!(&steps[..], [Step::NotReplanned { .. }, Step::GiveUp { .. }]), "{steps:?}");
    let steps = alone.react(Event::HeadIsolated { since: 7, reason: "it hung up".into() });
    assert_eq!(steps, [missed(0), Step::Plan]);
    assert_eq!(alone.gone(), BTreeSet::from([name(1), name(2)]));
    assert_eq!(alone.react(planned(1)).len(), 3);
}

#[test]
fn unusable_plans_are_refused() {
    let other_head = BTreeSet::from(["d1".to_owned()]);
    for (plan, complaint) in
        [(plan_for(&devices(3)), "uses `d2`, which is gone"), (plan_for(&other_head), "would be `d1`")]
    {
        let mut head = running(3);
        head.react(lost(2));
        let steps = head.react(Event::Planned(Box::new(plan)));
        let Some(Step::GiveUp { reason, .. }) = steps.last() else { panic!("{steps:?}") };
        assert!(reason.contains(complaint), "{reason}");
    }
}

/// What may happen to a head with up to five devices.
fn event() -> impl Strategy<Value = (u8, usize, usize, u32)> {
    (0u8..8, 0usize..5, 0usize..5, 0u32..3)
}

proptest! {
    #[test]
    fn it_begins_only_with_all_who_are_there_and_never_tries_for_ever(
        count in 1usize..6, events in proptest::collection::vec(event(), 0..200)
    ) {
        let mut head = new(count);
        let mut steps = head.react(Event::Start);
        let (mut prepared, mut ready) = (BTreeSet::new(), BTreeSet::new());
        let (mut last, mut since_token) = (0, 0);
        for (kind, one, other, back) in events {
            let mut queue = VecDeque::from(std::mem::take(&mut steps));
            while let Some(step) = queue.pop_front() {
                match step {
                    Step::Plan => {
                        let there = devices(count).difference(&head.gone()).cloned().collect();
                        queue = head.react(Event::Planned(Box::new(plan_for(&there)))).into();
                    }
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
                        prop_assert!(head.members.is_disjoint(&head.gone()));
                    }
                    Step::Missed { device, .. } => prop_assert!(head.is_gone(&device)),
                    Step::Replanned { .. } => prop_assert_eq!(&names(&head.plan), &head.members),
                    Step::NotReplanned { .. } | Step::GiveUp { .. } => prop_assert!(false, "there is always the head"),
                }
            }
            // One for each loss, and one for the cut that is forgiven.
            prop_assert!(since_token <= count + 1, "{since_token} epochs without a token");
            let (one, other) = (one % count, other % count);
            let epoch = head.epoch().saturating_sub(back);
            let opened = head.connected.saturating_sub(back);
            let awaits = head.awaited().contains(&name(one)) && epoch == head.epoch();
            let event = match kind {
                0 | 1 => self::prepared(one, epoch),
                2 | 3 => self::ready(one, epoch),
                4 if one != 0 => lost(one),
                5 if one != other => cut(opened, one, other),
                6 if head.is_running() => { since_token = 0; Event::Token }
                7 if head.is_running() => { since_token = 0; Event::Request }
                _ => continue,
            };
            let answers = match &event {
                Event::Prepared { .. } if awaits && head.phase == Phase::Preparing => Some(&mut prepared),
                Event::Ready { .. } if awaits && head.phase != Phase::Preparing => Some(&mut ready),
                _ => None,
            };
            if let Some(answers) = answers {
                answers.insert(name(one));
            }
            steps = head.react(event);
        }
    }

    /// The simulator answers for all devices at once, and asks all of them before it plans. The executor's devices
    /// answer one by one and in any order, late answers between them. Both decide the same.
    #[test]
    fn simulator_and_executor_decide_the_same(
        count in 2usize..6,
        incidents in proptest::collection::vec((0u8..6, 1usize..5), 0..20),
        order in any::<u64>(),
        plans in any::<u32>(),
    ) {
        let mut decided = [(); 2].map(|()| Vec::new());
        for (is_simulated, decided) in [true, false].into_iter().zip(&mut decided) {
            let mut head = Recovery::running(Arc::new(plan_for(&devices(count))));
            let mut there = devices(count);
            let mut asked = 0u32;
            for &(kind, one) in &incidents {
                let one = name(one % count.max(2)).clone();
                if one == "d0" { continue; }
                let event = match kind {
                    0 | 1 => {
                        there.remove(&one);
                        Event::DeviceLost { device: one, since: 0, reason: "silent".into() }
                    }
                    2 => {
                        there.insert(one.clone());
                        Event::DeviceReturned { device: one, rejoins: Return::BetweenTokens }
                    }
                    3 => {
                        there.insert(one.clone());
                        Event::DeviceReturned { device: one, rejoins: Return::NextRequest }
                    }
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
                    let answers = match &step {
                        Step::Prepare { .. } => members.iter().map(|&at| prepared(at, epoch)).collect(),
                        Step::Configure { .. } => members.iter().map(|&at| ready(at, epoch)).collect(),
                        Step::Plan => {
                            if is_simulated {
                                let absent = devices(count).difference(&there).cloned().collect::<Vec<_>>();
                                for device in absent {
                                    head.react(Event::DeviceAbsent { device });
                                }
                            }
                            asked += 1;
                            vec![if plans >> (asked % 32) & 1 == 1 {
                                Event::Planned(Box::new(plan_for(&devices(count).difference(&head.gone()).cloned().collect())))
                            } else {
                                Event::NoPlan { reason: "no plan".into() }
                            }]
                        }
                        _ => vec![],
                    };
                    decided.push(step);
                    for answer in answers {
                        if !is_simulated {
                            // A late answer of an earlier epoch.
                            prop_assert_eq!(head.react(ready(0, epoch.saturating_sub(1))), []);
                        }
                        queue.extend(head.react(answer));
                    }
                }
            }
        }
        prop_assert_eq!(&decided[0], &decided[1]);
    }
}
