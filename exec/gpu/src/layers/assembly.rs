//! Assembly of a graph into kernel launches over planned memory.
//!
//! The nodes of the fused graph become launches in the order of the nodes. In prefill, a kernel that quantises the
//! inputs precedes each matmul with quantised weights, unless these inputs are already quantised. After the last layer
//! of the range there is a residual addition and no norm: the norm belongs to the next layer.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{BATCH_TOKENS, GpuLayers, Grid, Step, weights};
use crate::device::{GpuBuffer, Launch};
use crate::error::GpuError;
use crate::graph::{FusionOptions, Graph, LayerMatrix, Node, Norm, Operation, PassSize, decoder_graph, fuse};
use crate::kernels::attention::AttentionKernel;
use crate::kernels::matmul::{MatmulKernel, Phase, Tiling};
use crate::kernels::norm::NormKernel;
use crate::kernels::quantise::{self, Granularity};
use crate::kernels::rope::RopeKernel;
use crate::memory::{TensorUsageRecord, greedy_by_size_improved};
use crate::virtual_tensor::Storage;

/// The state of the assembly of one range of layers in one phase.
struct Assembly<'a> {
    own: &'a GpuLayers,
    phase: Phase,
    tiling: Tiling,
    /// The index of the shared buffer of each intermediate tensor. Hidden rows have a separate buffer.
    objects: BTreeMap<usize, usize>,
    /// The layer of the current node; `None` before the first layer of the range.
    layer: Option<u32>,
    /// The first layer of the range.
    first: u32,
    /// The tensor that is in the buffers for quantised inputs, and the granularity of its quantisation.
    quantised: Option<(usize, Granularity)>,
    steps: Vec<Step>,
}

impl GpuLayers {
    /// Prepares the kernel launches for a range of layers in one phase and returns them as steps.
    pub(super) fn steps(
        &mut self,
        layers: &Range<u32>,
        phase: Phase,
        tiling: Tiling,
    ) -> Result<Vec<Step>, GpuError> {
        let size = PassSize {
            layers: layers.end - layers.start,
            tokens: u64::from(BATCH_TOKENS),
            context_length: u64::from(self.options.context),
            element_bytes: size_of::<f32>() as u64,
        };
        let graph = fuse(decoder_graph(self.model.shape(), size), FusionOptions::ALL);
        let hidden = hidden_rows(&graph);
        let (tensors, records) = graph.usage_records();
        let (tensors, records): (Vec<usize>, Vec<TensorUsageRecord>) = tensors
            .into_iter()
            .zip(records)
            .filter(|(tensor, record)| !hidden.contains(tensor) && record.size > 0)
            .unzip();
        let plan = greedy_by_size_improved(&records);
        // All ranges and phases share the same buffers: the i-th largest object of each plan uses buffer i.
        let mut order: Vec<usize> = (0..plan.object_sizes.len()).collect();
        order.sort_by_key(|&object| std::cmp::Reverse(plan.object_sizes[object]));
        let sizes: Vec<u64> = order.iter().map(|&object| plan.object_sizes[object]).collect();
        self.buffers.reserve_objects(&self.gpu, &sizes)?;
        let rank: BTreeMap<usize, usize> = order.into_iter().zip(0..).collect();
        let objects =
            tensors.into_iter().zip(&plan.object_ids).map(|(tensor, id)| (tensor, rank[id])).collect();
        let (own, first) = (&*self, layers.start);
        let mut assembly =
            Assembly { own, phase, tiling, objects, layer: None, first, quantised: None, steps: Vec::new() };
        for node in graph.nodes.iter().filter(|node| node.operations[0] != Operation::Embed) {
            assembly.node(node)?;
        }
        Ok(assembly.steps)
    }
}

/// Returns the indices of the tensors that are hidden states: the embeddings and the results of residual additions.
fn hidden_rows(graph: &Graph) -> Vec<usize> {
    let is_hidden = |operation: &Operation| matches!(operation, Operation::Embed | Operation::Add);
    let nodes = graph.nodes.iter().filter(|node| node.operations.iter().any(is_hidden));
    nodes.filter_map(|node| node.outputs.first().copied()).collect()
}

impl Assembly<'_> {
    fn node(&mut self, node: &Node) -> Result<(), GpuError> {
        for operation in &node.operations {
            match *operation {
                Operation::Matmul(matrix) => return self.matmul(matrix, node),
                Operation::Rope => return self.rope(node),
                Operation::Scores => return self.attention(node),
                _ => {}
            }
        }
        self.norm(node)
    }

    /// Returns the buffer that stores the tensor with the index `tensor`.
    fn tensor(&self, tensor: usize) -> &GpuBuffer {
        match self.objects.get(&tensor) {
            Some(&object) => &self.own.buffers.objects[object],
            None => &self.own.buffers.hidden,
        }
    }

    fn layer(&self) -> u32 {
        self.layer.unwrap_or(self.first)
    }

    fn launch(&self, name: &str, text: &str, tensors: &[&GpuBuffer]) -> Result<Launch, GpuError> {
        self.own.gpu.prepare_launch(name, text, tensors, [1, 1, 1])
    }

    fn push(&mut self, grid: Grid, launches: Vec<Launch>) {
        self.steps.push(Step { grid, launches });
    }

    fn norm(&mut self, node: &Node) -> Result<(), GpuError> {
        let adds = node.operations.contains(&Operation::Add);
        let before = self.layer();
        let mut post = None;
        let mut after = None;
        for operation in &node.operations {
            match *operation {
                Operation::Norm(norm @ (Norm::PostAttention | Norm::PostFeedForward)) => {
                    post = self.own.layers[&before].norms.get(&norm);
                }
                Operation::Norm(Norm::Attention) => {
                    self.begin_layer();
                    after = self.own.layers[&self.layer()].norms.get(&Norm::Attention);
                }
                Operation::Norm(norm @ (Norm::QueryRow | Norm::KeyRow)) => return self.row_norm(norm, node),
                Operation::Norm(norm) => after = self.own.layers[&before].norms.get(&norm),
                _ => {}
            }
        }
        let kernel = NormKernel {
            adds_residual: adds,
            has_post_norm: post.is_some(),
            normalises_hidden: after.is_some(),
            ..weights::plain_norm_kernel(&self.own.gpu, &self.own.model)
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
        let launch = self.launch("norm", &kernel.wgsl_source(), &tensors)?;
        self.push(Grid::Norm, vec![launch]);
        Ok(())
    }

    /// Adds the norm of all query or key heads of a token together.
    fn row_norm(&mut self, norm: Norm, node: &Node) -> Result<(), GpuError> {
        let shape = self.own.model.shape().attention();
        let width = if norm == Norm::QueryRow { shape.query_width() } else { shape.key_width() };
        let kernel = NormKernel {
            width: width as u32,
            normalises_hidden: true,
            ..weights::plain_norm_kernel(&self.own.gpu, &self.own.model)
        };
        let weight = &self.own.layers[&self.layer()].norms[&norm];
        let (rows, out) = (self.tensor(node.inputs[0]), self.tensor(node.outputs[0]));
        let tensors = [&self.own.buffers.params, rows, weight, out];
        let launch = self.launch("norm", &kernel.wgsl_source(), &tensors)?;
        self.push(Grid::Norm, vec![launch]);
        Ok(())
    }

    fn begin_layer(&mut self) {
        self.layer = Some(self.layer.map_or(self.first, |layer| layer + 1));
    }

    fn matmul(&mut self, matrix: LayerMatrix, node: &Node) -> Result<(), GpuError> {
        // In architectures without a norm before attention, the first matmul begins a layer.
        if matrix == LayerMatrix::Query && !self.own.model.shape().architecture.spec().has_pre_norms {
            self.begin_layer();
        }
        let own = &self.own.layers[&self.layer()];
        let (weights, bias) = (&own.matrices[matrix as usize], own.biases[matrix as usize].as_ref());
        let (length, input) = (weights.row_length, node.inputs[0]);
        let quantised = weights.packed_format.input_granularity().filter(|_| self.phase == Phase::Prefill);
        let missing = quantised.filter(|&granularity| self.quantised != Some((input, granularity)));
        if let Some(granularity) = missing {
            let buffers = &self.own.buffers;
            let [quants, scales, sums] = &buffers.quantised;
            let bound = [&buffers.params, self.tensor(input), quants, scales, sums];
            let launch = self.launch("quantise", &quantise::wgsl_source(length, granularity), &bound)?;
            self.push(Grid::Quantise { length, granularity }, vec![launch]);
            self.quantised = Some((input, granularity));
        }
        let has = |operation| node.operations.contains(&operation);
        let gate_activation = self.own.model.hyperparameters().gate_activation;
        let multiplies_by_gate = has(Operation::Multiply);
        let kernel = MatmulKernel {
            phase: self.phase,
            tiling: self.tiling,
            has_bias: bias.is_some(),
            activation: has(Operation::Activate).then_some(gate_activation),
            multiplies_by_gate,
            ..weights.matmul_kernel(&self.own.gpu, 0, weights.rows)
        };
        let buffers = &self.own.buffers;
        let mut others: Vec<&GpuBuffer> = match quantised {
            Some(_) => buffers.quantised.iter().collect(),
            None => vec![self.tensor(input)],
        };
        others.push(self.tensor(node.outputs[0]));
        others.extend(bias);
        if multiplies_by_gate {
            others.push(self.tensor(node.inputs[1]));
        }
        let launches = weights.part_launches(&self.own.gpu, "matmul", kernel, &buffers.params, &others, 1)?;
        for (kernel, launch) in launches {
            self.push(Grid::Matmul(kernel), vec![launch]);
        }
        Ok(())
    }

    fn rope(&mut self, node: &Node) -> Result<(), GpuError> {
        let own = &self.own.layers[&self.layer()];
        let (shape, parameters) = (self.own.model.shape(), self.own.model.hyperparameters());
        let rope_index = parameters.rope_index(self.layer(), self.own.options.context);
        let rope = &parameters.ropes[rope_index];
        let norms = own.norms.get(&Norm::QueryHeads).zip(own.norms.get(&Norm::KeyHeads));
        let kernel = RopeKernel {
            shape: weights::attention_shape(shape, self.own.options),
            pair_layout: rope.pair_layout,
            pair_count: rope.frequencies.len() as u32,
            input_storage: Storage::Linear,
            norm_epsilon: norms.map(|_| parameters.rms_norm_epsilon),
            capabilities: self.own.gpu.capabilities(),
        };
        let (text, buffers) = (kernel.wgsl_source()?, &self.own.buffers);
        let mut shared = vec![&buffers.params];
        shared.extend(node.inputs.iter().map(|&read| self.tensor(read)));
        shared.extend([&buffers.angles[rope_index], self.tensor(node.outputs[0])]);
        let norms = norms.map_or(Vec::new(), |(query, key)| vec![query, key]);
        let launches = own.caches.iter().map(|[keys, values]| {
            self.launch("rotate", &text, &[&shared[..], &[keys, values], &norms].concat())
        });
        let launches = launches.collect::<Result<_, _>>()?;
        self.push(Grid::Rope(kernel), launches);
        Ok(())
    }

    fn attention(&mut self, node: &Node) -> Result<(), GpuError> {
        let own = &self.own.layers[&self.layer()];
        let (shape, parameters) = (self.own.model.shape(), self.own.model.hyperparameters());
        let kernel = AttentionKernel {
            shape: weights::attention_shape(shape, self.own.options),
            scale: parameters.attention_scale,
            soft_cap: parameters.attention_softcap,
            sliding_window: parameters.attention_window(self.layer()),
            output_storage: Storage::Linear,
        };
        let (text, buffers) = (kernel.wgsl_source()?, &self.own.buffers);
        let (queries, out) = (self.tensor(node.inputs[0]), self.tensor(node.outputs[0]));
        let launches = own.caches.iter().map(|[keys, values]| {
            self.launch("attention", &text, &[&buffers.params, queries, keys, values, out])
        });
        let launches = launches.collect::<Result<_, _>>()?;
        self.push(Grid::Attention(kernel), launches);
        Ok(())
    }
}
