//! The terms of the time per token in a tensor-parallel run.
//!
//! A token goes through one block after another, and an all-reduce ends each block. On the head's clock a block lasts
//! from the end of the previous block to the head's last step of this block. The steps of the device that finishes
//! last are counted in the terms `cpu`, `gpu`, `memory`, `demand_disk` and `queue`, as far as they lie within the
//! block. The rest of the block is `network`: messages in flight, and waiting for them. All steps use one clock,
//! because runs of this kind are only simulated.

use std::collections::BTreeMap;

use super::token_times::DecodeStep;
use super::{ByPass, Terms, add_share, charge, millis, records_of};
use hearth_schema::trace::{StepKind, StepRecord};

/// Returns the terms of one decode step of a tensor-parallel run, in milliseconds.
pub(super) fn decompose(by_pass: &ByPass<'_>, token: &DecodeStep, devices: usize) -> Terms {
    let mut terms = Terms::default();
    let steps = |device: usize| records_of(by_pass, token.batch, device as u16);
    let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
    let mut from = token.start_ns;
    for record in steps(0) {
        match record.kind {
            StepKind::Embed | StepKind::Output => charge(&mut terms, record),
            StepKind::Compute | StepKind::Copy | StepKind::Receive => {
                let end = ends.entry(record.round).or_insert(record.end_ns);
                *end = (*end).max(record.end_ns);
            }
            // Only a SoC that runs alone has the last three kinds; it has no slices.
            StepKind::Send
            | StepKind::Prefetch
            | StepKind::Draft
            | StepKind::Kernel
            | StepKind::Synchronise
            | StepKind::Prepare => {}
        }
        if record.kind == StepKind::Embed {
            from = from.max(record.end_ns);
        }
    }
    let mut work: BTreeMap<u32, Vec<Vec<&StepRecord>>> = BTreeMap::new();
    for device in 0..devices {
        for record in steps(device).filter(|record| is_block(record)) {
            work.entry(record.round).or_insert_with(|| vec![Vec::new(); devices])[device].push(record);
        }
    }
    // The time at which a device finished a block.
    let end_of = |steps: &&Vec<&StepRecord>| steps.iter().map(|record| record.end_ns).max().unwrap_or(0);
    for (round, end) in ends {
        let block = [from, end.max(from)];
        let last = work.get(&round).and_then(|devices| devices.iter().max_by_key(end_of));
        let mut inside = 0.0;
        for record in last.into_iter().flatten() {
            inside += charge_inside(&mut terms, record, block);
        }
        terms.network += (millis(block[1] - block[0]) - inside).max(0.0);
        from = block[1];
    }
    terms.queue += (millis(token.duration_ns()) - terms.sum()).max(0.0);
    terms.bubble = millis(token.duration_ns()) - terms.sum();
    terms
}

/// Whether a record is a computation or a copy within a block (attention or feed-forward), not embedding or output.
fn is_block(record: &StepRecord) -> bool {
    record.is_processor_work() && !matches!(record.kind, StepKind::Embed | StepKind::Output)
}

/// Adds a step's time to the terms, scaled to the part of the step within `span` (start and end in ns).
/// Returns the duration of this part in milliseconds.
fn charge_inside(terms: &mut Terms, record: &StepRecord, span: [u64; 2]) -> f64 {
    let inside = record.end_ns.min(span[1]).saturating_sub(record.start_ns.max(span[0]));
    if inside == 0 {
        return 0.0;
    }
    let mut whole = Terms::default();
    charge(&mut whole, record);
    add_share(terms, &whole, inside as f64 / record.duration_ns().max(1) as f64);
    millis(inside)
}
