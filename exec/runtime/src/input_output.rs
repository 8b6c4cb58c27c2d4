//! The input and output layers: convert tokens to hidden states, and hidden states to logits.
//!
//! Only the first device of a ring (the head device) computes these layers. The input layer looks up a row of the
//! embedding table for each token. The output layer is RMSNorm and the matmul with the output matrix, which is the
//! embedding table if embeddings are tied. Gemma and Granite models scale the embedding rows, Granite models scale the
//! logits, and Gemma 2 applies a soft cap to them. Logits that are not finite are an error, whichever layer caused
//! them. The embedding of a text is a hidden state after RMSNorm, without the matmul.

use std::sync::Arc;

use crate::cpu::Matmul;
use crate::token_inputs::TokenInputs;
use crate::weights::PerLayerInputTable;
use crate::{Cpu, CriticalPathCost, ExecError, Weights};
use hearth_kernels::matmul::Matrix;
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

    /// Returns the activations of `tokens` before the first layer: their embeddings `[tokens, embedding]`, followed in
    /// some models by the per-layer inputs (`ModelShape::activation_length`). Fails if a token is not in the
    /// vocabulary.
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, ExecError> {
        let (matrix, shape) = (self.weights.embedding_matrix(), self.weights.shape());
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= matrix.rows) {
            return Err(ExecError::Token { token, vocab_size: matrix.rows as u32 });
        }
        let mut activations = vec![0.0; tokens.len() * shape.activation_length() as usize];
        let (hidden, mut inputs) = TokenInputs::split(shape, &mut activations);
        for (&token, row) in tokens.iter().zip(hidden.chunks_exact_mut(matrix.row_length)) {
            // This cannot fail: the tensor table was checked when the file was opened.
            let _ = dequantise(matrix.format, matrix.row(token as usize), row);
        }
        if let Some(factor) = self.weights.hyperparameters().embedding_scale {
            elementwise::scale(self.cpu.instruction_set, hidden, factor);
        }
        if let Some(weights) = self.weights.per_layer_inputs() {
            self.compute_per_layer_inputs(&weights, tokens, hidden, inputs.per_layer_inputs_mut());
        }
        self.weights.check_unchanged()?;
        Ok(activations)
    }

    /// Computes the per-layer inputs of all layers, `[layers, tokens, per-layer input]`: a row of the table for each
    /// token, plus a projection of its embedding in `hidden`, normalised for each layer. Both parts have unit variance,
    /// and so has the result.
    fn compute_per_layer_inputs(
        &self,
        weights: &PerLayerInputTable<Matrix<'_>, &[f32]>,
        tokens: &[u32],
        hidden: &[f32],
        out: &mut [f32],
    ) {
        let (table, length, run) = (weights.table, weights.norm.len(), self.cpu.instruction_set);
        let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
        let mut embedded = Activations::default();
        embedded.resize(tokens.len(), hidden.len() / tokens.len().max(1));
        embedded.rows_mut().copy_from_slice(hidden);
        let mut projected = vec![0.0; tokens.len() * weights.projection.rows];
        self.cpu.multiply(&mut embedded, &mut [Matmul { matrix: weights.projection, out: &mut projected }]);
        let width = (weights.projection.row_length as f32).sqrt();
        let mut row = vec![0.0; table.row_length];
        for (index, (&token, projected)) in
            tokens.iter().zip(projected.chunks_exact_mut(table.row_length)).enumerate()
        {
            let _ = dequantise(table.format, table.row(token as usize), &mut row);
            elementwise::scale(run, &mut row, (length as f32).sqrt());
            elementwise::scale(run, projected, 1.0 / width);
            let layers = row.chunks_exact(length).zip(projected.chunks_exact_mut(length));
            for (layer, (own, sum)) in layers.enumerate() {
                elementwise::rms_norm_in_place(run, sum, weights.norm, epsilon);
                elementwise::add(run, sum, own);
                elementwise::scale(run, sum, std::f32::consts::FRAC_1_SQRT_2);
                out[(layer * tokens.len() + index) * length..][..length].copy_from_slice(sum);
            }
        }
    }

    /// Returns the logits `[tokens, vocabulary]` of final hidden states `[tokens, embedding]`. Fails if a logit is not
    /// finite.
    pub fn logits(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        let tokens = self.count_rows(hidden)?;
        let (norm, matrix, bias) = self.weights.output_weights();
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

    /// Returns final hidden states `[tokens, embedding]` after the norm of the output layer. Fails if a value is not
    /// finite.
    pub fn norm(&mut self, hidden: &[f32]) -> Result<Vec<f32>, ExecError> {
        self.count_rows(hidden)?;
        let (norm, ..) = self.weights.output_weights();
        let epsilon = self.weights.hyperparameters().rms_norm_epsilon;
        self.cpu.rms_norm_rows(hidden, norm, epsilon, &mut self.input);
        self.check_rows(self.input.rows().to_vec(), norm.len(), "the final hidden state")
    }

    /// Returns `logits`, `[tokens, vocabulary]`, unchanged. Fails if a logit is not finite, or if a model file was
    /// changed.
    pub fn check_finite(&self, logits: Vec<f32>) -> Result<Vec<f32>, ExecError> {
        self.check_rows(logits, self.weights.shape().vocab_size as usize, "the logits")
    }

    /// Returns `values`, `[tokens, width]`, unchanged. Fails if a value is not finite, or if a model file was changed.
    fn check_rows(&self, values: Vec<f32>, width: usize, name: &str) -> Result<Vec<f32>, ExecError> {
        self.weights.check_unchanged()?;
        // The compiler vectorises loops without an early exit.
        if values.iter().filter(|value| !value.is_finite()).count() == 0 {
            return Ok(values);
        }
        let at = values.iter().position(|value| !value.is_finite()).expect("a value is not finite");
        let what = format!("{name} of token {} of the pass (counted from 0)", at / width);
        Err(ExecError::NotFinite { what, found: values[at] })
    }

    /// Returns the number of tokens of final hidden states `[tokens, embedding]`.
    fn count_rows(&self, hidden: &[f32]) -> Result<usize, ExecError> {
        let (width, found) = (self.weights.shape().embedding_length as usize, hidden.len());
        let tokens = found / width;
        if found == tokens * width { Ok(tokens) } else { Err(ExecError::Hidden { found, tokens, width }) }
    }

    /// Returns the hidden states, `[tokens, embedding]`, of `activations`.
    pub fn hidden_states<'a>(&self, activations: &'a [f32]) -> &'a [f32] {
        let shape = self.weights.shape();
        let tokens = activations.len() / shape.activation_length() as usize;
        &activations[..tokens * shape.embedding_length as usize]
    }

    /// Returns the logits `[vocabulary]` of the last token of `activations`, which the last layer has computed.
    pub fn logits_of_last_row(&mut self, activations: &[f32]) -> Result<Vec<f32>, ExecError> {
        let width = self.weights.shape().embedding_length as usize;
        let hidden = self.hidden_states(activations);
        let found = hidden.len();
        let last = found.checked_sub(width).ok_or(ExecError::Hidden { found, tokens: 1, width })?;
        self.logits(&hidden[last..])
    }

    /// Returns the cost of the most recent call of [`Self::logits`].
    pub fn last_logits_cost(&self) -> CriticalPathCost {
        self.cost
    }
}
