//! `hearth experts`: replays a recording of expert routing through caches of experts.

use std::fmt::Write;

use hearth_core::expert_cache::{EvictionPolicy, Replay, RouteStatistics, replay, statistics};
use hearth_profiles::Bytes;
use hearth_schema::route_trace::RouteTrace;
use hearth_workflow::documents::read_route_trace;
use serde::Serialize;

use super::print_result;
use crate::cli::ExpertsArgs;
use crate::diagnostics::{ExitCode, Failure};
use crate::output::escape_line;

/// A replay with its cache.
#[derive(Serialize)]
struct Row {
    #[serde(rename = "budget_bytes", serialize_with = "Bytes::serialize_number")]
    budget: Bytes,
    policy: EvictionPolicy,
    #[serde(flatten)]
    replay: Replay,
}

#[derive(Serialize)]
struct Output {
    model: String,
    recording: RouteStatistics,
    replays: Vec<Row>,
}

pub fn run(args: &ExpertsArgs, json: bool) -> Result<ExitCode, Failure> {
    let trace: RouteTrace = read_route_trace(&args.routes)?;
    let pairs = args.budget.iter().flat_map(|budget| args.policy.iter().map(|policy| (*budget, *policy)));
    let replays = pairs
        .map(|(budget, policy)| Row { budget, policy, replay: replay(&trace, policy, budget) })
        .collect();
    let output = Output { model: trace.model.clone(), recording: statistics(&trace), replays };
    print_result(json, &output, text)
}

fn text(Output { model, recording, replays }: &Output) -> String {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let mut text = format!(
        "{}: {} generated tokens; a token uses {} of experts, all tokens {} of {}\n\
         {} of a token's experts were used by the token before; {} of the uses go to the most used tenth\n\n\
         {:>9}  {:<10} {:>8} {:>8} {:>10}\n",
        escape_line(model),
        recording.decoded_tokens,
        recording.cycle,
        recording.working_set,
        recording.all_experts,
        percent(recording.repetition),
        percent(recording.top_tenth),
        "cache",
        "policy",
        "hits",
        "decoding",
        "read"
    );
    for Row { budget, policy, replay } in replays {
        let _ = writeln!(
            text,
            "{:>9}  {:<10} {:>8} {:>8} {:>10}",
            budget.to_string(),
            policy.name(),
            percent(replay.hit_rate),
            percent(replay.hit_rate_decode),
            replay.read.to_string()
        );
    }
    text
}
