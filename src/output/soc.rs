//! Formats the metrics of a run on a single phone, which computes with its GPU and NPU.

use std::fmt::Write;

use hearth_core::soc::SocMetrics;
use hearth_core::soc::metrics::{FRAME_TIME, QueueOccupancy};

/// Note about the times of a run in which a phone reads its weights from disk.
pub const COLD_START_NOTE: &str = "note: the times include reading the weights from disk. Add `--warm` to see the times of GPU and NPU \
                        with the model in memory.";

pub fn format_metrics(numbers: &SocMetrics) -> String {
    let mut text = String::new();
    let rate = |speed: Option<f64>| speed.map_or("-".to_owned(), |speed| format!("{speed:.2}"));
    let _ = writeln!(
        text,
        "  GPU and NPU, `{}`: prefill at {} tokens/s, decode at {} tokens/s",
        numbers.strategy,
        rate(numbers.prefill_tokens_per_s),
        rate(numbers.decode_tokens_per_s)
    );
    if numbers.graph_preparation_s > 0.0 {
        let _ = writeln!(
            text,
            "  graphs built at run time: {:.3} s; with them prefill at {} tokens/s",
            numbers.graph_preparation_s,
            rate(numbers.prefill_with_preparation_tokens_per_s)
        );
    }
    if let (Some(power), Some(energy)) = (numbers.prefill_power_w, numbers.prefill_energy_j) {
        let _ = writeln!(text, "  energy of the prompt: {energy:.2} J at {power:.2} W");
    }
    queue(&mut text, "prefill", &numbers.prefill_queue);
    queue(&mut text, "decode", &numbers.decode_queue);
    let costs = &numbers.sync_overhead;
    let _ = writeln!(
        text,
        "  synchronisation: {} times, {:.1} ms for the events, {:.1} ms of a polling core",
        costs.sync_count, costs.events_ms, costs.polling_ms
    );
    text
}

fn queue(text: &mut String, phase: &str, queue: &QueueOccupancy) {
    let relation = if queue.frame_deadlines_met { "within" } else { "longer than" };
    let _ = writeln!(
        text,
        "  GPU queue in {phase}: busy for up to {:.1} ms, {relation} a frame of {:.1} ms; longest kernel {:.1} ms, \
         busy {:.0} % of the time",
        queue.max_busy_ms,
        FRAME_TIME.as_millis(),
        queue.max_kernel_ms,
        queue.busy_share * 100.0
    );
}
