//! Runs a request on the head, and collects the traces of all devices.
//!
//! Times in the traces of workers are converted to the head's clock. A request that fails still returns its trace and
//! the tokens that were generated before the failure. Every wait has a deadline.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::trace::{Admission, Header, Origin, Outcome, Trace, TracedDevice};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::coordinator::Coordinator;
use super::pipeline::{PassPipeline, Progress, event_or_timeout, parse_trace_lines};
use super::request::{GenerationRequest, SequenceRequest};
use super::scheduler::{RecordedRequests, Request, ResponseEvent, ServeOptions, serve_recorded};
use super::worker_connection::{HeadEvent, WorkerConnection};
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{Samplers, SequenceOutput, StageRunner};
use crate::wire::{Frame, Message, Transport};
use hearth_runtime::clock::monotonic_nanos;

/// The time limit for workers to send their traces after a successful request.
const COLLECT_DEADLINE: Duration = Duration::from_mins(1);
/// The time limit for workers to send their traces after a failed request. The result lacks traces that arrive later.
const SALVAGE_DEADLINE: Duration = Duration::from_secs(2);

/// The tokens and the trace of a request.
#[derive(Debug)]
pub struct GenerationResult {
    /// The generated tokens of each sequence, without the prompt. A stop token is the last token of its sequence.
    pub tokens_by_sequence: Vec<Vec<u32>>,
    pub trace: Trace,
    /// The plans that replaced the first plan during the request, in order.
    pub later_plans: Vec<Plan>,
}

impl GenerationResult {
    pub fn first_sequence_tokens(&self) -> &[u32] {
        self.tokens_by_sequence.first().map_or(&[], Vec::as_slice)
    }
}

/// A request that ended early because of an error.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct FailedRequest {
    pub error: RingError,
    /// The tokens that had been generated and their trace, if the request had begun.
    pub partial_result: Option<Box<GenerationResult>>,
}

impl From<RingError> for FailedRequest {
    fn from(error: RingError) -> Self {
        Self { error, partial_result: None }
    }
}

/// The tokens of each sequence, the passes and the admissions of a request, and whether it succeeded.
struct Ended {
    tokens_by_sequence: Vec<Vec<u32>>,
    passes: Vec<Pass>,
    admissions: Vec<Admission>,
    result: Result<()>,
}

/// Runs a request. When a token is generated, `on_token` receives the index of its sequence and the token; it is not
/// called for sequences that arrive later.
pub(super) async fn generate<T: Transport>(
    coordinator: &mut Coordinator<T>,
    request: GenerationRequest,
    on_token: impl FnMut(u32, u32) + Send,
) -> Result<GenerationResult, FailedRequest> {
    request.check(coordinator.plan())?;
    let first_plan = coordinator.plan().digest();
    let (scenario, seed) = (request.scenario.clone(), request.seed);
    let Ended { tokens_by_sequence, passes, admissions, result: ended } = if request.arrivals.is_empty() {
        generate_at_once(coordinator, request, on_token).await
    } else {
        generate_arriving(coordinator, request).await
    };
    let limit = if ended.is_ok() { COLLECT_DEADLINE } else { SALVAGE_DEADLINE };
    collect_traces(coordinator, limit).await;
    let outcome = if ended.is_ok() { Outcome::Ok } else { Outcome::Killed };
    let mut log = std::mem::take(&mut coordinator.log);
    let plans = std::mem::take(&mut log.later_plans);
    let header = header(coordinator, &log.device_names, (first_plan, scenario, seed));
    let trace = Trace { admissions, ..log.into_trace(header, passes, outcome) };
    let generated = GenerationResult { tokens_by_sequence, trace, later_plans: plans };
    match ended {
        Ok(()) => Ok(generated),
        Err(error) => Err(FailedRequest { error, partial_result: Some(Box::new(generated)) }),
    }
}

async fn generate_at_once<T: Transport>(
    coordinator: &mut Coordinator<T>,
    request: GenerationRequest,
    mut on_token: impl FnMut(u32, u32) + Send,
) -> Ended {
    let generation = request.to_generation();
    let GenerationRequest { sequences, stop_tokens, .. } = request;
    let split = |SequenceRequest { prompt, sampler }| (prompt, sampler);
    let (texts, samplers): (Vec<Vec<u32>>, _) = sequences.into_iter().map(split).unzip();
    let prompt_lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
    let samplers = Samplers::new(samplers, stop_tokens.clone());
    let mut pipeline = PassPipeline::new(generation, texts, stop_tokens);
    let result = match coordinator.start_request(samplers).await {
        Ok(()) => run(&mut pipeline, coordinator, &mut on_token).await,
        Err(error) => Err(error),
    };
    let texts = pipeline.texts.iter().zip(prompt_lengths);
    let tokens_by_sequence = texts.map(|(text, prompt)| text[prompt..].to_vec()).collect();
    Ended { tokens_by_sequence, passes: pipeline.passes, admissions: Vec::new(), result }
}

/// Serves the sequences of a request when they arrive.
async fn generate_arriving<T: Transport>(
    coordinator: &mut Coordinator<T>,
    request: GenerationRequest,
) -> Ended {
    let GenerationRequest { sequences, arrivals, micro_batch, draft_tokens, stop_tokens, .. } = request;
    let options = ServeOptions { micro_batch, draft_tokens, stop_tokens, on_device_report: None };
    let (request_tx, mut request_rx) = mpsc::unbounded_channel();
    let (start, started_ns) = (Instant::now(), monotonic_nanos());
    let (mut timed, mut responses) = (Vec::new(), Vec::new());
    for (index, SequenceRequest { prompt, sampler }) in sequences.into_iter().enumerate() {
        let (response_tx, response_rx) = mpsc::unbounded_channel();
        let (max_new_tokens, output) = (arrivals[index].max_new_tokens, SequenceOutput::Tokens(sampler));
        timed.push((index, Request { prompt, max_new_tokens, output, response_tx }));
        responses.push(response_rx);
    }
    // The scheduler numbers requests in the order of arrival.
    timed.sort_by_key(|(index, _)| arrivals[*index].after);
    let order: Vec<usize> = timed.iter().map(|(index, _)| *index).collect();
    let times: Vec<Duration> = order.iter().map(|&index| arrivals[index].after).collect();
    // On a thread of its own, because the head computes on this one.
    let (stop_tx, stop_rx) = std::sync::mpsc::channel::<()>();
    let arriving = std::thread::spawn(move || {
        for (after, (_, request)) in times.into_iter().zip(timed) {
            let left = (start + after).saturating_duration_since(Instant::now());
            let is_stopped = stop_rx.recv_timeout(left) == Err(RecvTimeoutError::Disconnected);
            if is_stopped || request_tx.send(request).is_err() {
                return;
            }
        }
    });
    let RecordedRequests { passes, mut admissions, result } =
        serve_recorded(coordinator, options, &mut request_rx).await;
    drop(stop_tx);
    let arrived = arriving.join().map_err(|_| protocol_error("the head", "its requests have stopped"));
    let result = result.and(arrived);
    for admission in &mut admissions {
        let index = order[admission.request as usize];
        let arrived_ns = started_ns + arrivals[index].after.as_nanos() as u64;
        (admission.request, admission.arrival_ns) = (index as u32, coordinator.log.since_start(arrived_ns));
        admission.admitted_ns = coordinator.log.since_start(admission.admitted_ns).max(admission.arrival_ns);
    }
    let tokens = |response_rx: &mut mpsc::UnboundedReceiver<ResponseEvent>| {
        let mut tokens = Vec::new();
        while let Ok(event) = response_rx.try_recv() {
            tokens.extend(if let ResponseEvent::Token(token) = event { Some(token) } else { None });
        }
        tokens
    };
    Ended { tokens_by_sequence: responses.iter_mut().map(tokens).collect(), passes, admissions, result }
}

async fn run<T: Transport>(
    pipeline: &mut PassPipeline,
    coordinator: &mut Coordinator<T>,
    on_token: &mut impl FnMut(u32, u32),
) -> Result<()> {
    loop {
        let progress = match pipeline.advance(coordinator).await? {
            Progress::Idle if pipeline.generation.is_finished() => return Ok(()),
            Progress::Idle => {
                let limit = pipeline.pass_limit(coordinator.options.pass_timeout);
                let deadline = pipeline.next_deadline(limit, coordinator.plan().rounds);
                let event = timeout_at(deadline, coordinator.events.recv()).await;
                pipeline.handle_event(event_or_timeout(event, limit), coordinator).await?
            }
            progress => progress,
        };
        if let Progress::Tokens(sequences) = progress {
            for (sequence, tokens) in sequences {
                for token in tokens {
                    on_token(sequence, token);
                }
            }
        }
    }
}

async fn collect_traces<T: Transport>(coordinator: &mut Coordinator<T>, limit: Duration) {
    let deadline = Instant::now() + limit;
    let head = coordinator.reconfiguration.head_name();
    if let Ok(lines) = coordinator.runner().map(StageRunner::take_trace) {
        coordinator.log.add_trace_lines(&head, lines, 0);
    }
    let plan = coordinator.plan().clone();
    let mut awaited = coordinator.connections.broadcast(&plan, &Message::CollectTrace);
    while !awaited.is_empty() {
        let Ok(Some(event)) = timeout_at(deadline, coordinator.events.recv()).await else { break };
        match event {
            HeadEvent::Message {
                connection,
                frame: Frame { message: Message::TraceLines { epoch, more }, payload },
                ..
            } => {
                let Some(name) = coordinator.connections.name_of(connection) else { continue };
                if let Some(lines) = parse_trace_lines(&payload) {
                    let worker = coordinator.connections.workers.get(&name);
                    let offset = worker.map_or(0, WorkerConnection::clock_offset_ns);
                    coordinator.log.add_trace_lines(&name, vec![(epoch, lines)], offset);
                }
                if !more {
                    awaited.remove(&name);
                }
            }
            HeadEvent::Lost { connection, error, since } => {
                let Some(name) = coordinator.connections.name_of(connection) else { continue };
                awaited.remove(&name);
                // The next request is planned without this worker; this request already has its tokens.
                let _ = coordinator.lose_worker(&name, error, since);
            }
            _ => {}
        }
    }
    for name in awaited {
        coordinator.log.record_loss(&name, monotonic_nanos(), "no trace arrived before the deadline".into());
    }
}

fn header<T: Transport>(
    coordinator: &Coordinator<T>,
    devices: &[String],
    (plan_digest, scenario, seed): (String, String, u64),
) -> Header {
    let devices = devices.iter().map(|name| {
        let info = coordinator.connections.worker_info.get(name).cloned().unwrap_or_default();
        TracedDevice {
            name: name.clone(),
            total_memory_bytes: info.memory_total_bytes,
            os_and_kernel: Some(info.os_and_kernel).filter(|kernel| !kernel.is_empty()),
            ..TracedDevice::default()
        }
    });
    Header {
        schema: Trace::SCHEMA.into(),
        origin: Origin::Measured,
        scenario_name: scenario,
        plan_digest,
        model_name: coordinator.plan().model.name.clone(),
        parallelism: coordinator.plan().kind.parallelism(),
        seed,
        program_version: env!("CARGO_PKG_VERSION").into(),
        devices: devices.collect(),
    }
}
