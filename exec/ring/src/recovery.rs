//! What does a head make of what it hears of its ring?
//!
//! A pure reducer, `(state, event) -> (state, steps)`, without a clock and a socket. A ring comes up in two steps, so
//! that nobody sends to a device that still serves an earlier ring: all prepare for an epoch, which gives up what was
//! under way, and only when the last is prepared they are given the plan and connect. When all are ready, passes may
//! begin. Each request and each new ring is an epoch of its own; answers of an earlier one count for nothing.
//!
//! A device that is gone stays gone until the next request, and the head plans without it. A cut between two devices
//! that are both there may be one broken connection: the same ring tries once more. If it is cut again before a token
//! is out, the device that could not be reached counts as gone. So between two tokens there are at most as many
//! epochs as devices and cuts that were forgiven, and no sequence of failures makes a head try for ever.
//!
//! Not here: who plans, and how steps are carried out (`renewal`); which pass enters
//! (`hearth_core::schedule::Generation`).

use std::collections::BTreeSet;

/// What is heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// There is a plan with these devices, the head among them.
    Planned(BTreeSet<String>),
    /// There is no plan for the devices that are there.
    NoPlan,
    /// A device has prepared for an epoch.
    Prepared {
        /// Which.
        name: String,
        /// For which epoch.
        epoch: u32,
    },
    /// A device is ready for the passes of an epoch.
    Ready {
        /// Which.
        name: String,
        /// For which epoch.
        epoch: u32,
    },
    /// A device is gone.
    Gone {
        /// Which.
        name: String,
    },
    /// Two devices cannot exchange activations.
    Cut {
        /// The epoch that their connection was opened for.
        epoch: u32,
        /// Who says so.
        by: String,
        /// Whom it cannot reach.
        peer: String,
    },
    /// A token is out.
    Token,
    /// A request begins.
    Request,
    /// A device that was gone is there again. Only before a request.
    Back {
        /// Which.
        name: String,
    },
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Plan for the devices that are there. [`Event::Planned`] or [`Event::NoPlan`] answers.
    Plan,
    /// Have all devices of the plan prepare for this epoch.
    Prepare {
        /// The epoch.
        epoch: u32,
    },
    /// Give all devices, this one too, the plan of this epoch.
    Configure {
        /// The epoch.
        epoch: u32,
    },
    /// Have all devices, this one too, forget the request before.
    Reset {
        /// The new request's epoch.
        epoch: u32,
    },
    /// Passes may begin.
    Begin {
        /// The epoch.
        epoch: u32,
    },
    /// It cannot go on.
    GiveUp,
}

/// How far a ring is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No plan is at work.
    Planning,
    Preparing,
    Configuring,
    Resetting,
    Running,
    /// It cannot go on with this request.
    Over,
}

/// The head's view of its ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovery {
    head: String,
    members: BTreeSet<String>,
    gone: BTreeSet<String>,
    /// Those whose answer is missing.
    awaited: BTreeSet<String>,
    epoch: u32,
    /// The epoch that the connections at work were opened for.
    connected: u32,
    phase: Phase,
    /// Cuts since the last token.
    cuts: u32,
}

/// Cuts between two tokens for which no device is given up.
/// source: assumed, one connection may break by itself
const FORGIVEN_CUTS: u32 = 1;

impl Recovery {
    /// A head without a ring.
    pub fn new(head: &str) -> Self {
        Self {
            head: head.into(),
            members: BTreeSet::new(),
            gone: BTreeSet::new(),
            awaited: BTreeSet::new(),
            epoch: 0,
            connected: 0,
            phase: Phase::Planning,
            cuts: 0,
        }
    }

    /// Takes an event and tells what to do, in order.
    pub fn react(&mut self, event: Event) -> Vec<Step> {
        match event {
            Event::Planned(members) => self.planned(members),
            Event::NoPlan => self.give_up(),
            Event::Prepared { name, epoch } => self.answered(Phase::Preparing, &name, epoch),
            Event::Ready { name, epoch } if self.phase == Phase::Resetting => {
                self.answered(Phase::Resetting, &name, epoch)
            }
            Event::Ready { name, epoch } => self.answered(Phase::Configuring, &name, epoch),
            Event::Gone { name } => self.lose(name),
            Event::Cut { epoch, by, peer } => self.cut(epoch, by, peer),
            Event::Token => {
                self.cuts = 0;
                vec![]
            }
            Event::Request => self.request(),
            Event::Back { name } => {
                if self.gone.remove(&name) {
                    // The plan at work was made without it.
                    self.phase = Phase::Planning;
                }
                vec![]
            }
        }
    }

    /// The epoch at work.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether passes may begin.
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Devices that are gone.
    pub fn gone(&self) -> &BTreeSet<String> {
        &self.gone
    }

    /// Devices whose answer is missing.
    pub fn awaited(&self) -> &BTreeSet<String> {
        &self.awaited
    }

    fn planned(&mut self, members: BTreeSet<String>) -> Vec<Step> {
        if self.phase != Phase::Planning {
            return vec![];
        }
        if !members.contains(&self.head) || !members.is_disjoint(&self.gone) {
            // A planner that plans with those who are gone would be asked for ever.
            return self.give_up();
        }
        self.members = members;
        self.prepare()
    }

    fn prepare(&mut self) -> Vec<Step> {
        self.epoch += 1;
        self.connected = self.epoch;
        self.phase = Phase::Preparing;
        self.awaited = self.members.iter().filter(|&name| *name != self.head).cloned().collect();
        let mut steps = vec![Step::Prepare { epoch: self.epoch }];
        steps.extend(self.advance());
        steps
    }

    /// What follows when the last answer is there.
    fn advance(&mut self) -> Vec<Step> {
        if !self.awaited.is_empty() {
            return vec![];
        }
        let epoch = self.epoch;
        if self.phase == Phase::Preparing {
            self.phase = Phase::Configuring;
            self.awaited = self.members.clone();
            return vec![Step::Configure { epoch }];
        }
        self.phase = Phase::Running;
        vec![Step::Begin { epoch }]
    }

    fn answered(&mut self, phase: Phase, name: &str, epoch: u32) -> Vec<Step> {
        if self.phase != phase || self.epoch != epoch || !self.awaited.remove(name) {
            return vec![];
        }
        self.advance()
    }

    fn lose(&mut self, name: String) -> Vec<Step> {
        let is_member = self.members.remove(&name);
        self.awaited.remove(&name);
        self.gone.insert(name);
        match self.phase {
            Phase::Preparing | Phase::Configuring | Phase::Resetting | Phase::Running if is_member => {
                self.phase = Phase::Planning;
                vec![Step::Plan]
            }
            _ => vec![],
        }
    }

    fn cut(&mut self, epoch: u32, by: String, peer: String) -> Vec<Step> {
        let at_work = matches!(self.phase, Phase::Configuring | Phase::Resetting | Phase::Running);
        if !at_work || epoch != self.connected || !self.members.contains(&by) || !self.members.contains(&peer)
        {
            return vec![];
        }
        self.cuts += 1;
        if self.cuts <= FORGIVEN_CUTS {
            return self.prepare();
        }
        self.lose(if peer == self.head { by } else { peer })
    }

    fn request(&mut self) -> Vec<Step> {
        self.cuts = 0;
        if self.phase != Phase::Running {
            self.phase = Phase::Planning;
            return vec![Step::Plan];
        }
        self.epoch += 1;
        self.phase = Phase::Resetting;
        self.awaited = self.members.clone();
        vec![Step::Reset { epoch: self.epoch }]
    }

    fn give_up(&mut self) -> Vec<Step> {
        self.phase = Phase::Over;
        self.awaited.clear();
        vec![Step::GiveUp]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn names(count: usize) -> BTreeSet<String> {
        (0..count).map(|index| format!("d{index}")).collect()
    }

    fn name(index: usize) -> String {
        format!("d{index}")
    }

    /// A head whose ring of so many devices runs.
    fn running(count: usize) -> Recovery {
        let mut head = Recovery::new("d0");
        assert_eq!(
            head.react(Event::Planned(names(count))).first(),
            Some(&Step::Prepare { epoch: 1 }),
            "a ring begins with its first epoch"
        );
        for index in 1..count {
            head.react(Event::Prepared { name: name(index), epoch: 1 });
        }
        let answers = (0..count).map(|index| head.react(Event::Ready { name: name(index), epoch: 1 }));
        assert_eq!(answers.last(), Some(vec![Step::Begin { epoch: 1 }]));
        head
    }

    #[test]
    fn nobody_is_configured_before_all_are_prepared() {
        let mut head = Recovery::new("d0");
        assert_eq!(head.react(Event::Planned(names(3))), [Step::Prepare { epoch: 1 }]);
        assert_eq!(head.react(Event::Prepared { name: name(1), epoch: 1 }), []);
        assert_eq!(head.react(Event::Prepared { name: name(1), epoch: 1 }), [], "once is enough");
        assert_eq!(head.react(Event::Prepared { name: name(2), epoch: 1 }), [Step::Configure { epoch: 1 }]);
    }

    #[test]
    fn a_device_that_is_gone_is_planned_without() {
        let mut head = running(3);
        assert_eq!(head.react(Event::Gone { name: name(2) }), [Step::Plan]);
        assert_eq!(head.react(Event::Gone { name: name(2) }), [], "it is known");
        assert_eq!(head.react(Event::Planned(names(2))), [Step::Prepare { epoch: 2 }]);
        assert_eq!(head.react(Event::Ready { name: name(1), epoch: 1 }), [], "a late answer");
        assert_eq!(head.react(Event::Gone { name: name(1) }), [Step::Plan]);
        assert_eq!(
            head.react(Event::Planned(names(1))),
            [Step::Prepare { epoch: 3 }, Step::Configure { epoch: 3 }],
            "alone it need not wait"
        );
        assert_eq!(head.react(Event::Ready { name: name(0), epoch: 3 }), [Step::Begin { epoch: 3 }]);
    }

    #[test]
    fn one_cut_is_forgiven_and_the_next_costs_the_one_who_cannot_be_reached() {
        let mut head = running(3);
        let cut = |epoch| Event::Cut { epoch, by: name(1), peer: name(2) };
        assert_eq!(head.react(cut(1)), [Step::Prepare { epoch: 2 }]);
        assert_eq!(head.react(cut(1)), [], "the other end says so too");
        for index in 1..3 {
            head.react(Event::Prepared { name: name(index), epoch: 2 });
        }
        assert_eq!(head.react(cut(2)), [Step::Plan]);
        assert_eq!(head.gone(), &BTreeSet::from([name(2)]));
        let mut head = running(3);
        head.react(Event::Cut { epoch: 1, by: name(2), peer: name(0) });
        for index in 1..3 {
            head.react(Event::Prepared { name: name(index), epoch: 2 });
        }
        head.react(Event::Cut { epoch: 2, by: name(2), peer: name(0) });
        assert_eq!(head.gone(), &BTreeSet::from([name(2)]), "the head cannot leave");
    }

    #[test]
    fn a_request_takes_in_who_is_back() {
        let mut head = running(2);
        assert_eq!(head.react(Event::Request), [Step::Reset { epoch: 2 }]);
        head.react(Event::Gone { name: name(1) });
        assert_eq!(head.react(Event::NoPlan), [Step::GiveUp]);
        head.react(Event::Back { name: name(1) });
        assert_eq!(head.react(Event::Request), [Step::Plan]);
        assert_eq!(head.react(Event::Planned(names(2))), [Step::Prepare { epoch: 3 }]);
    }

    /// What a world may do to a head with up to five devices.
    fn event() -> impl Strategy<Value = (u8, usize, usize, u32)> {
        (0u8..8, 0usize..5, 0usize..5, 0u32..3)
    }

    proptest! {
        #[test]
        fn it_begins_only_with_all_who_are_there_and_never_tries_for_ever(
            count in 1usize..6, events in proptest::collection::vec(event(), 0..200)
        ) {
            let mut head = Recovery::new("d0");
            let mut steps = head.react(Event::Planned(names(count)));
            let (mut prepared, mut ready) = (BTreeSet::new(), BTreeSet::new());
            let (mut last, mut since_token) = (0, 0);
            for (kind, one, other, back) in events {
                let mut queue = VecDeque::from(std::mem::take(&mut steps));
                while let Some(step) = queue.pop_front() {
                    match step {
                        Step::Plan => {
                            let there = names(count).difference(head.gone()).cloned().collect();
                            queue = head.react(Event::Planned(there)).into();
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
                            prop_assert!(head.members.is_disjoint(head.gone()));
                        }
                        Step::GiveUp => prop_assert!(head.gone().contains("d0"), "there is always the head"),
                    }
                }
                // A loss each, and a cut that is forgiven.
                prop_assert!(since_token <= count + 1, "{since_token} epochs without a token");
                let (one, other) = (name(one % count), name(other % count));
                let epoch = head.epoch().saturating_sub(back);
                let opened = head.connected.saturating_sub(back);
                let awaits = head.awaited().contains(&one) && epoch == head.epoch();
                let event = match kind {
                    0 | 1 => Event::Prepared { name: one.clone(), epoch },
                    2 | 3 => Event::Ready { name: one.clone(), epoch },
                    4 if one != "d0" => Event::Gone { name: one.clone() },
                    5 if one != other => Event::Cut { epoch: opened, by: one.clone(), peer: other },
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
                    answers.insert(one);
                }
                steps = head.react(event);
            }
        }
    }
}
