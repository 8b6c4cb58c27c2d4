//! Input embedding and output head: tokens to hidden rows, and hidden rows to logits.
//!
//! Only the head of the ring computes both: a row of the embedding for each
//! token, and RMSNorm and the output matrix (the embedding again where the two are tied). Gemma scales the rows;
//! Gemma 2 caps the logits. Logits that are no numbers are an error here, whichever layer spoilt them.

use std::sync::Arc;

use crate::cost::ComputeCost;
use crate::cpu::{Cpu, Product};
use crate::error::ExecError;
use crate::rows::SharedRows;
use crate::weights::Weights;
use hearth_kernels::{Activations, dequantise, elementwise};

/// The ends of a model.
#[derive(Debug)]
pub struct Head {
    weights: Arc<Weights>,
    cpu: Cpu,
    input: Activations, // [tokens, embedding]
    cost: ComputeCost,
}

impl Head {
    pub fn new(weights: Arc<Weights>, cpu: Cpu) -> Head {
        Head { weights, cpu, input: Activations::default(), cost: ComputeCost::default() }
    }

    /// Returns the hidden rows of `tokens`, [tokens, embedding].
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, ExecError> {
        let matrix = self.weights.embedding_matrix();
        let mut hidden = vec![0.0; tokens.len() * matrix.length];
        for (&token, row) in tokens.iter().zip(hidden.chunks_exact_mut(matrix.length)) {
            if token as usize >= matrix.rows {
                return Err(ExecError::Token { token, vocabulary: matrix.rows as u32 });
            }
            // Cannot fail: the tensor table was checked when the file was opened.
            let _ = dequantise(matrix.format, matrix.row(token as usize), row);
        }
        if let Some(factor) = self.weights.hyperparameters().embedding_scale {
            elementwise::scale(self.cpu.instructions, &mut hidden, factor);
        }
        Ok(hidden)
    }

    /// Returns the logits of every row of `hidden` [tokens, embedding]: [tokens, vocabulary].
    pub fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        let weights = &self.weights;
        let matrix = weights.output_matrix();
        let tokens = hidden.len() / matrix.length;
        if hidden.len() != tokens * matrix.length {
            let (found, embedding) = (hidden.len(), matrix.length);
            return Err(ExecError::Hidden { found, tokens, embedding });
        }
        let mut logits = vec![0.0; tokens * matrix.rows];
        let (cpu, input) = (&self.cpu, &mut self.input);
        let numbers = weights.hyperparameters();
        let ((), cost) = cpu.pool.measured(|| {
            cpu.rms_norm_rows(hidden, weights.output_norm(), numbers.epsilon, input);
            cpu.multiply(input, &mut [Product { matrix, out: &mut logits }]);
            let rows = SharedRows::new(&mut logits, matrix.rows);
            cpu.for_each_token(tokens, matrix.rows, |token| {
                // SAFETY: each token is in one chunk.
                let row = unsafe { rows.row(token) };
                if let Some(bias) = weights.output_bias() {
                    elementwise::add(cpu.instructions, row, bias);
                }
                if let Some(cap) = numbers.logit_cap {
                    elementwise::soft_cap(cpu.instructions, row, cap);
                }
            });
        });
        self.cost = cost;
        self.finite(logits)
    }

    /// Returns logits [tokens, vocabulary] unchanged, or an error if one is not finite.
    pub fn finite(&self, logits: Vec<f32>) -> Result<Vec<f32>, ExecError> {
        match logits.iter().position(|logit| !logit.is_finite()) {
            Some(at) => {
                let row = at / self.weights.output_matrix().rows;
                Err(ExecError::NotFinite { row, found: logits[at] })
            }
            None => Ok(logits),
        }
    }

    /// Returns the logits of the last row of `hidden`, `[vocabulary]`.
    pub fn logits_of_last(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        let embedding = self.weights.shape().embedding as usize;
        let last = hidden.len().checked_sub(embedding).ok_or(ExecError::Hidden {
            found: hidden.len(),
            tokens: 1,
            embedding,
        })?;
        self.logits(&hidden[last..])
    }

    /// Returns the cost of the last logits.
    pub fn last_cost(&self) -> ComputeCost {
        self.cost
    }
}
