//! Assembly of a graph into kernel launches over planned memory.
//!
//! The nodes of the fused graph become launches in their order. In prefill, the kernel that quantises the inputs of a
//! matmul precedes it, unless the previous matmul had the same inputs. After the last layer of the range there is a
//! residual addition and no norm: the norm belongs to the next layer.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{BATCH_TOKENS, GpuLayers, Grid, Step, weights};
use crate::device::{Launch, Tensor};
use crate::error::GpuError;
use crate::graph::{Fusion, Graph, LayerMatrix, Node, Norm, Operation, PassSize, decoder, fuse};
use crate::kernels::Variant;
use crate::kernels::attention::AttentionKernel;
use crate::kernels::matmul::{MatmulKernel, Phase, Tiling};
use crate::kernels::norm::NormKernel;
use crate::kernels::quantise::{self, Granularity};
use crate::kernels::rotate::RotateKernel;
use crate::memory::{TensorUsageRecord, greedy_by_size_improved};
use crate::virtual_tensor::Storage;

/// A range of layers that is being assembled.
struct Assembly<'a> {
    own: &'a GpuLayers,
    phase: Phase,
    tiling: Tiling,
    /// The shared buffer of each intermediate tensor; hidden rows have a buffer of their own.
    objects: BTreeMap<usize, usize>,
    /// The current layer; `None` before the first one.
    layer: Option<u32>,
    first: u32,
    /// The tensor that was quantised last, and its granularity.
    quantised: Option<(usize, Granularity)>,
    steps: Vec<Step>,
}

impl GpuLayers {
    /// Returns the steps of a range of layers in one phase.
    pub(super) fn steps(
        &mut self,
        layers: Range<u32>,
        phase: Phase,
        tiling: Tiling,
    ) -> Result<Vec<Step>, GpuError> {
        let size = PassSize {
            layers: layers.end - layers.start,
            tokens: u64::from(BATCH_TOKENS),
            context: u64::from(self.options.context),
            element_bytes: size_of::<f32>() as u64,
        };
        let graph = fuse(decoder(self.model.shape(), size), Fusion::ALL);
        let hidden = hidden_rows(&graph);
        let records: Vec<(usize, TensorUsageRecord)> = graph
            .usage_records()
            .into_iter()
            .filter(|(tensor, record)| !hidden.contains(tensor) && record.size > 0)
            .collect();
        let plan = greedy_by_size_improved(&records.iter().map(|&(_, record)| record).collect::<Vec<_>>());
        // All ranges and phases share the same buffers, each largest object with the largest one of the others.
        let mut order: Vec<usize> = (0..plan.object_sizes.len()).collect();
        order.sort_by_key(|&object| std::cmp::Reverse(plan.object_sizes[object]));
        let sizes: Vec<u64> = order.iter().map(|&object| plan.object_sizes[object]).collect();
        self.buffers.reserve_objects(&self.gpu, &sizes)?;
        let rank: BTreeMap<usize, usize> = order.into_iter().zip(0..).collect();
        let objects =
            records.iter().zip(&plan.object_ids).map(|((tensor, _), id)| (*tensor, rank[id])).collect();
        let (own, first) = (&*self, layers.start);
        let mut assembly =
            Assembly { own, phase, tiling, objects, layer: None, first, quantised: None, steps: Vec::new() };
        for node in graph.nodes.iter().filter(|node| node.operations[0] != Operation::Embed) {
            assembly.node(node)?;
        }
        Ok(assembly.steps)
    }
}

/// Returns the tensors that are stored in the buffer of hidden rows: the embedding, and the results of residual
/// additions.
fn hidden_rows(graph: &Graph) -> Vec<usize> {
    let of = |node: &Node| {
        let first = node.outputs.first().copied();
        first.filter(|_| {
            node.operations.iter().any(|operation| matches!(operation, Operation::Embed | Operation::Add))
        })
    };
    graph.nodes.iter().filter_map(of).collect()
}

impl Assembly<'_> {
    fn node(&mut self, node: &Node) -> Result<(), GpuError> {
        for operation in &node.operations {
            match *operation {
                Operation::Matmul(matrix) => return self.matmul(matrix, node),
                Operation::Rotate(_) => return self.rotate(node),
                Operation::Scores => return self.attention(node),
                _ => {}
            }
        }
        self.norm(node)
    }

    /// Returns the buffer of a tensor.
    fn tensor(&self, tensor: usize) -> &Tensor {
        match self.objects.get(&tensor) {
            Some(&object) => &self.own.buffers.objects[object],
            None => &self.own.buffers.hidden,
        }
    }

    fn layer(&self) -> u32 {
        self.layer.unwrap_or(self.first)
    }

    fn launch(&self, name: &str, text: &str, tensors: &[&Tensor]) -> Result<Launch, GpuError> {
        self.own.gpu.launch(name, text, tensors, [1, 1, 1])
    }

    fn push(&mut self, grid: Grid, launches: Vec<Launch>) {
        self.steps.push(Step { grid, launches });
    }

    fn variant(&self) -> Variant {
        Variant::of(self.own.gpu.capabilities())
    }

    fn norm(&mut self, node: &Node) -> Result<(), GpuError> {
        let adds = node.operations.contains(&Operation::Add);
        let before = self.layer();
        let mut post = None;
        let mut after = None;
        for operation in &node.operations {
            match *operation {
                Operation::Norm(norm @ (Norm::PostAttention | Norm::PostFeedForward)) => {
                    post = self.own.layers[&before].norm(norm);
                }
                Operation::Norm(Norm::Attention) => {
                    self.layer = Some(self.layer.map_or(self.first, |layer| layer + 1));
                    after = self.own.layers[&self.layer()].norm(Norm::Attention);
                }
                Operation::Norm(norm) => after = self.own.layers[&before].norm(norm),
                _ => {}
            }
        }
        let kernel = NormKernel {
            adds_change: adds,
            normalises_change: post.is_some(),
            normalises_hidden: after.is_some(),
            ..self.own.plain_norm()
        };
        let buffers = &self.own.buffers;
        let mut tensors = vec![&buffers.params, &buffers.hidden];
        if adds {
            tensors.push(self.tensor(node.inputs[0]));
        }
        tensors.extend(post);
        if let (Some(weight), Some(&out)) = (after, node.outputs.last()) {
            tensors.extend([weight, self.tensor(out)]);
        }
        let launch = self.launch("norm", &kernel.kernel(), &tensors)?;
        self.push(Grid::Norm, vec![launch]);
        Ok(())
    }

    fn matmul(&mut self, matrix: LayerMatrix, node: &Node) -> Result<(), GpuError> {
        let own = &self.own.layers[&self.layer()];
        let (weights, bias) = (&own.matrices[matrix as usize], own.biases[matrix as usize].as_ref());
        let (length, input) = (weights.length, node.inputs[0]);
        let quantised = weights.packed_format.input_granularity().filter(|_| self.phase == Phase::Prefill);
        if let Some(granularity) =
            quantised.filter(|&granularity| self.quantised != Some((input, granularity)))
        {
            let buffers = &self.own.buffers;
            let [quants, scales, sums] = &buffers.quantised;
            let text = quantise::kernel(length, granularity, Storage::Linear);
            let launch =
                self.launch("quantise", &text, &[&buffers.params, self.tensor(input), quants, scales, sums])?;
            self.push(Grid::Quantise { length, granularity }, vec![launch]);
            self.quantised = Some((input, granularity));
        }
        let gating = self.own.model.hyperparameters().gate_activation;
        let activates = node.operations.contains(&Operation::Activate);
        let multiplies_by_gate = node.operations.contains(&Operation::Multiply);
        for part in &weights.parts {
            let kernel = MatmulKernel {
                phase: self.phase,
                tiling: self.tiling,
                rows: part.rows,
                first_row: part.first_row,
                variant: self.variant(),
                has_bias: bias.is_some(),
                activation: activates.then_some(gating),
                multiplies_by_gate,
                ..weights.matmul_kernel()
            };
            let buffers = &self.own.buffers;
            let mut tensors = vec![&buffers.params, &part.texels];
            tensors.extend(&part.scales);
            if quantised.is_some() {
                tensors.extend(&buffers.quantised);
            } else {
                tensors.push(self.tensor(input));
            }
            tensors.push(self.tensor(node.outputs[0]));
            tensors.extend(bias);
            if multiplies_by_gate {
                tensors.push(self.tensor(node.inputs[1]));
            }
            let launch = self.launch("matmul", &kernel.kernel()?, &tensors)?;
            self.push(Grid::Matmul(kernel), vec![launch]);
        }
        Ok(())
    }

    fn rotate(&mut self, node: &Node) -> Result<(), GpuError> {
        let own = &self.own.layers[&self.layer()];
        let (shape, parameters) = (self.own.model.shape(), self.own.model.hyperparameters());
        let norms = own.norm(Norm::QueryHeads).zip(own.norm(Norm::KeyHeads));
        let kernel = RotateKernel {
            shape: weights::attention_shape(shape, self.own.options),
            pairs: parameters.rope.pairs,
            pair_count: parameters.rope.frequencies.len() as u32,
            storage: Storage::Linear,
            norm_epsilon: norms.map(|_| parameters.epsilon),
            variant: self.variant(),
        };
        let (text, buffers) = (kernel.kernel()?, &self.own.buffers);
        let mut launches = Vec::new();
        for [keys, values] in &own.caches {
            let mut tensors = vec![&buffers.params];
            tensors.extend(node.inputs.iter().map(|&read| self.tensor(read)));
            tensors.extend([&buffers.angles, self.tensor(node.outputs[0]), keys, values]);
            if let Some((query, key)) = norms {
                tensors.extend([query, key]);
            }
            launches.push(self.launch("rotate", &text, &tensors)?);
        }
        self.push(Grid::Rotate(kernel), launches);
        Ok(())
    }

    fn attention(&mut self, node: &Node) -> Result<(), GpuError> {
        let own = &self.own.layers[&self.layer()];
        let (shape, parameters) = (self.own.model.shape(), self.own.model.hyperparameters());
        let kernel = AttentionKernel {
            shape: weights::attention_shape(shape, self.own.options),
            scale: parameters.attention_scale,
            soft_cap: parameters.attention_cap,
            window: parameters.attention_window(self.layer()),
            storage: Storage::Linear,
            variant: self.variant(),
        };
        let (text, buffers) = (kernel.kernel()?, &self.own.buffers);
        let mut launches = Vec::new();
        for [keys, values] in &own.caches {
            let tensors =
                [&buffers.params, self.tensor(node.inputs[0]), keys, values, self.tensor(node.outputs[0])];
            launches.push(self.launch("attention", &text, &tensors)?);
        }
        self.push(Grid::Attention(kernel), launches);
        Ok(())
    }
}
