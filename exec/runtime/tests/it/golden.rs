//! Greedy texts against llama.cpp's.
//!
//! `tests/data/models/golden.json` holds llama.cpp's greedy tokens and the margin of each over its runner-up,
//! for models trained for this project. F16 must run freely through all of them. Quantised files are
//! teacher-forced, because llama.cpp also rounds the activations, in another way: wherever the margin is
//! larger than what that can change, the choice must be the same.

use std::collections::BTreeMap;

use hearth_runtime::sampler::greedy;
use hearth_runtime::{CacheFormat, TextStream, Tokenizer, Weights};
use serde::Deserialize;

use crate::models::{self, Model};

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

fn golden(file: &str) -> Vec<Run> {
    let text = std::fs::read_to_string(models::folder().join("golden.json")).unwrap();
    let mut golden: Golden = serde_json::from_str(&text).unwrap();
    golden.files.remove(file).unwrap()
}

fn open(file: &str) -> Model {
    Model::open(&models::folder().join(file), CacheFormat::F32)
}

/// Logits after `tokens`, which follow those before.
fn next_logits(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    let hidden = model.pass(tokens);
    model.head.logits_of_last(&hidden).unwrap()
}

/// Logits after a prompt, and their largest difference from the golden ones.
fn prefill(model: &mut Model, run: &Run) -> (Vec<f32>, f32) {
    model.restart();
    let logits = next_logits(model, &run.prompt_ids);
    let difference = |&(token, logit): &(u32, f32)| (logits[token as usize] - logit).abs();
    let off = run.first_step_top5.iter().map(difference).fold(0.0, f32::max);
    (logits, off)
}

#[test]
fn f16_runs_freely_through_every_golden_token() {
    let file = "psalm-7m-f16.gguf";
    let mut model = open(file);
    let (mut steps, mut off) = (0, 0.0f32);
    for run in golden(file) {
        let (mut logits, difference) = prefill(&mut model, &run);
        off = off.max(difference);
        for (step, &expected) in run.greedy_ids.iter().enumerate() {
            let token = greedy(&logits);
            assert_eq!(token, expected, "`{}`, token {step} of `{}`", run.prompt, run.text);
            logits = next_logits(&mut model, &[token]);
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
    let mut model = open(file);
    let (mut checked, mut skipped, mut equal, mut off) = (0, 0, 0, 0.0f32);
    for run in golden(file) {
        let (mut logits, difference) = prefill(&mut model, &run);
        off = off.max(difference);
        for (step, (&expected, &margin)) in run.greedy_ids.iter().zip(&run.margins).enumerate() {
            let token = greedy(&logits);
            equal += usize::from(token == expected);
            if margin > NEAR_TIE {
                assert_eq!(token, expected, "`{}`, token {step}, margin {margin}", run.prompt);
                checked += 1;
            } else {
                skipped += 1;
            }
            logits = next_logits(&mut model, &[expected]);
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
        let weights = Weights::open(models::folder().join(file)).unwrap();
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
