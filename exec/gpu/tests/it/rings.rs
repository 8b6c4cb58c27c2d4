//! A device of a ring continues when its GPU is lost, and its trace names the backend that computed.
//!
//! The trained model on one device, whose runner carries a plan out as in any ring, along the golden tokens.

use std::sync::{Arc, Mutex};

use hearth_gpu::backend::Accelerated;
use hearth_gpu::kernels::product::Tiling;
use hearth_gpu::{CapabilityMask, Gpu, WarningSink};
use hearth_profiles::Document;
use hearth_ring::LocalModel;
use hearth_ring::execution::{Outbox, StageRunner};
use hearth_runtime::sampler::greedy;
use hearth_runtime::{Accelerator, Progress};
use hearth_schema::Plan;
use hearth_schema::pass::Pass;
use hearth_schema::trace::Kind;
use hearth_schema::trace::Record;
use hearth_schema::trace::Resource;

use crate::gpu::{alone, open};
use crate::models::{golden, models, tokens};

const FILE: &str = "psalm-7m-q8_0.gguf";

/// A runner that computes with a GPU, and what it has to say.
struct Ring {
    model: LocalModel,
    runner: Option<StageRunner>,
    warnings: Arc<Mutex<Vec<String>>>,
    /// The prompt, and the golden tokens.
    so_far: Vec<u32>,
    prompt: usize,
}

impl Ring {
    fn new(gpu: &Arc<Gpu>) -> Ring {
        let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
        let pushed = warnings.clone();
        let sink: WarningSink = Arc::new(move |warning| pushed.lock().unwrap().push(warning.to_owned()));
        let gpu = gpu.clone();
        let accelerator = Accelerator::new(move |place| {
            let open = || gpu.alive().map(|()| gpu.clone());
            Ok(Box::new(Accelerated::open(open, |_| Tiling::USUAL.into(), place, sink.clone())?))
        });
        let model = LocalModel::open(&models().join(FILE)).unwrap().with_accelerator(Some(accelerator));
        let run = &golden(FILE)[0];
        let (prompt, greedy_ids) = (tokens(&run["prompt_ids"]), tokens(&run["greedy_ids"]));
        let so_far = [&prompt[..], &greedy_ids].concat();
        let plan = plan(&model, 8);
        let progress = Progress::default();
        let mut runner = StageRunner::new(&plan, 0, &model, 2, Outbox::new(), 1, &progress).unwrap();
        runner.set_sampler(0, Box::new(greedy));
        Ring { model, runner: Some(runner), warnings, so_far, prompt: prompt.len() }
    }

    fn runner(&mut self) -> &mut StageRunner {
        self.runner.as_mut().unwrap()
    }

    /// The pass of these positions gives the golden token.
    fn pass(&mut self, index: u32, from: usize, to: usize) {
        let known = self.so_far[..to].to_vec();
        let pass = Pass::plain(index, from as u32, (to - from) as u32, true);
        let out = self.runner().begin_pass(pass, &known).unwrap().expect("one device is the whole ring");
        assert_eq!(out.tokens, [self.so_far[to]], "pass {index}");
    }
}

/// All layers on one device, so many of them on its GPU; the output too if they all are.
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

/// Who computed what of the plan's GPU part.
fn resources(records: &[Record], pass: u32) -> Vec<Resource> {
    let of_gpu = |record: &&Record| {
        let layers = record.kind == Kind::Compute && record.layers.is_some_and(|[first, _]| first == 0);
        record.pass == pass && (layers || record.kind == Kind::Output)
    };
    records.iter().filter(of_gpu).map(|record| record.resource).collect()
}

#[test]
fn steps_that_the_processors_do_for_a_lost_gpu_are_theirs_in_the_trace() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
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
    // What processors did has its cost, and is found in memory or read.
    let costs = records.iter().filter(|record| record.kind == Kind::Compute && record.pass == 3);
    assert!(costs.clone().count() == 1 && costs.clone().all(|record| record.cost.is_some()));
}

#[test]
fn a_ring_is_renewed_on_processors_when_the_gpu_cannot_be_opened_again() {
    let _alone = alone();
    let Some(gpu) = open(CapabilityMask::default()) else { return };
    let mut ring = Ring::new(&gpu);
    let prompt = ring.prompt;
    ring.pass(0, 0, prompt);
    gpu.destroy();
    let (plan, runner) = (plan(&ring.model, 6), ring.runner.take().unwrap());
    let runner = runner.reconfigure(&plan, 1, &ring.model, Outbox::new(), 2, &Progress::default()).unwrap();
    ring.runner = Some(runner);
    // A renewed ring computes again what was there.
    ring.pass(1, 0, prompt + 1);
    ring.pass(2, prompt + 1, prompt + 2);
    let warnings = ring.warnings.lock().unwrap().clone();
    assert!(
        warnings.len() == 1 && warnings[0].contains("was lost") && warnings[0].contains("processors"),
        "{warnings:?}"
    );
    let all = ring.runner().take_trace();
    assert_eq!(resources(&all[1].1.records, 2), [Resource::Cpu; 2]);
    // A run that has not begun does not begin without what its plan asks for.
    let begun = StageRunner::new(&plan, 0, &ring.model, 2, Outbox::new(), 3, &Progress::default());
    let error = begun.err().expect("the GPU is gone").to_string();
    assert!(error.contains("the GPU was lost"), "{error}");
}
