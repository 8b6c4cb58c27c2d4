//! The input and output layers: convert tokens to hidden states, and hidden states to logits.
//!
//! Only the first device of a ring (the head device) computes these layers. The input layer looks up a row of the
//! embedding table for each token. The output layer is RMSNorm and the matmul with the output matrix, which is the
//! embedding table if embeddings are tied. Gemma and Granite models scale the embedding rows, Granite models scale the
//! logits, and Gemma 2 applies a soft cap to them. Logits that are not finite are an error, whichever layer caused
//! them.

use std::sync::Arc;

use crate::cpu::Matmul;
use crate::{Cpu, CriticalPathCost, ExecError, Weights};
use hearth_kernels::{Activations, dequantise, elementwise};

/// The input layer (token embedding) and the output layer (norm and output matrix) of a model.
#[derive(Debug)]
pub struct InputOutputLayers {
    weights: Arc<Weights>,
    cpu: Cpu,
    input: Activations, // [tokens, embedding]
    cost: CriticalPathCost,
}

impl InputOutputLayers {
    pub fn new(weights: Arc<Weights>, cpu: Cpu) -> InputOutputLayers {
        InputOutputLayers { weights, cpu, input: Activations::default(), cost: CriticalPathCost::default() }
    }

    /// Returns the input embeddings `[tokens, embedding]` of `tokens`. Fails if a token is not in the vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, ExecError> {
        let matrix = self.weights.embedding_matrix();
        let mut hidden = vec![0.0; tokens.len() * matrix.row_length];
        for (&token, row) in tokens.iter().zip(hidden.chunks_exact_mut(matrix.row_length)) {
            if token as usize >= matrix.rows {
                return Err(ExecError::Token { token, vocab_size: matrix.rows as u32 });
            }
            // This cannot fail: the tensor table was checked when the file was opened.
            let _ = dequantise(matrix.format, matrix.row(token as usize), row);
        }
        if let Some(factor) = self.weights.hyperparameters().embedding_scale {
            elementwise::scale(self.cpu.instruction_set, &mut hidden, factor);
        }
        self.weights.check_unchanged()?;
        Ok(hidden)
    }

    /// Returns the logits `[tokens, vocabulary]` of final hidden states `[tokens, embedding]`. Fails if a logit is not
    /// finite.
    pub fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        let (norm, matrix, bias) = self.weights.output_weights();
        let tokens = hidden.len() / matrix.row_length;
        if hidden.len() != tokens * matrix.row_length {
            let (found, embedding) = (hidden.len(), matrix.row_length);
            return Err(ExecError::Hidden { found, tokens, embedding });
        }
        let mut logits = vec![0.0; tokens * matrix.rows];
        let (cpu, input) = (&self.cpu, &mut self.input);
        let parameters = self.weights.hyperparameters();
        let ((), cost) = cpu.thread_pool.measure(|| {
            cpu.rms_norm_rows(hidden, norm, parameters.rms_norm_epsilon, input);
            cpu.multiply(input, &mut [Matmul { matrix, out: &mut logits }]);
            cpu.for_each_row(&mut logits, matrix.rows, |_, row| {
                if let Some(bias) = bias {
                    elementwise::add(cpu.instruction_set, row, bias);
                }
                if let Some(factor) = parameters.logit_scale {
                    elementwise::scale(cpu.instruction_set, row, factor);
                }
                if let Some(cap) = parameters.logit_softcap {
                    elementwise::softcap(cpu.instruction_set, row, cap);
                }
            });
        });
        self.cost = cost;
        self.check_finite(logits)
    }

    /// Returns `logits`, `[tokens, vocabulary]`, unchanged. Fails if a logit is not finite, or if a model file was
    /// changed.
    pub fn check_finite(&self, logits: Vec<f32>) -> Result<Vec<f32>, ExecError> {
        self.weights.check_unchanged()?;
        let Some(at) = logits.iter().position(|logit| !logit.is_finite()) else { return Ok(logits) };
        let row = at / self.weights.shape().vocab_size as usize;
        let what = format!("the logits of token {row} of the pass (counted from 0)");
        Err(ExecError::NotFinite { what, found: logits[at] })
    }

    /// Returns the logits `[vocabulary]` of the last token of `hidden`, `[tokens, embedding]`.
    pub fn logits_of_last_row(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        let embedding = self.weights.shape().embedding_length as usize;
        let found = hidden.len();
        let last = found.checked_sub(embedding).ok_or(ExecError::Hidden { found, tokens: 1, embedding })?;
        self.logits(&hidden[last..])
    }

    /// Returns the cost of the most recent call of [`Self::logits`].
    pub fn last_logits_cost(&self) -> CriticalPathCost {
        self.cost
    }
}
