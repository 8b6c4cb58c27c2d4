//! Do tokens stay the same when several passes are under way?
//!
//! Prompts in batches, several sequences, and drafts, over rings of the trained model and its trained draft, against
//! one sequence in one process. Devices are tasks of this process, joined by pipes.

mod serving;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::metrics;
use hearth_profiles::Document;
use hearth_ring::{
    Asked, Generated, LocalModel, Memory, Request, Ring, RingError, RingOptions, Worker, bind, for_sequences,
    with_draft,
};
use hearth_runtime::{Sampler, SamplerOptions};
use hearth_schema::Plan;
use hearth_schema::trace::Counter;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Trace;

const FILE: &str = "psalm-7m-q4_k.gguf";
const DRAFT: &str = "psalm-draft-1m-q8_0.gguf";
/// Tokens of each sequence.
const GENERATE: u32 = 24;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models").join(name)
}

fn open(name: &str) -> Arc<LocalModel> {
    Arc::new(LocalModel::open(&data(name)).expect("the trained models are part of the repository"))
}

/// The prompts of the golden texts, of different lengths.
fn prompts() -> Vec<Vec<u32>> {
    let golden = std::fs::read(data("golden.json")).expect("part of the repository");
    let golden: serde_json::Value = serde_json::from_slice(&golden).expect("JSON");
    let runs = golden["files"][FILE].as_array().expect("runs");
    let ids = |run: &serde_json::Value| {
        let ids = run["prompt_ids"].as_array().expect("ids").iter();
        ids.map(|id| id.as_u64().expect("a number") as u32).collect::<Vec<_>>()
    };
    let mut prompts: Vec<_> = runs.iter().map(ids).collect();
    prompts.push(prompts.concat());
    prompts
}

/// A plan of these windows for the trained model's 8 layers, the workers at ports 9001, 9002, ..
fn plan(model: &LocalModel, windows: &[u32], context: u32) -> Plan {
    let device = |(place, window): (usize, &u32)| {
        let (role, address) = match place {
            0 => ("head", String::new()),
            _ => ("worker", format!("address: 'localhost:{}', ", 9000 + place)),
        };
        format!("  - {{name: d{place}, {address}role: {role}, window: {window}, gpu_layers: 0}}")
    };
    let devices = windows.iter().enumerate().map(device).collect::<Vec<_>>().join("\n");
    let (digest, rounds) = (model.profile.shape_digest(), 8u32.div_ceil(windows.iter().sum()));
    let text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\n\
         model: {{name: psalm, shape_digest: '{digest}', layers: 8}}\nplanner: {{strategy: manual}}\n\
         rounds: {rounds}\ncontext: {context}\nkv_cache: f16\ndevices:\n{devices}"
    );
    Plan::from_yaml(&text).expect("a plan")
}

/// Workers at ports 9001 to 9003.
async fn start(network: &Memory, model: &Arc<LocalModel>) {
    for place in 1..=3 {
        let listener = bind(network, &format!("localhost:{}", 9000 + place)).await.expect("a free name");
        let worker = Worker::new(network.clone(), model.clone(), 1);
        tokio::spawn(async move { worker.serve(listener, |_| {}).await });
    }
}

/// The sampler of a sequence.
fn sampler(temperature: f32, sequence: u32) -> Sampler {
    let options = SamplerOptions { temperature, seed: 11, ..SamplerOptions::default() };
    Sampler::new(options).expect("sound options").for_sequence(sequence)
}

/// A request for these sequences, by number, of the prompts.
fn request(numbers: &[u32], temperature: f32, micro_batch: u32, drafts: u32) -> Request {
    let all = prompts();
    let asked = |&number: &u32| {
        let mut sampler = sampler(temperature, number);
        Asked {
            prompt: all[number as usize % all.len()].clone(),
            sample: Box::new(move |logits| sampler.sample(logits)),
        }
    };
    Request {
        sequences: numbers.iter().map(asked).collect(),
        micro_batch,
        drafts,
        ..Request::one(vec![], GENERATE, Box::new(|_| 0))
    }
}

async fn run(
    network: &Memory,
    model: &Arc<LocalModel>,
    plan: Plan,
    draft: Option<Arc<LocalModel>>,
    request: Request,
) -> Result<Generated, RingError> {
    let options =
        RingOptions { threads: 1, pass_deadline: Duration::from_mins(1), draft, ..RingOptions::default() };
    let mut ring = Ring::connect(network, plan, model.clone(), options).await?;
    let told = Arc::new(std::sync::Mutex::new(vec![Vec::new(); request.sequences.len()]));
    let listener = told.clone();
    let on_token = move |sequence: u32, token| {
        listener.lock().expect("no panic")[sequence as usize].push(token);
    };
    let generated = ring.generate(request, on_token).await.map_err(|unfinished| unfinished.error)?;
    ring.close().await;
    assert_eq!(*told.lock().expect("no panic"), generated.sequences, "the listener saw others");
    Ok(generated)
}

/// What each of the prompts gives alone, in one process and without drafts.
async fn alone(model: &Arc<LocalModel>, numbers: &[u32], temperature: f32) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for &number in numbers {
        let one = request(&[number], temperature, 512, 0);
        let generated = run(&Memory::default(), model, plan(model, &[8], 128), None, one).await;
        all.push(generated.expect("tokens").tokens().to_vec());
    }
    all
}

/// Whether a device computed for one pass while another pass was under way.
fn passes_overlap(trace: &Trace) -> bool {
    let begun = |pass: u32| trace.records.iter().filter(move |record| record.pass == pass);
    trace.passes.windows(2).any(|pair| {
        let end = begun(pair[0].index).map(|record| record.end).max();
        let start = begun(pair[1].index).map(|record| record.start).min();
        start < end
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_in_batches_gives_the_same_tokens_and_fills_the_ring() {
    let (model, network) = (open(FILE), Memory::default());
    start(&network, &model).await;
    let longest = prompts().len() as u32 - 1;
    let expected = alone(&model, &[longest], 0.0).await;
    for (windows, micro_batch) in [(vec![3, 3, 2], 4), (vec![2, 1, 1], 3), (vec![1, 2], 1), (vec![8], 5)] {
        let request = request(&[longest], 0.0, micro_batch, 0);
        let batches = prompts()[longest as usize].len().div_ceil(micro_batch as usize);
        let plan = plan(&model, &windows, 128);
        let generated = run(&network, &model, plan, None, request).await.expect("tokens");
        assert_eq!(generated.sequences, expected, "windows {windows:?}, batches of {micro_batch}");
        let passes = &generated.trace.passes;
        assert_eq!(passes.iter().filter(|pass| !pass.output).count() + 1, batches);
        assert_eq!(passes_overlap(&generated.trace), windows.len() > 1, "windows {windows:?}");
        sums_up(&generated.trace);
    }
}

/// The terms of the metrics are those of a sound trace: none is negative, and together they are the time per token.
fn sums_up(trace: &Trace) {
    let metrics = metrics::compute(trace);
    let terms = metrics.terms_ms;
    let mean = metrics.tpot_ms.expect("several tokens").mean;
    for (name, ms) in terms.rows() {
        assert!(ms >= -1e-6, "{name} is {ms} ms");
    }
    assert!((terms.sum() - mean).abs() < 1e-6 * mean.max(1.0), "{} of {mean}", terms.sum());
    assert!(terms.bubble <= 0.05 * mean, "nothing was lost, and {} of {mean} ms are a bubble", terms.bubble);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_at_once_give_the_tokens_that_each_gives_alone() {
    let (model, network) = (open(FILE), Memory::default());
    start(&network, &model).await;
    for temperature in [0.0, 1.0] {
        // The fifth has the prompt of the first, and with a temperature another stream.
        let numbers = [0, 1, 2, 3, 4];
        let expected = alone(&model, &numbers, temperature).await;
        assert_eq!(expected[0] == expected[4], temperature == 0.0);
        for windows in [vec![3, 3, 2], vec![2, 2, 1], vec![8]] {
            let plan = for_sequences(plan(&model, &windows, 600), 5);
            assert_eq!((plan.sequences, plan.context), (5, 120));
            let request = request(&numbers, temperature, 16, 0);
            let generated = run(&network, &model, plan, None, request).await.expect("tokens");
            assert_eq!(generated.sequences, expected, "windows {windows:?} at {temperature}");
            let metrics = metrics::compute(&generated.trace);
            assert_eq!(metrics.sequences.len(), 5);
            assert!(metrics.sequences.iter().all(|one| one.tokens == u64::from(GENERATE) - 1));
            sums_up(&generated.trace);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drafts_change_no_token_and_save_passes() {
    let (model, small, network) = (open(FILE), open(DRAFT), Memory::default());
    start(&network, &model).await;
    for (temperature, numbers) in [(0.0, vec![0]), (0.0, vec![0, 1, 2, 3]), (0.8, vec![3, 1])] {
        let expected = alone(&model, &numbers, temperature).await;
        for (windows, drafts) in [(vec![8], 4), (vec![3, 3, 2], 1), (vec![2, 1, 1], 5)] {
            let plan =
                for_sequences(plan(&model, &windows, 128 * numbers.len() as u32), numbers.len() as u32);
            let plan = with_draft(plan, &model, &small).expect("one tokenizer");
            let request = request(&numbers, temperature, 512, drafts);
            let generated = run(&network, &model, plan, Some(small.clone()), request).await.expect("tokens");
            assert_eq!(
                generated.sequences, expected,
                "windows {windows:?}, {drafts} drafts at {temperature}"
            );
            tells_of_drafts(&generated.trace, numbers.len() as u64);
        }
    }
}

/// A trace has the lines from which metrics tell what drafting brought.
fn tells_of_drafts(trace: &Trace, sequences: u64) {
    let speculation = metrics::compute(trace).speculation.expect("there were drafts");
    let accepted = trace.readings.iter().filter(|reading| reading.counter == Counter::Accepted);
    assert_eq!(accepted.map(|reading| reading.value).sum::<u64>(), speculation.accepted);
    assert!(speculation.accepted > 0, "the draft was trained on the same text");
    assert!(speculation.accepted < speculation.drafted, "it is no copy of the large model");
    // One token of each sequence comes from its prompt, and of each turn one is the large model's own.
    let turns = trace.passes.iter().filter(|pass| pass.output).count() as u64 - sequences;
    assert_eq!(turns + speculation.accepted, (u64::from(GENERATE) - 1) * sequences);
    assert!(turns < (u64::from(GENERATE) - 1) * sequences, "passes are saved");
    assert!(trace.records.iter().any(|record| record.kind == Kind::Draft && record.device == 0));
    sums_up(trace);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_that_ends_early_leaves_the_others_alone() {
    let (model, small, network) = (open(FILE), open(DRAFT), Memory::default());
    start(&network, &model).await;
    let numbers = [0, 1, 2];
    let whole = alone(&model, &numbers, 0.0).await;
    // A token of the middle of the first text, and perhaps one of the others.
    let last = whole[0][9];
    let cut = |tokens: &Vec<u32>| {
        let end = tokens.iter().position(|&token| token == last).map_or(tokens.len(), |at| at + 1);
        tokens[..end].to_vec()
    };
    let expected: Vec<_> = whole.iter().map(cut).collect();
    assert!(expected[0].len() <= 10 && expected.iter().any(|tokens| tokens.len() == GENERATE as usize));
    for drafts in [0, 4] {
        let plan = for_sequences(plan(&model, &[3, 3, 2], 512), 3);
        let plan = with_draft(plan, &model, &small).expect("one tokenizer");
        let request = Request { stop: vec![last], ..request(&numbers, 0.0, 512, drafts) };
        let generated = run(&network, &model, plan, Some(small.clone()), request).await.expect("tokens");
        assert_eq!(generated.sequences, expected, "{drafts} drafts");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_there_is_no_room_or_no_draft_for_is_refused() {
    let (model, network) = (open(FILE), Memory::default());
    let refused = async |plan: Plan, request: Request| {
        let draft = None;
        run(&network, &model, plan, draft, request).await.expect_err("refused").to_string()
    };
    let whole = || plan(&model, &[8], 128);
    let said = refused(whole(), request(&[0, 1], 0.0, 512, 0)).await;
    assert!(said.contains("2 sequences at once") && said.contains("1 to 1"), "{said}");
    let said = refused(for_sequences(whole(), 4), request(&[0, 3], 0.0, 512, 0)).await;
    assert!(said.contains("context of 32 positions for each sequence"), "{said}");
    let said = refused(whole(), request(&[0], 0.0, 0, 0)).await;
    assert!(said.contains("batches of 0 tokens"), "{said}");
    let said = refused(whole(), request(&[0], 0.0, 512, 3)).await;
    assert!(said.contains("--draft-model"), "{said}");
    let drafting = with_draft(whole(), &model, &open(DRAFT)).expect("one tokenizer");
    let said = refused(drafting, request(&[0], 0.0, 512, 3)).await;
    assert!(said.contains("give its file with --draft-model"), "{said}");
}
