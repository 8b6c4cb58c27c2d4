//! Tests that a device of a ring continues when its GPU is lost, and that its trace names the processor of each step.
//!
//! The trained model runs on a ring of one device and must generate its golden tokens.

use std::sync::Arc;

use hearth_gpu::backend::GpuBackend;
use hearth_gpu::kernels::matmul::Tiling;
use hearth_gpu::{CapabilityMask, Gpu};
use hearth_profiles::Document;
use hearth_ring::execution::{Outbox, StageRunner};
use hearth_ring::{LocalModel, SequenceOutput};
use hearth_runtime::sampler::greedy_token;
use hearth_runtime::{BackendFactory, UploadProgressReporter};
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::trace::{Resource, StepKind, StepRecord};

use crate::gpu::open_and_lock;
use crate::models::{Warnings, golden_runs, models_folder, parse_tokens, warning_sink};

const FILE: &str = "psalm-7m-q8_0.gguf";

/// A ring of one device with a GPU, and the warnings of its backend.
struct Ring {
    model: LocalModel,
    runner: Option<StageRunner>,
    warnings: Warnings,
    /// The prompt followed by the golden tokens.
    all_tokens: Vec<u32>,
    /// Number of tokens in the prompt.
    prompt: usize,
}

impl Ring {
    fn new(gpu: &Arc<Gpu>) -> Ring {
        let (sink, warnings) = warning_sink();
        let gpu = gpu.clone();
        let factory = BackendFactory::new(move |options| {
            let open = || gpu.check_not_lost().map(|()| gpu.clone());
            Ok(Box::new(GpuBackend::open(open, |_| Tiling::DEFAULT.into(), options, sink.clone())?))
        });
        let model =
            LocalModel::open(&models_folder().join(FILE)).unwrap().with_backend_factory(Some(factory));
        let run = &golden_runs(FILE)[0];
        let (prompt, greedy_ids) = (parse_tokens(&run["prompt_ids"]), parse_tokens(&run["greedy_ids"]));
        let all_tokens = [&prompt[..], &greedy_ids].concat();
        let plan = plan(&model, 8);
        let progress = UploadProgressReporter::default();
        let mut runner = StageRunner::new(&plan, 0, &model, 2, Outbox::new(), 1, &progress).unwrap();
        runner.set_output(0, SequenceOutput::Tokens(Box::new(greedy_token)));
        Ring { model, runner: Some(runner), warnings, all_tokens, prompt: prompt.len() }
    }

    fn runner(&mut self) -> &mut StageRunner {
        self.runner.as_mut().unwrap()
    }

    /// Runs a pass of the positions `from..to` and checks that the pass generates the golden token.
    fn pass(&mut self, index: u32, from: usize, to: usize) {
        let known = self.all_tokens[..to].to_vec();
        let pass = Pass::new(index, from as u32, (to - from) as u32, true);
        let texts = [(0, &known[..])].into();
        let out = self.runner().begin_batch(&pass.into(), &texts).unwrap();
        assert_eq!(
            out.expect("one device is the whole ring").tokens,
            [[self.all_tokens[to]]],
            "pass {index}"
        );
    }
}

/// Returns a plan for one device whose GPU computes `gpu_layers` layers, and the output matrix too if these are all.
fn plan(model: &LocalModel, gpu_layers: u32) -> Arc<Plan> {
    let output = if gpu_layers == 8 { "gpu" } else { "cpu" };
    let text = format!(
        "schema: plan/1\nscenario: {{name: test, digest: 'sha256:0'}}\nmodel: {{name: psalm, digest: '{}', \
         shape_digest: '{}', layers: 8}}\nplanner: {{strategy: manual}}\nrounds: 1\ncontext: 128\n\
         kv_cache: f32\noutput: {output}\ndevices:\n\
         - {{name: a, role: head, window: 8, gpu_layers: {gpu_layers}, residency: {{policy: os}}}}\n",
        model.profile.digest,
        model.profile.shape_digest()
    );
    Arc::new(Plan::from_yaml(&text).unwrap())
}

/// Returns the processors that computed the first window of layers and the output matrix in a pass.
fn resources(records: &[StepRecord], pass: u32) -> Vec<Resource> {
    let of_gpu = |record: &&StepRecord| {
        let layers = record.kind == StepKind::Compute && record.layers.is_some_and(|[first, _]| first == 0);
        record.pass_index == pass && (layers || record.kind == StepKind::Output)
    };
    records.iter().filter(of_gpu).map(|record| record.resource).collect()
}

#[test]
fn trace_names_the_cpu_for_the_steps_of_a_lost_gpu() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut ring = Ring::new(&gpu);
    let prompt = ring.prompt;
    ring.pass(0, 0, prompt);
    ring.pass(1, prompt, prompt + 1);
    gpu.destroy();
    ring.pass(2, prompt + 1, prompt + 2);
    ring.pass(3, prompt + 2, prompt + 3);
    assert_eq!(ring.warnings.lock().unwrap().len(), 1);
    let all = ring.runner().take_trace();
    let records = &all[0].1.records;
    for pass in 0..4 {
        let expected = if pass < 2 { Resource::Gpu } else { Resource::Cpu };
        assert_eq!(resources(records, pass), [expected; 2], "pass {pass}");
    }
    // A step of the CPU has its cost.
    let costs = records.iter().filter(|record| record.kind == StepKind::Compute && record.pass_index == 3);
    assert!(costs.clone().count() == 1 && costs.clone().all(|record| record.cost.is_some()));
}

#[test]
fn reconfigured_ring_uses_the_cpu_when_the_gpu_cannot_be_opened() {
    let Some((_lock, gpu)) = open_and_lock(CapabilityMask::default()) else { return };
    let mut ring = Ring::new(&gpu);
    let prompt = ring.prompt;
    ring.pass(0, 0, prompt);
    gpu.destroy();
    let (plan, runner, progress) =
        (plan(&ring.model, 6), ring.runner.take().unwrap(), UploadProgressReporter::default());
    ring.runner = Some(runner.reconfigure(&plan, 1, &ring.model, Outbox::new(), 2, &progress).unwrap());
    // A reconfigured ring computes all earlier positions again.
    ring.pass(1, 0, prompt + 1);
    ring.pass(2, prompt + 1, prompt + 2);
    let warnings = ring.warnings.lock().unwrap().clone();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("was lost") && warnings[0].contains("CPU"), "{warnings:?}");
    let all = ring.runner().take_trace();
    assert_eq!(resources(&all[1].1.records, 2), [Resource::Cpu; 2]);
    // A new run does not start without the GPU that its plan needs.
    let started = StageRunner::new(&plan, 0, &ring.model, 2, Outbox::new(), 3, &progress);
    let error = started.err().expect("the GPU is lost").to_string();
    assert!(error.contains("the GPU was lost"), "{error}");
}
