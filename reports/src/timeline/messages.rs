//! Messages of a trace: matches each `send` record with its `receive` record.
//!
//! Messages of one pass between two devices arrive in the order in which they were sent, so the first `receive`
//! belongs to the first `send`. A `send` without a peer is matched with the first unmatched `receive` on another
//! device that ended after the `send` began.
//!
//! Not here: durations of messages, because the clocks of a measured trace are only approximately synchronised.

use std::collections::BTreeMap;

use hearth_schema::trace::{StepKind, StepRecord};

/// Returns the messages among `records` as the indices of their `send` and `receive` records, in the order in which
/// they were sent.
pub fn find_messages(records: &[StepRecord]) -> Vec<[usize; 2]> {
    let mut by_pass: BTreeMap<u32, [Vec<usize>; 2]> = BTreeMap::new();
    for (index, record) in records.iter().enumerate() {
        if matches!(record.kind, StepKind::Send | StepKind::Receive) {
            let is_receive = usize::from(record.kind == StepKind::Receive);
            by_pass.entry(record.pass_index).or_default()[is_receive].push(index);
        }
    }
    let mut messages = Vec::new();
    for [mut sends, mut receives] in by_pass.into_values() {
        sends.sort_by_key(|&index| (records[index].start_ns, index));
        receives.sort_by_key(|&index| (records[index].end_ns, index));
        for sent in sends {
            let send = &records[sent];
            let fits = |&&received: &&usize| {
                let receive = &records[received];
                let from_sender = receive.peer.is_none_or(|peer| peer == send.device_index);
                let at_receiver = match send.peer {
                    Some(peer) => receive.device_index == peer,
                    None => receive.device_index != send.device_index && receive.end_ns >= send.start_ns,
                };
                at_receiver && from_sender
            };
            let Some(at) = receives.iter().position(|received| fits(&received)) else { continue };
            messages.push([sent, receives.remove(at)]);
        }
    }
    messages.sort_by_key(|&[sent, _]| (records[sent].start_ns, sent));
    messages
}

#[cfg(test)]
mod tests {
    use hearth_schema::trace::Resource;

    use super::*;

    fn record(device: u16, kind: StepKind, span: [u64; 2], peer: Option<u16>) -> StepRecord {
        StepRecord { peer, ..super::super::record(device, Resource::Tx, kind, span) }
    }

    #[test]
    fn sends_are_matched_in_order() {
        let records = [
            record(0, StepKind::Send, [10, 11], Some(1)),
            record(0, StepKind::Receive, [11, 25], Some(1)),
            record(0, StepKind::Send, [30, 31], Some(1)),
            record(0, StepKind::Receive, [31, 45], Some(1)),
            record(1, StepKind::Receive, [0, 15], Some(0)),
            record(1, StepKind::Send, [20, 21], Some(0)),
            record(1, StepKind::Receive, [21, 35], Some(0)),
            record(1, StepKind::Send, [40, 41], Some(0)),
        ];
        let expected = [[0, 4], [5, 1], [2, 6], [7, 3]];
        assert_eq!(find_messages(&records), expected);
        let anonymous = records.map(|record| StepRecord { peer: None, ..record });
        assert_eq!(find_messages(&anonymous), expected, "without peers");
    }
}
