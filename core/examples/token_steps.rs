//! Prints the steps in which a ring of three devices computes one token.
//!
//! `cargo run -p hearth-core --example token_steps`: a model of 8 layers on three devices with windows of 2, 2 and 1
//! layers, which makes two rounds, the last of them partial. One token goes around the ring, message by message.

use std::sync::Arc;

use hearth_core::schedule::{Event, Schedule, Step};
use hearth_profiles::Document;
use hearth_schema::Plan;
use hearth_schema::pass::Pass;

const PLAN: &str = "schema: plan/1
scenario: {name: example, digest: 'sha256:0'}
model: {name: eight-layers, shape_digest: 'shape:0', layers: 8}
planner: {strategy: manual}
rounds: 2
context: 64
kv_cache: f16
devices:
- {name: desktop, role: head, window: 2, gpu_layers: 0, residency: {policy: os}}
- {name: laptop, role: worker, window: 2, gpu_layers: 1, residency: {policy: os}}
- {name: phone, role: worker, window: 1, gpu_layers: 0, residency: {policy: windowed, prefetch: false}}
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let plan = Arc::new(Plan::from_yaml(PLAN)?);
    let mut ring: Vec<_> = (0..plan.devices.len()).map(|index| Schedule::new(plan.clone(), index)).collect();
    let mut next = Some((0, Event::Begin(Pass::new(0, 0, 1, true).into())));
    while let Some((index, event)) = next.take() {
        for step in ring[index].react(&event)? {
            println!("{:<8} {}", plan.devices[index].name, description(&plan, &step));
            if let Step::Send { batch, next_round, receiver, .. } = step {
                next = Some((receiver, Event::Arrived { batch, round: next_round }));
            }
        }
    }
    Ok(())
}

fn description(plan: &Plan, step: &Step) -> String {
    match step {
        Step::Draft { pass, .. } => format!("drafts {} tokens", pass.drafted),
        Step::Embed { .. } => "embeds the token".into(),
        Step::Compute { layers, processor, round, .. } => {
            format!("computes layers {}..{} on {processor:?}, round {round}", layers.start, layers.end)
        }
        Step::Output { .. } => "computes the logits and samples".into(),
        Step::Send { receiver, .. } => format!("sends to {}", plan.devices[*receiver].name),
        Step::Prefetch { part, .. } => format!("starts to prefetch {part:?}"),
        Step::Release { part, .. } => format!("releases {part:?}"),
    }
}
