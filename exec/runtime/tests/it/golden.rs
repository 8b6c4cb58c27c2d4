//! Greedy texts against llama.cpp's.
//!
//! `tests/data/models/golden.json` holds llama.cpp's greedy tokens and the margin of each over its runner-up,
//! for models trained for this project. F16 must run freely through all of them. Quantised files are
//! teacher-forced, because llama.cpp also rounds the activations, in another way: wherever the margin is
//! larger than what that can change, the choice must be the same.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_runtime::sampler::greedy;
use hearth_runtime::{
    CacheFormat, CacheOptions, Cpu, Head, Pool, PoolOptions, Stage, TextStream, Tokenizer, Weights,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    files: BTreeMap<String, Vec<Run>>,
}

#[derive(Deserialize)]
struct Run {
    prompt: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    text: String,
    first_step_top5: Vec<(u32, f32)>,
    margins: Vec<f32>,
}

fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models")
}

fn golden(file: &str) -> Vec<Run> {
    let text = std::fs::read_to_string(models().join("golden.json")).unwrap();
    let mut golden: Golden = serde_json::from_str(&text).unwrap();
    golden.files.remove(file).unwrap()
}

/// A whole model in one stage.
struct Model {
    head: Head,
    stage: Stage,
    layers: u32,
    length: u32,
}

impl Model {
    fn open(file: &str, threads: usize) -> Model {
        let weights = Arc::new(Weights::open(models().join(file)).unwrap());
        let pool = Pool::new(PoolOptions { threads, pin: false, ..PoolOptions::default() }).unwrap();
        let cpu = Cpu::new(Arc::new(pool));
        let layers = weights.shape().layers.0;
        let cache = CacheOptions { context: 256, format: CacheFormat::F32, sequences: 1 };
        let stage =
            Stage::on_cpu(Arc::clone(&weights), std::slice::from_ref(&(0..layers)), cache, cpu.clone())
                .unwrap();
        Model { head: Head::new(weights, cpu), stage, layers, length: 0 }
    }

    fn restart(&mut self) {
        self.stage.truncate(0);
        self.length = 0;
    }

    /// Logits after `tokens`, which follow those before.
    fn step(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut hidden = self.head.embed(tokens).unwrap();
        let positions: Vec<u32> = (self.length..).take(tokens.len()).collect();
        self.stage.forward(0..self.layers, &mut hidden, &positions).unwrap();
        self.length += tokens.len() as u32;
        self.head.logits_of_last(&hidden).unwrap()
    }
}

#[test]
fn f16_runs_freely_through_every_golden_token() {
    let file = "psalm-7m-f16.gguf";
    let mut model = Model::open(file, 2);
    let (mut steps, mut off) = (0, 0.0f32);
    for run in golden(file) {
        model.restart();
        let mut logits = model.step(&run.prompt_ids);
        for &(token, logit) in &run.first_step_top5 {
            off = off.max((logits[token as usize] - logit).abs());
        }
        for (step, &wanted) in run.greedy_ids.iter().enumerate() {
            let token = greedy(&logits);
            assert_eq!(token, wanted, "`{}`, token {step} of `{}`", run.prompt, run.text);
            logits = model.step(&[token]);
            steps += 1;
        }
    }
    println!("{file}: {steps} free-running steps equal; first logits off by at most {off}");
    assert_eq!(steps, 3 * 64);
    // An f32 reference in another framework is within 0.0008 of llama.cpp.
    assert!(off < 2e-3, "first logits differ by {off}");
}

/// Steps whose margin is at most this may go either way.
const NEAR_TIE: f32 = 0.05;

fn teacher_forced(file: &str) {
    let mut model = Model::open(file, 2);
    let (mut checked, mut skipped, mut equal, mut off) = (0, 0, 0, 0.0f32);
    for run in golden(file) {
        model.restart();
        let mut logits = model.step(&run.prompt_ids);
        for &(token, logit) in &run.first_step_top5 {
            off = off.max((logits[token as usize] - logit).abs());
        }
        for (step, (&wanted, &margin)) in run.greedy_ids.iter().zip(&run.margins).enumerate() {
            let token = greedy(&logits);
            equal += usize::from(token == wanted);
            if margin > NEAR_TIE {
                assert_eq!(token, wanted, "`{}`, token {step}, margin {margin}", run.prompt);
                checked += 1;
            } else {
                skipped += 1;
            }
            logits = model.step(&[wanted]);
        }
    }
    println!(
        "{file}: {checked} steps checked, {skipped} near ties, {equal} of {} equal; \
         first logits off by at most {off}",
        checked + skipped
    );
    assert!(checked > 3 * 64 * 9 / 10, "{checked} steps are too few to mean anything");
}

#[test]
fn q8_0_chooses_as_llama_cpp_does() {
    teacher_forced("psalm-7m-q8_0.gguf");
}

#[test]
fn q4_k_chooses_as_llama_cpp_does() {
    teacher_forced("psalm-7m-q4_k.gguf");
}

#[test]
fn the_draft_chooses_as_llama_cpp_does() {
    teacher_forced("psalm-draft-1m-q8_0.gguf");
}

#[test]
fn prompts_become_the_golden_tokens_and_tokens_the_golden_text() {
    for file in ["psalm-7m-f16.gguf", "psalm-7m-q4_k.gguf", "psalm-7m-q8_0.gguf", "psalm-draft-1m-q8_0.gguf"]
    {
        let weights = Weights::open(models().join(file)).unwrap();
        let tokenizer = Tokenizer::new(&weights.model().metadata).unwrap();
        for run in golden(file) {
            assert_eq!(tokenizer.encode(&run.prompt, false).unwrap(), run.prompt_ids, "{file}");
            assert_eq!(tokenizer.decode(&run.greedy_ids), run.text, "{file}");
            let mut stream = TextStream::default();
            let mut text: String =
                run.greedy_ids.iter().map(|&token| stream.push(&tokenizer, token)).collect();
            text.push_str(&stream.finish());
            assert_eq!(text, run.text, "{file}");
        }
    }
}
