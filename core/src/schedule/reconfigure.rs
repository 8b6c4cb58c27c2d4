//! Reconfiguration: a device switches to a new plan during a run.
//!
//! The device drops its passes in flight, rejects messages of earlier passes from then on, and begins the next passes
//! with an empty KV cache. The event results in no steps: the device waits for the first message of the new
//! ring. The simulator or the executor has to load the weights of the device's new layers.

use std::sync::Arc;

use hearth_profiles::Document;

use super::{Schedule, ScheduleError};
use hearth_schema::plan::Plan;

impl Schedule {
    /// Switches to a new plan for the passes from index `first_pass` on. On an error the state is unchanged.
    pub(super) fn reconfigure(&mut self, plan: &Arc<Plan>, first_pass: u32) -> Result<(), ScheduleError> {
        let reject = |what: String| Err(ScheduleError::IncompatiblePlan { device: self.name(), what });
        if let Err(error) = plan.validate() {
            return reject(error.message());
        }
        let (old, new) = (&self.plan, plan.as_ref());
        let Some(device) = new.device_index(&self.name()) else {
            return reject("the new plan does not use the device".into());
        };
        let (head, own) = (&new.devices[0].name, &old.devices[0].name);
        if head != own {
            return reject(format!("its head would be `{head}`, but the generated tokens are on `{own}`"));
        }
        let shape = |plan: &Plan| (plan.model.shape_digest.clone(), plan.model.layers);
        if shape(new) != shape(old)
            || (new.context_length, new.kv_cache_format) != (old.context_length, old.kv_cache_format)
        {
            return reject("its model, context or KV cache format differs".into());
        }
        if new.activation_format != old.activation_format {
            return reject(
                "it sends activations in a different format, which would change the results".into(),
            );
        }
        if new.sequences != old.sequences {
            return reject("its number of sequences differs".into());
        }
        if new.draft_model.is_some() != old.draft_model.is_some() {
            return reject("only one of the two plans has a draft model".into());
        }
        if first_pass < self.first_pass {
            return reject(format!(
                "it begins at pass {first_pass}, before the first pass of the current plan"
            ));
        }
        let can_truncate = self.can_truncate;
        *self = Schedule { first_pass, can_truncate, ..Schedule::new(plan.clone(), device) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::super::{Event, Pass, Step};
    use super::*;

    fn pass(index: u32) -> Pass {
        Pass::new(index, index, 1, true)
    }

    #[test]
    fn unfinished_passes_are_dropped() {
        let (old, new) = (Arc::new(plan(8, &[2, 2, 4], false)), Arc::new(plan(8, &[5, 3], false)));
        let mut worker = Schedule::new(old, 1);
        worker.react(&Event::Arrived { batch: pass(0).into(), round: 0 }).expect("the first round");
        assert_eq!(worker.react(&Event::Replanned { plan: new, first_pass: 1 }), Ok(vec![]));
        let late = worker.react(&Event::Arrived { batch: pass(0).into(), round: 0 });
        assert!(matches!(late, Err(ScheduleError::DroppedPass { pass: 0, since: 1, .. })), "{late:?}");
        let steps =
            worker.react(&Event::Arrived { batch: pass(1).into(), round: 0 }).expect("the first new pass");
        assert!(matches!(&steps[0], Step::Compute { layers, .. } if *layers == (5..8)), "{steps:?}");
        assert!(matches!(steps[1], Step::Send { receiver: 0, next_round: 1, .. }), "{steps:?}");
    }

    #[test]
    fn rejected_plan_changes_nothing() {
        let old = plan(8, &[2, 2, 4], false);
        let mut last = Schedule::new(Arc::new(old.clone()), 2);
        let [mut other_model, mut other_head] = [(); 2].map(|()| old.clone());
        other_model.model.shape_digest = "shape:1".into();
        other_head.devices[0].name = "somebody".into();
        let before = last.clone();
        for (plan, complaint) in [
            (plan(8, &[5, 3], false), "does not use the device"),
            (other_model, "its model"),
            (other_head, "the generated tokens are on `d0`"),
            (Plan { rounds: 3, ..old.clone() }, "rounds"),
            (Plan { sequences: 2, ..old }, "number of sequences"),
        ] {
            let rejected = last.react(&Event::Replanned { plan: Arc::new(plan), first_pass: 1 });
            let text = rejected.expect_err("incompatible").to_string();
            assert!(text.contains(complaint), "{text}");
            assert_eq!(last, before);
        }
    }
}
