//! Formats a plan as a table and as JSON.

use std::fmt::Write;

use hearth_core::metrics::Metrics;
use hearth_schema::Plan;
use hearth_schema::plan::tensor_parallel::Slice;
use hearth_schema::plan::{DroppedDevice, Parallelism, PlannedDevice, Role};
use hearth_schema::residency::ResidencyOptions;
use serde::Serialize;

use super::escape_line;

/// Ratio of the times per token that planner and simulator predict, above which a note is printed.
/// source: assumed; over random scenarios half of all plans are within 1.1 and nine of ten within 1.4
const MAX_PLANNER_RATIO: f64 = 1.5;

/// A plan as `--json` prints it.
#[derive(Serialize)]
pub struct PlanSummary {
    strategy: String,
    #[serde(skip_serializing_if = "Parallelism::is_ring")]
    kind: Parallelism,
    pub rounds: u32,
    #[serde(rename = "predicted")]
    pub prediction: PlannerPrediction,
    /// The devices of the plan, in ring order.
    pub devices: Vec<DeviceSummary>,
    dropped: Vec<DroppedDevice>,
    explanation: Vec<String>,
}

#[derive(Serialize)]
pub struct PlannerPrediction {
    pub tpot_ms: Option<f64>,
}

#[derive(Serialize)]
pub struct DeviceSummary {
    name: String,
    role: Role,
    window: u32,
    gpu_layers: u32,
    residency: ResidencyOptions,
    /// Maximum number of bytes of weights that the device reads ahead; null means a whole window of layers.
    budget: Option<u64>,
    /// The part of every layer that the device computes; only in tensor-parallel plans.
    #[serde(skip_serializing_if = "Option::is_none")]
    slice: Option<Slice>,
}

impl DeviceSummary {
    /// Returns the name of the device and the number of layers in its window, with the number of GPU layers in
    /// brackets.
    pub fn window_label(&self) -> String {
        let name = escape_line(&self.name);
        match self.gpu_layers {
            0 => format!("{name} {}", self.window),
            gpu => format!("{name} {} ({gpu})", self.window),
        }
    }
}

impl PlanSummary {
    pub fn from_plan(plan: &Plan) -> PlanSummary {
        let device = |(index, device): (usize, &PlannedDevice)| DeviceSummary {
            slice: plan.kind.tensor_plan().and_then(|tensor| tensor.slices.get(index).cloned()),
            name: device.name.clone(),
            role: device.role,
            window: device.window,
            gpu_layers: device.gpu_layers,
            residency: device.residency,
            budget: device.residency.max_prefetch().map(|budget| budget.0),
        };
        PlanSummary {
            strategy: plan.planner.strategy.clone(),
            kind: plan.kind.parallelism(),
            rounds: plan.rounds,
            prediction: PlannerPrediction { tpot_ms: plan.prediction.map(|it| it.tpot.as_millis()) },
            devices: plan.devices.iter().enumerate().map(device).collect(),
            dropped: plan.dropped_devices.clone(),
            explanation: plan.explanation.clone(),
        }
    }
}

/// Formats a plan as a table; with `has_dropped`, also the devices without layers, which a verdict has too.
pub fn format_table(plan: &Plan, has_dropped: bool) -> String {
    let mut text = String::new();
    let tpot = plan.prediction.map_or(String::new(), |it| format!(", expected {} per token", it.tpot));
    let _ = writeln!(
        text,
        "{} over {} layers: {} round{} by `{}`{tpot}",
        plan.model.name,
        plan.model.layers,
        plan.rounds,
        if plan.rounds == 1 { "" } else { "s" },
        plan.planner.strategy
    );
    text.push_str("  device         role    window   gpu  residency layers\n");
    for (index, device) in plan.devices.iter().enumerate() {
        let windows: Vec<String> =
            plan.windows(index).iter().map(|window| format!("{}-{}", window.start, window.end - 1)).collect();
        let role = match device.role {
            Role::Head => "head",
            Role::Worker => "worker",
            Role::Relay => "relay",
        };
        let (name, window, gpu) = (escape_line(&device.name), device.window, device.gpu_layers);
        let policy = device.residency.policy;
        let layers = match plan.kind.tensor_plan() {
            None => windows.join(" "),
            Some(tensor) => {
                let Slice { kv_heads, feed_forward_rows, .. } = &tensor.slices[index];
                format!("{kv_heads} KV heads and {feed_forward_rows} feed-forward rows of each layer")
            }
        };
        let _ = writeln!(text, "  {name:<14} {role:<7} {window:>6} {gpu:>5}  {policy:<9} {layers}");
    }
    for dropped in plan.dropped_devices.iter().filter(|_| has_dropped) {
        let _ = writeln!(text, "  {:<14} dropped: {}", escape_line(&dropped.name), dropped.reason);
    }
    for sentence in &plan.explanation {
        let _ = writeln!(text, "  {}", escape_line(sentence));
    }
    text
}

/// Returns a note if planner and simulator disagree about the time per token.
pub fn planner_disagreement(plan: &Plan, metrics: &Metrics) -> Option<String> {
    let (expected, simulated) = (plan.prediction?.tpot.as_millis(), metrics.tpot_ms?.mean_ms);
    let factor = (expected / simulated).max(simulated / expected);
    (factor > MAX_PLANNER_RATIO).then(|| {
        format!(
            "note: the planner expected {expected:.1} ms per token, but the simulator predicts {simulated:.1} ms, \
             a factor of {factor:.1}. The simulator is more accurate: it models page caches, waiting and each \
             message. Try `--residency managed` or `hearth plan --compare`."
        )
    })
}
