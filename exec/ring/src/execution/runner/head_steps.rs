//! The steps that only the head executes: drafts, embeddings, logits and samples.

use std::sync::Arc;

use hearth_core::schedule::ModelPart;
use hearth_runtime::clock::Stopwatch;
use hearth_runtime::{CriticalPathCost, InputOutputLayers};
use hearth_schema::pass::{Batch, Pass};
use hearth_schema::plan::Processor;
use hearth_schema::trace::{Counter, StepKind};

use super::{SequenceTexts, StageRunner, cost_of};
use crate::error::{Result, RingError, protocol_error};
use crate::execution::recorder::StepId;
use crate::wire::activations;

const MISSING: &str = "it started a pass with unknown tokens";

impl StageRunner {
    /// Runs the draft model, which processes a chunk of a prompt, or drafts the last tokens of a pass.
    pub(super) fn draft(&mut self, batch: u32, pass: Pass, texts: &SequenceTexts<'_>) -> Result<()> {
        let end = pass.first_position as usize + (pass.tokens - pass.drafted) as usize;
        let so_far = texts.get(&pass.sequence_index).and_then(|text| text.get(..end));
        let so_far = so_far.ok_or_else(|| protocol_error("the head", MISSING))?;
        let (passes, measured) = self.measure(|runner| {
            let drafter = runner.drafter.as_mut();
            let drafter = drafter.ok_or_else(|| RingError::invalid_plan("this head has no draft model"))?;
            if pass.drafted == 0 {
                drafter.prefill(pass.sequence_index, so_far)?;
            } else {
                let drafts = drafter.draft(pass.sequence_index, so_far, pass.drafted)?;
                runner.drafts.insert(pass.index, drafts);
            }
            let (cost, passes) = drafter.take_cost();
            Ok((passes, cost))
        })?;
        let bytes = self.drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes);
        let step = StepId { pass: batch, round: 0 };
        self.record_step(step, StepKind::Draft, Processor::Cpu, measured, bytes * u64::from(passes));
        Ok(())
    }

    pub(super) fn embed(&mut self, batch: &Batch, texts: &SequenceTexts<'_>) -> Result<()> {
        let mut tokens = Vec::with_capacity(batch.tokens() as usize);
        for pass in batch.passes() {
            let first = pass.first_position as usize;
            let own = first..first + (pass.tokens - pass.drafted) as usize;
            let known = texts.get(&pass.sequence_index).and_then(|text| text.get(own));
            tokens.extend_from_slice(known.ok_or_else(|| protocol_error("the head", MISSING))?);
            tokens.extend(self.drafts.get(&pass.index).into_iter().flatten());
        }
        let tokens = &tokens[..];
        let ((), measured) = self.measure(|runner| {
            let pool = Arc::clone(&runner.pool);
            // Several threads compute per-layer inputs.
            let (hidden, cost) =
                pool.measure(|| runner.input_output()?.embed(tokens).map_err(RingError::from));
            runner.hidden = hidden?;
            if runner.sends_f16() {
                activations::round_to_f16(&mut runner.hidden);
            }
            Ok(((), cost))
        })?;
        self.residency.release_embedding_rows(&self.weights, tokens);
        let table: u64 = self.weights.embedding_extents().iter().map(|extent| extent.length).sum();
        let rows = table / u64::from(self.weights.shape().vocab_size).max(1) * u64::from(batch.tokens());
        // A missing row is read together with neighbouring bytes.
        let touched = rows.max(measured.faulted);
        let step = StepId { pass: batch.index(), round: 0 };
        self.record_step(step, StepKind::Embed, Processor::Cpu, measured, touched);
        Ok(())
    }

    pub(super) fn output(&mut self, batch: &Batch, processor: Processor) -> Result<Vec<Vec<u32>>> {
        let at = StepId { pass: batch.index(), round: self.schedule.plan().rounds };
        if processor == Processor::Cpu {
            self.residency.begin(&ModelPart::Output, at);
        }
        let ((tokens, has_logits), measured) = self.measure(|runner| {
            let activations = std::mem::take(&mut runner.hidden);
            let (hidden, width) = (runner.input_output()?.hidden_states(&activations), runner.embedding());
            let (mut sampled, mut embedded, mut end) = (Vec::new(), Vec::new(), 0);
            for pass in batch.passes() {
                end += pass.tokens as usize * width;
                let own = end - pass.output_count() as usize * width..end;
                let rows = if runner.is_embedding(pass) { &mut embedded } else { &mut sampled };
                rows.extend_from_slice(&hidden[own]);
            }
            let (logits, mut cost) = runner.logits(&sampled, processor)?;
            let mut watch = Stopwatch::start();
            let embeddings = runner.embeddings(&embedded)?;
            let tokens = runner.sample(batch, &logits, &embeddings);
            cost += cost_of(watch.lap());
            Ok(((tokens, !sampled.is_empty()), cost))
        })?;
        let tokens = tokens.ok_or_else(|| protocol_error("the head", "this sequence has no sampler"))?;
        // Embeddings do not need the output matrix.
        let touched = if has_logits { self.weights.part_bytes(&ModelPart::Output) } else { 0 };
        self.record_step(at, StepKind::Output, processor, measured, touched);
        for (pass, tokens) in batch.passes().iter().zip(&tokens).filter(|(pass, _)| pass.drafted > 0) {
            let accepted = tokens.len().saturating_sub(1) as u64;
            self.recorder.record_counter(pass.index, Counter::Accepted, accepted);
        }
        self.record_counters(at.pass);
        Ok(tokens)
    }

    /// Returns whether the output of a pass is an embedding.
    fn is_embedding(&self, pass: &Pass) -> bool {
        self.samplers.as_ref().is_some_and(|samplers| samplers.is_embedding(pass.sequence_index))
    }

    /// Samples the tokens of each pass from the logits of all sampled outputs, `[outputs, vocabulary]`, and sends the
    /// embeddings of the other passes, `[outputs, embedding]`.
    fn sample(&mut self, batch: &Batch, logits: &[f32], embeddings: &[f32]) -> Option<Vec<Vec<u32>>> {
        let (row, width) = (self.weights.shape().vocab_size as usize, self.embedding());
        let samplers = self.samplers.as_mut()?;
        let (mut logits, mut embeddings) = (logits, embeddings.chunks_exact(width));
        let mut tokens = Vec::with_capacity(batch.passes().len());
        for pass in batch.passes() {
            let (sequence, outputs) = (pass.sequence_index, pass.output_count() as usize);
            let drafts = self.drafts.remove(&pass.index).unwrap_or_default();
            if outputs == 0 {
                tokens.push(Vec::new());
            } else if samplers.is_embedding(sequence) {
                samplers.send_embedding(sequence, embeddings.next()?);
                tokens.push(Vec::new());
            } else {
                let (own, after) = logits.split_at(outputs * row);
                logits = after;
                tokens.push(samplers.sample(sequence, own, &drafts)?);
            }
        }
        Some(tokens)
    }

    /// Computes logits on the planned processor, or on the CPU if the GPU no longer works.
    fn logits(&mut self, hidden: &[f32], processor: Processor) -> Result<(Vec<f32>, CriticalPathCost)> {
        if hidden.is_empty() {
            return Ok((Vec::new(), CriticalPathCost::default()));
        }
        if processor == Processor::Gpu
            && let Some((logits, cost)) = self.stage.logits(hidden)
        {
            return Ok((self.input_output()?.check_finite(logits)?, cost));
        }
        let input_output = self.input_output()?;
        let logits = input_output.logits(hidden)?;
        Ok((logits, input_output.last_logits_cost()))
    }

    fn embeddings(&mut self, hidden: &[f32]) -> Result<Vec<f32>> {
        if hidden.is_empty() { Ok(Vec::new()) } else { Ok(self.input_output()?.norm(hidden)?) }
    }

    pub(super) fn input_output(&mut self) -> Result<&mut InputOutputLayers> {
        let input_output = self.input_output.as_mut();
        input_output
            .ok_or_else(|| RingError::invalid_plan("only the head has the embedding and the output layer"))
    }
}
