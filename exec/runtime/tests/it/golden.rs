//! Tests of greedy texts against llama.cpp.
//!
//! `tests/data/models/golden.json` has llama.cpp's greedy tokens for models trained for this project, and the margin
//! of each token over the second most likely one. With F16 weights all tokens must be equal in free-running
//! generation. Quantised models are teacher-forced, because llama.cpp rounds the activations differently: tokens must
//! be equal where the margin is larger than the effect of rounding.

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

/// Returns the logits after `tokens`, which continue the sequence.
fn next_logits(model: &mut Model, tokens: &[u32]) -> Vec<f32> {
    let hidden = model.pass(tokens);
    model.input_output.logits_of_last(&hidden).unwrap()
}

/// Returns the logits after the prompt of a run, and their maximum difference from the golden logits.
fn prefill(model: &mut Model, run: &Run) -> (Vec<f32>, f32) {
    model.restart();
    let logits = next_logits(model, &run.prompt_ids);
    let difference = |&(token, logit): &(u32, f32)| (logits[token as usize] - logit).abs();
    let off = run.first_step_top5.iter().map(difference).fold(0.0, f32::max);
    (logits, off)
}

#[test]
fn f16_generates_every_golden_token() {
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
    // An f32 reference in another framework differs from llama.cpp by at most 0.0008.
    assert!(off < 2e-3, "first logits differ by {off}");
}

/// Maximum margin of a step in which both tokens are accepted.
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
    assert!(checked > 3 * 64 * 9 / 10, "{checked} checked steps are too few");
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
fn prompts_and_tokens_encode_and_decode_as_golden() {
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
