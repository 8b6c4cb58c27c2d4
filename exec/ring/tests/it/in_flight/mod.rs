//! With several passes in flight, each sequence has the same tokens as alone in one process.
//!
//! The tests use batches of a prompt, several sequences, and drafts, on rings of the trained model and its draft model.

mod serving;

use std::sync::Arc;
use std::time::Duration;

use hearth_core::metrics;
use hearth_ring::{
    GenerationRequest, GenerationResult, LocalModel, MemoryTransport, Ring, RingError, RingOptions,
    SequenceArrival, SequenceRequest, plan_for_sequences, plan_with_draft_model,
};
use hearth_runtime::{Sampler, SamplerOptions};
use hearth_schema::Plan;
use hearth_schema::residency::ResidencyOptions;
use hearth_schema::scenario::KvFormat;
use hearth_schema::trace::{Counter, StepKind, Trace};

use crate::fixture::{
    self, Q4_MODEL, open_model, prompts, ring_options, token_listener, with_residency, workers,
};

const DRAFT: &str = "psalm-draft-1m-q8_0.gguf";
const GENERATE: u32 = 24;

fn plan(model: &LocalModel, windows: &[u32], context: u32) -> Plan {
    let plan =
        Plan { context_length: context, kv_cache_format: KvFormat::F16, ..fixture::plan(model, windows) };
    with_residency(plan, ResidencyOptions::default())
}

fn sampler(temperature: f32, sequence: u32) -> Sampler {
    let options = SamplerOptions { temperature, seed: 11, ..SamplerOptions::default() };
    Sampler::new(options).expect("sound options").for_sequence(sequence)
}

/// Creates a request with one sequence per number. The number selects the prompt and the random stream of the sampler.
fn request(numbers: &[u32], temperature: f32, micro_batch: u32, drafts: u32) -> GenerationRequest {
    let all = prompts();
    let sequence = |&number: &u32| {
        let mut sampler = sampler(temperature, number);
        SequenceRequest {
            prompt: all[number as usize % all.len()].clone(),
            sampler: Box::new(move |logits| sampler.sample(logits)),
        }
    };
    GenerationRequest {
        sequences: numbers.iter().map(sequence).collect(),
        micro_batch,
        draft_tokens: drafts,
        ..GenerationRequest::single_sequence(vec![], GENERATE, Box::new(|_| 0))
    }
}

async fn run(
    transport: &MemoryTransport,
    model: &Arc<LocalModel>,
    plan: Plan,
    draft: Option<Arc<LocalModel>>,
    request: GenerationRequest,
) -> Result<GenerationResult, RingError> {
    let options = RingOptions { draft_model: draft, ..ring_options() };
    let mut ring = Ring::connect(transport, plan, model.clone(), options).await?;
    let (received, on_token) = token_listener(request.sequences.len());
    let generated = ring.generate(request, on_token).await.map_err(|failed| failed.error)?;
    ring.close().await;
    let received = received.lock().expect("no panic");
    assert_eq!(*received, generated.tokens_by_sequence, "the listener got other tokens");
    Ok(generated)
}

/// Generates the tokens of each sequence alone, in one process and without drafts.
async fn alone(model: &Arc<LocalModel>, numbers: &[u32], temperature: f32) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for &number in numbers {
        let one = request(&[number], temperature, 512, 0);
        let generated = run(&MemoryTransport::default(), model, plan(model, &[8], 128), None, one).await;
        all.push(generated.expect("tokens").first_sequence_tokens().to_vec());
    }
    all
}

/// Returns whether a pass of the trace began before the previous pass had ended.
fn passes_overlap(trace: &Trace) -> bool {
    let begun = |pass: u32| trace.records.iter().filter(move |record| record.pass_index == pass);
    trace.passes.windows(2).any(|pair| {
        let end = begun(pair[0].index).map(|record| record.end_ns).max();
        let start = begun(pair[1].index).map(|record| record.start_ns).min();
        start < end
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batched_prompt_gives_the_same_tokens_and_fills_the_ring() {
    let model = open_model(Q4_MODEL);
    let transport = workers(&model, 3).await;
    let longest = prompts().len() as u32 - 1;
    let expected = alone(&model, &[longest], 0.0).await;
    for (windows, micro_batch) in [(vec![3, 3, 2], 4), (vec![2, 1, 1], 3), (vec![1, 2], 1), (vec![8], 5)] {
        let request = request(&[longest], 0.0, micro_batch, 0);
        let batches = prompts()[longest as usize].len().div_ceil(micro_batch as usize);
        let plan = plan(&model, &windows, 128);
        let generated = run(&transport, &model, plan, None, request).await.expect("tokens");
        assert_eq!(generated.tokens_by_sequence, expected, "windows {windows:?}, batches of {micro_batch}");
        let passes = &generated.trace.passes;
        assert_eq!(passes.iter().filter(|pass| !pass.has_output).count() + 1, batches);
        assert_eq!(passes_overlap(&generated.trace), windows.len() > 1, "windows {windows:?}");
        check_terms(&generated.trace);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arriving_requests_wait_for_slots_and_get_the_tokens_that_they_have_alone() {
    let model = open_model(Q4_MODEL);
    let transport = workers(&model, 2).await;
    let numbers = [0, 1, 2, 3, 4];
    let expected = alone(&model, &numbers, 0.7).await;
    // The last request arrives first, and the second one when the others have ended.
    let after = [5, 400, 5, 5, 0];
    let arrival = |&ms: &u64| SequenceArrival { after: Duration::from_millis(ms), max_new_tokens: GENERATE };
    let two = Plan { sequences: 2, ..plan(&model, &[5, 3], 128) };
    let arriving =
        GenerationRequest { arrivals: after.iter().map(arrival).collect(), ..request(&numbers, 0.7, 4, 0) };
    let mut ring =
        Ring::connect(&transport, two.clone(), model.clone(), ring_options()).await.expect("a ring");
    let generated = ring.generate(arriving, |_, _| {}).await.expect("tokens");
    assert_eq!(generated.tokens_by_sequence, expected);
    let metrics = metrics::compute_metrics(&generated.trace);
    assert_eq!(metrics.requests.as_ref().map(|requests| requests.count), Some(5), "{metrics:?}");
    let mut sequences: Vec<u32> = metrics.sequences.iter().map(|sequence| sequence.sequence).collect();
    assert_eq!((sequences.first(), sequences.last()), (Some(&4), Some(&1)), "in the order of arrival");
    sequences.sort_unstable();
    assert_eq!(sequences, numbers);
    let tokens = u64::from(GENERATE) - 1;
    assert!(metrics.sequences.iter().all(|sequence| sequence.decoded_tokens == tokens));
    for admission in &generated.trace.admissions {
        let planned = Duration::from_millis(after[admission.request as usize]).as_nanos() as u64;
        assert!(admission.admitted_ns >= admission.arrival_ns && admission.arrival_ns <= planned);
    }
    // The ring can be used again, and refuses what it cannot run.
    let mut wrong = request(&numbers, 0.0, 4, 0);
    wrong.arrivals = vec![arrival(&0)];
    let refused = ring.generate(wrong, |_, _| {}).await.expect_err("refused").error.to_string();
    assert!(refused.contains("5 sequences have 1 arrivals"), "{refused}");
    let mut long = request(&[0], 0.0, 4, 0);
    long.arrivals = vec![SequenceArrival { max_new_tokens: 1000, ..arrival(&0) }];
    let refused = ring.generate(long, |_, _| {}).await.expect_err("refused").error.to_string();
    assert!(refused.contains("1000 new tokens do not fit"), "{refused}");
    ring.close().await;
}

/// Checks the terms of the time per token in a trace: no term is negative, and the terms sum to the time per token.
fn check_terms(trace: &Trace) {
    let metrics = metrics::compute_metrics(trace);
    let terms = metrics.terms_ms;
    let mean = metrics.tpot_ms.expect("several tokens").mean_ms;
    for (name, ms) in terms.named_terms() {
        assert!(ms >= -1e-6, "{name} is {ms} ms");
    }
    assert!((terms.sum() - mean).abs() < 1e-6 * mean.max(1.0), "{} of {mean}", terms.sum());
    assert!(terms.bubble <= 0.05 * mean, "{} of {mean} ms are a bubble", terms.bubble);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sequences_give_the_tokens_of_each_alone() {
    let model = open_model(Q4_MODEL);
    let transport = workers(&model, 3).await;
    for temperature in [0.0, 1.0] {
        // The fifth sequence has the prompt of the first one, but other random numbers.
        let numbers = [0, 1, 2, 3, 4];
        let expected = alone(&model, &numbers, temperature).await;
        assert_eq!(expected[0] == expected[4], temperature == 0.0);
        for windows in [vec![3, 3, 2], vec![2, 2, 1], vec![8]] {
            let plan = plan_for_sequences(plan(&model, &windows, 600), 5, &model.profile.shape);
            assert_eq!((plan.sequences, plan.context_length), (5, 600));
            let request = request(&numbers, temperature, 16, 0);
            let generated = run(&transport, &model, plan, None, request).await.expect("tokens");
            assert_eq!(generated.tokens_by_sequence, expected, "windows {windows:?} at {temperature}");
            let metrics = metrics::compute_metrics(&generated.trace);
            assert_eq!(metrics.sequences.len(), 5);
            assert!(metrics.sequences.iter().all(|one| one.decoded_tokens == u64::from(GENERATE) - 1));
            check_terms(&generated.trace);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_change_no_token_and_save_passes() {
    let (model, small) = (open_model(Q4_MODEL), open_model(DRAFT));
    let transport = workers(&model, 3).await;
    for (temperature, numbers) in [(0.0, vec![0]), (0.0, vec![0, 1, 2, 3]), (0.8, vec![3, 1])] {
        let expected = alone(&model, &numbers, temperature).await;
        for (windows, drafts) in [(vec![8], 4), (vec![3, 3, 2], 1), (vec![2, 1, 1], 5)] {
            let count = numbers.len() as u32;
            let plan = plan_with_draft_model(plan(&model, &windows, 128 * count), &model, &small);
            let plan = plan_for_sequences(plan.expect("one tokenizer"), count, &model.profile.shape);
            let request = request(&numbers, temperature, 512, drafts);
            let generated = run(&transport, &model, plan, Some(small.clone()), request).await;
            let GenerationResult { tokens_by_sequence: sequences, trace, .. } = generated.expect("tokens");
            assert_eq!(sequences, expected, "windows {windows:?}, {drafts} drafts at {temperature}");
            check_draft_counters(&trace, u64::from(count));
        }
    }
}

fn check_draft_counters(trace: &Trace, sequences: u64) {
    let speculation = metrics::compute_metrics(trace).speculation.expect("there were drafts");
    let accepted = trace.readings.iter().filter(|reading| reading.counter == Counter::Accepted);
    assert_eq!(accepted.map(|reading| reading.value).sum::<u64>(), speculation.accepted_drafts);
    assert!(speculation.accepted_drafts > 0, "the draft was trained on the same text");
    assert!(speculation.accepted_drafts < speculation.drafted, "the draft model is not the target model");
    // The prompt gives one token of each sequence, and each later pass gives one token beyond the accepted drafts.
    let passes = trace.passes.iter().filter(|pass| pass.has_output).count() as u64 - sequences;
    assert_eq!(passes + speculation.accepted_drafts, (u64::from(GENERATE) - 1) * sequences);
    assert!(passes < (u64::from(GENERATE) - 1) * sequences, "passes are saved");
    assert!(trace.records.iter().any(|record| record.kind == StepKind::Draft && record.device_index == 0));
    check_terms(trace);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_token_ends_only_its_sequence() {
    let (model, small) = (open_model(Q4_MODEL), open_model(DRAFT));
    let transport = workers(&model, 3).await;
    let numbers = [0, 1, 2];
    let whole = alone(&model, &numbers, 0.0).await;
    // A token from the middle of the first text, which may also be in the other texts.
    let last = whole[0][9];
    let cut = |tokens: &Vec<u32>| {
        let end = tokens.iter().position(|&token| token == last).map_or(tokens.len(), |at| at + 1);
        tokens[..end].to_vec()
    };
    let expected: Vec<_> = whole.iter().map(cut).collect();
    assert!(expected[0].len() <= 10 && expected.iter().any(|tokens| tokens.len() == GENERATE as usize));
    for drafts in [0, 4] {
        let plan =
            plan_with_draft_model(plan(&model, &[3, 3, 2], 512), &model, &small).expect("one tokenizer");
        let plan = plan_for_sequences(plan, 3, &model.profile.shape);
        let request = GenerationRequest { stop_tokens: vec![last], ..request(&numbers, 0.0, 512, drafts) };
        let generated = run(&transport, &model, plan, Some(small.clone()), request).await.expect("tokens");
        assert_eq!(generated.tokens_by_sequence, expected, "{drafts} drafts");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_do_not_fit_the_plan_are_rejected() {
    let (model, transport) = (open_model(Q4_MODEL), MemoryTransport::default());
    let whole = || plan(&model, &[8], 128);
    let four = plan_for_sequences(whole(), 4, &model.profile.shape);
    let drafting = plan_with_draft_model(whole(), &model, &open_model(DRAFT)).expect("one tokenizer");
    let two = &[0, 1][..];
    for (plan, request, what, hint) in [
        (whole(), (two, 512, 0), "2 concurrent sequences, but the plan has caches for 1", "sequences"),
        (four, (&[0, 1, 2, 3], 512, 0), "do not fit in caches for 128 tokens", "more `sequences`"),
        (whole(), (&[0], 0, 0), "into batches of 0 tokens", "1 to 512"),
        (whole(), (&[0], 512, 3), "without a draft model", "--draft-model"),
        (drafting, (&[0], 512, 3), "the plan drafts with", "give the file of the draft model"),
    ] {
        let (numbers, micro_batch, drafts) = request;
        let request = self::request(numbers, 0.0, micro_batch, drafts);
        let error = run(&transport, &model, plan, None, request).await.expect_err("refused");
        assert!(error.what().contains(what) && error.hint().unwrap().contains(hint), "{error}");
    }
}
