//! Intervals of activity of the CPU, the GPU and the disk of each device.
//!
//! A computing step is split by its cost into waiting for a processor, waiting for the disk, copying and computing. The
//! trace has only the length of each part, because the waits are distributed over the step. So charts draw the waits at
//! the start of the step. Reading ahead is split into the part during which the device computed nothing (hidden, as in
//! the metrics) and the part during which it computed.

use hearth_schema::trace::{Resource, StepKind, StepRecord};

/// A row of a device's activities in a chart: the CPU, the GPU or the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Cpu,
    Gpu,
    Disk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// Reading ahead while the device computes nothing.
    HiddenRead,
    /// Reading ahead while the device computes.
    ConcurrentRead,
    Queue,
    Copy,
    Cpu,
    Gpu,
    /// Waiting for the disk within a computing step.
    DemandRead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivityInterval {
    /// Index of the device in the ring.
    pub device_index: u16,
    pub lane: Lane,
    pub activity: Activity,
    /// Start of the interval, in nanoseconds since the start of the run.
    pub start_ns: u64,
    /// End of the interval, in nanoseconds since the start of the run.
    pub end_ns: u64,
    /// Index of the trace record of which the interval is a part.
    pub record_index: usize,
}

/// Splits a step on the CPU into activities with their durations in nanoseconds, in the order in which charts draw the
/// activities.
pub fn activity_durations(record: &StepRecord) -> [(Activity, u64); 4] {
    let wall = record.duration_ns();
    if record.kind == StepKind::Copy {
        return [(Activity::Queue, 0), (Activity::DemandRead, 0), (Activity::Copy, wall), (Activity::Cpu, 0)];
    }
    // As in the metrics, the rest of the wall time is waiting for the disk.
    let cost = record.cost.unwrap_or_default();
    let cpu = cost.cpu_ns.min(wall);
    let queue = cost.queue_ns.min(wall - cpu);
    let copy = cost.copy_ns.min(wall - cpu - queue);
    let demand = wall - cpu - queue - copy;
    [(Activity::Queue, queue), (Activity::DemandRead, demand), (Activity::Copy, copy), (Activity::Cpu, cpu)]
}

/// Returns the intervals of all records within `window`, from its start to its end in nanoseconds. Intervals that
/// extend beyond the window are cut.
pub fn intervals_within(records: &[StepRecord], window: [u64; 2]) -> Vec<ActivityInterval> {
    let [from, to] = window;
    let mut intervals = Vec::new();
    let overlapping = records.iter().enumerate().filter(|(_, record)| {
        record.start_ns < to && record.end_ns > from && record.end_ns > record.start_ns
    });
    let (work, ahead): (Vec<_>, Vec<_>) = overlapping
        .filter(|(_, record)| record.is_processor_work() || is_disk_read(record))
        .partition(|(_, record)| record.is_processor_work());
    for (index, record) in ahead {
        split_read(&mut intervals, index, record, &work);
    }
    for (index, record) in work {
        split_step(&mut intervals, index, record);
    }
    intervals.retain_mut(|interval| {
        interval.start_ns = interval.start_ns.max(from);
        interval.end_ns = interval.end_ns.min(to);
        interval.start_ns < interval.end_ns
    });
    // Waiting for the disk is drawn last, on top of reading ahead.
    intervals.sort_by_key(|interval| {
        (interval.device_index, interval.lane, interval.activity, interval.start_ns, interval.record_index)
    });
    intervals
}

fn is_disk_read(record: &StepRecord) -> bool {
    record.kind == StepKind::Prefetch
        || matches!(record.resource, Resource::DiskDemand | Resource::DiskPrefetch)
}

fn split_step(intervals: &mut Vec<ActivityInterval>, record_index: usize, record: &StepRecord) {
    let device_index = record.device_index;
    let mut push = |lane, activity, start_ns, end_ns| {
        intervals.push(ActivityInterval { device_index, lane, activity, start_ns, end_ns, record_index });
    };
    if record.resource == Resource::Gpu {
        let activity = if record.kind == StepKind::Copy { Activity::Copy } else { Activity::Gpu };
        return push(Lane::Gpu, activity, record.start_ns, record.end_ns);
    }
    let mut at = record.start_ns;
    for (activity, nanos) in activity_durations(record) {
        let lane = if activity == Activity::DemandRead { Lane::Disk } else { Lane::Cpu };
        push(lane, activity, at, at + nanos);
        at += nanos;
    }
}

/// Splits a disk read into the parts during which the device computes, and the parts during which it does not.
fn split_read(
    intervals: &mut Vec<ActivityInterval>,
    record_index: usize,
    record: &StepRecord,
    work: &[(usize, &StepRecord)],
) {
    let (device_index, lane) = (record.device_index, Lane::Disk);
    let mut push = |activity, start_ns, end_ns| {
        intervals.push(ActivityInterval { device_index, lane, activity, start_ns, end_ns, record_index });
    };
    if record.resource == Resource::DiskDemand {
        return push(Activity::DemandRead, record.start_ns, record.end_ns);
    }
    let own_work = work.iter().filter(|(_, step)| step.device_index == device_index);
    let mut busy: Vec<[u64; 2]> = own_work
        .map(|(_, step)| [step.start_ns.max(record.start_ns), step.end_ns.min(record.end_ns)])
        .filter(|[start, end]| start < end)
        .collect();
    busy.sort_unstable();
    let mut at = record.start_ns;
    for [start, end] in busy {
        if start > at {
            push(Activity::HiddenRead, at, start);
        }
        if end > at {
            push(Activity::ConcurrentRead, at.max(start), end);
            at = end;
        }
    }
    if at < record.end_ns {
        push(Activity::HiddenRead, at, record.end_ns);
    }
}

#[cfg(test)]
mod tests {
    use hearth_schema::trace::StepCost;

    use super::super::record;
    use super::*;

    fn spans(intervals: &[ActivityInterval]) -> Vec<(Activity, u64, u64)> {
        intervals.iter().map(|interval| (interval.activity, interval.start_ns, interval.end_ns)).collect()
    }

    #[test]
    fn step_is_split_by_its_cost() {
        let cost = StepCost { cpu_ns: 60, queue_ns: 10, ..StepCost::default() };
        let steps =
            [StepRecord { cost: Some(cost), ..record(0, Resource::Cpu, StepKind::Compute, [100, 200]) }];
        // 100 ns of wall time - 60 - 10 = 30 ns for the disk.
        let intervals = intervals_within(&steps, [0, 1000]);
        assert_eq!(
            spans(&intervals),
            [(Activity::Queue, 100, 110), (Activity::Cpu, 140, 200), (Activity::DemandRead, 110, 140)]
        );
        // Only the part within the window remains.
        assert_eq!(spans(&intervals_within(&steps, [150, 160])), [(Activity::Cpu, 150, 160)]);
    }

    #[test]
    fn prefetch_is_hidden_while_nothing_computes() {
        let steps = [
            record(0, Resource::DiskPrefetch, StepKind::Prefetch, [0, 100]),
            record(0, Resource::Gpu, StepKind::Compute, [20, 40]),
            record(0, Resource::Gpu, StepKind::Compute, [30, 50]),
        ];
        let intervals = intervals_within(&steps, [0, 1000]);
        let disk: Vec<ActivityInterval> =
            intervals.into_iter().filter(|interval| interval.lane == Lane::Disk).collect();
        let of = |activity| -> u64 {
            let same = disk.iter().filter(|interval| interval.activity == activity);
            same.map(|interval| interval.end_ns - interval.start_ns).sum()
        };
        assert_eq!((of(Activity::HiddenRead), of(Activity::ConcurrentRead)), (70, 30));
    }
}
