//! Export of plans to llama.cpp and prima.cpp: whole command lines, and the rule by which llama.cpp assigns layers.

use hearth_core::{Cluster, Member};
use hearth_halda::export::{
    DeviceCommand, Engine, ExportError, ExportedPlan, LayerRange, ModelFiles, export,
};
use hearth_profiles::device::{GpuKind, shipped_profile as shipped_device};
use hearth_profiles::document::Document;
use hearth_profiles::model::shipped_profile;
use hearth_profiles::{Fraction, Sourced};
use hearth_schema::plan::{
    Plan, PlanKind, PlannedDevice, PlannedDraftModel, PlannedModel, PlannerRecord, Processor, Role,
};
use hearth_schema::residency::{Residency, ResidencyOptions};
use hearth_schema::scenario::{ActivationFormat, KvFormat, ModelRef, ResourceLimits, Scenario, Speculation};
use proptest::prelude::*;

use crate::fixtures::{self, config_with_cases, scenario_record};

const FILES: ModelFiles = ModelFiles { model: Some("m.gguf"), draft_model: Some("d.gguf") };

/// A device of a test: name, shipped profile, window, GPU layers, and address (empty if there is none).
type Row = (&'static str, &'static str, u32, u32, &'static str);

/// Desktop, laptop and phone, with addresses.
const HOME: [Row; 3] = [
    ("desktop", "d3", 16, 10, ""),
    ("laptop", "d2", 10, 5, "192.168.1.7:9001"),
    ("phone", "d4", 6, 0, "phone.local:9002"),
];

/// A plan with its scenario and cluster.
struct Case {
    plan: Plan,
    scenario: Scenario,
    cluster: Cluster,
}

impl Case {
    fn new(model: &str, rows: &[Row]) -> Case {
        let link = "{latency: {value: 1 ms, source: t}, bandwidth: {value: 1 GB/s, source: t}}";
        let entry = |(name, profile, ..): &Row| format!("{{name: {name}, profile: {profile}}}");
        let entries = rows.iter().map(entry).collect::<Vec<_>>().join(", ");
        let text = format!(
            "schema: scenario/1\nname: home\nmodel: {{profile: {model}}}\ncontext: 1024\n\
             workload: {{prompt: 32, generate: 16}}\ndevices: [{entries}]\nlinks: {{default: {link}}}\n"
        );
        let scenario = Scenario::from_yaml(&text).expect("a scenario");
        let member = |(name, profile, ..): &Row| Member {
            name: (*name).to_owned(),
            address: None,
            device: shipped_device(profile).expect("a shipped device"),
            residency: None,
        };
        let members = rows.iter().map(member).collect();
        let cluster = fixtures::cluster(model, members, scenario.links.clone());
        let planner = PlannerRecord { strategy: "manual".to_owned(), options: Vec::new() };
        let mut plan = Plan::empty(scenario_record(), PlannedModel::from_profile(&cluster.model), planner);
        plan.context_length = 1024;
        plan.devices = rows.iter().enumerate().map(planned_device).collect();
        plan.rounds = plan.model.layers.div_ceil(plan.layers_per_round());
        plan.validate().expect("a plan");
        Case { plan, scenario, cluster }
    }

    fn export(&self, engine: Engine) -> ExportedPlan {
        self.plan.validate().expect("a valid plan");
        export(engine, &self.plan, &self.scenario, &self.cluster, FILES).expect("commands")
    }
}

fn planned_device((index, row): (usize, &Row)) -> PlannedDevice {
    let (name, _, window, gpu_layers, address) = *row;
    let role = match (index, window) {
        (0, _) => Role::Head,
        (_, 0) => Role::Relay,
        _ => Role::Worker,
    };
    let address = (!address.is_empty()).then(|| address.to_owned());
    PlannedDevice { gpu_layers, address, ..PlannedDevice::new(name, role, window) }
}

/// Checks the command lines and the words that each sentence about what is not expressed must have.
#[track_caller]
fn check(exported: &ExportedPlan, lines: &[&str], not_expressed: &[&str]) {
    let commands: Vec<&str> = exported.commands.iter().map(|command| command.command.as_str()).collect();
    assert_eq!(commands, lines);
    let sentences = &exported.not_expressed;
    assert_eq!(sentences.len(), not_expressed.len(), "{sentences:#?}");
    for (sentence, words) in sentences.iter().zip(not_expressed) {
        assert!(sentence.contains(words), "no `{words}` in `{sentence}`");
    }
}

fn layers_texts(exported: &ExportedPlan) -> Vec<String> {
    exported.commands.iter().map(DeviceCommand::layers_text).collect()
}

#[test]
fn one_device_with_some_layers_on_its_gpu() {
    // Of 32 layers and the output matrix, the last 20 + 1 leave the CPU, and `-ot` returns the output matrix.
    let exported = Case::new("llama-8b", &[("desktop", "d3", 32, 20, "")]).export(Engine::LlamaCpp);
    let line =
        r"llama-server -m m.gguf -c 1024 -np 1 -t 16 --device CUDA0 -ngl 21 -ot '^output\.weight$=CPU'";
    check(&exported, &[line], &["the layers on the GPU of `desktop` come before"]);
    assert_eq!(layers_texts(&exported), ["layers 0-11 on the CPU, 12-31 on the GPU"]);
    assert!(exported.placeholders.is_empty());
}

#[test]
fn one_device_with_all_layers_on_one_processor() {
    let mut case = Case::new("llama-8b", &[("desktop", "d3", 32, 32, "")]);
    case.plan.output_processor = Processor::Gpu;
    let line = "llama-server -m m.gguf -c 1024 -np 1 -t 16 --device CUDA0 -ngl 33";
    check(&case.export(Engine::LlamaCpp), &[line], &[]);
    let case = Case::new("llama-8b", &[("desktop", "d3", 32, 0, "")]);
    let line = "llama-server -m m.gguf -c 1024 -np 1 -t 16 --device none -ngl 0";
    check(&case.export(Engine::LlamaCpp), &[line], &[]);
}

#[test]
fn ring_of_three_with_one_round() {
    let exported = Case::new("llama-8b", &HOME).export(Engine::LlamaCpp);
    // The CPU of the head has 6 layers, so 26 and the output matrix leave it: 10 + 5 + 5 + (6 + 1) = 27.
    let lines = [
        "ggml-rpc-server -H 192.168.1.7 -p 9001 -d CUDA0,CPU -t 8",
        "ggml-rpc-server -H 0.0.0.0 -p 9002 -d CPU -t 8",
        r"llama-server -m m.gguf -c 1024 -np 1 -t 16 --rpc 192.168.1.7:9001,phone.local:9002 --device CUDA0,RPC0,RPC1,RPC2 -ngl 27 --tensor-split 10,5,5,7 -ot '^output\.weight$=CPU'",
    ];
    let limits =
        ["come before", "Residency of `laptop`, `phone`", "through the head", "neither a key nor encryption"];
    check(&exported, &lines, &limits);
    let layers = [
        "layers 16-20 on the GPU, 21-25 on the CPU",
        "layers 26-31 on the CPU",
        "layers 0-5 on the CPU, 6-15 on the GPU",
    ];
    assert_eq!(layers_texts(&exported), layers);
    assert!(exported.notes.iter().any(|note| note.contains("`phone` listens on all its addresses")));
    assert!(exported.placeholders.is_empty(), "the head needs no address");
}

#[test]
fn rounds_become_adjacent_layers() {
    // 32 layers in rounds of 4 + 2 + 2: four rounds, in which the GPU of the head has 4 * 3 layers.
    let rows =
        [("desktop", "d3", 4, 3, ""), ("laptop", "d2", 2, 0, ""), ("phone", "d4", 2, 0, "[fe80::1]:9001")];
    let exported = Case::new("llama-8b", &rows).export(Engine::LlamaCpp);
    let lines = [
        "ggml-rpc-server -H LAPTOP_ADDRESS -p 50052 -d CPU -t 8",
        "ggml-rpc-server -H PHONE_ADDRESS -p 50052 -d CPU -t 8",
        r"llama-server -m m.gguf -c 1024 -np 1 -t 16 --rpc LAPTOP_ADDRESS:50052,PHONE_ADDRESS:50052 --device CUDA0,RPC0,RPC1 -ngl 29 --tensor-split 12,8,9 -ot '^output\.weight$=CPU'",
    ];
    let limits = [
        "4 rounds",
        "come before",
        "Residency of `laptop`, `phone`",
        "through the head",
        "IPv6 address of `phone`",
        "encryption",
    ];
    check(&exported, &lines, &limits);
    assert_eq!(layers_texts(&exported)[2], "layers 0-3 on the CPU, 4-15 on the GPU");
    let words: Vec<&str> = exported.placeholders.iter().map(|word| word.name.as_str()).collect();
    assert_eq!(words, ["LAPTOP_ADDRESS", "PHONE_ADDRESS"]);
    assert_eq!(exported.placeholders[0].meaning, "the address of `laptop`");
}

#[test]
fn mixture_with_managed_residency() {
    let mut case =
        Case::new("qwen3-30b-a3b", &[("desktop", "d3", 30, 12, ""), ("phone", "d4", 18, 0, "10.0.0.2:1")]);
    for device in &mut case.plan.devices {
        device.residency = ResidencyOptions::with_policy(Residency::Managed);
    }
    let exported = case.export(Engine::LlamaCpp);
    let lines = [
        "ggml-rpc-server -H 10.0.0.2 -p 1 -d CPU -t 8",
        r"llama-server -m m.gguf -c 1024 -np 1 -t 16 --rpc 10.0.0.2:1 --device CUDA0,RPC0 -ngl 31 --tensor-split 12,19 -ot '^output\.weight$=CPU'",
    ];
    let limits = ["come before", "experts are not cached as a whole", "Residency of `phone`", "encryption"];
    check(&exported, &lines, &limits);
    // 18 layers of about 360 MiB each do not fit in the memory of the phone.
    assert!(exported.not_expressed[2].contains("On `phone`, 6."), "{}", exported.not_expressed[2]);
}

#[test]
fn caches_sequences_and_drafts_have_flags() {
    let mut case = Case::new("llama-8b", &[("desktop", "d3", 32, 0, "")]);
    case.plan.kv_cache_format = KvFormat::Q8_0;
    case.plan.sequences = 4;
    let line = "llama-server -m m.gguf -c 4096 -np 4 -ctk q8_0 -ctv q8_0 -t 16 --device none -ngl 0";
    check(&case.export(Engine::LlamaCpp), &[line], &[]);
    case.plan.cache_tokens = Some(2048);
    let line = "llama-server -m m.gguf -c 2048 -np 4 -kvu --kv-unified-per-slot 1024 -ctk q8_0 -ctv q8_0 -t 16 --device none -ngl 0";
    check(&case.export(Engine::LlamaCpp), &[line], &[]);

    let mut case = Case::new("llama-8b", &[("desktop", "d3", 32, 0, "")]);
    let draft = shipped_profile("1b").expect("a shipped model");
    let planned = PlannedModel::from_profile(&draft);
    case.cluster.draft_model = Some(draft);
    case.cluster.workload.speculation = Some(Speculation {
        draft_model: ModelRef { profile: Some("1b".to_owned()), file: None },
        tokens: 4,
        acceptance: Sourced::new(Fraction(0.5), "a test"),
        processor: None,
    });
    for (processor, flags) in
        [(Processor::Cpu, "-devd none -ngld 0"), (Processor::Gpu, "-devd CUDA0 -ngld all")]
    {
        case.plan.draft_model = Some(PlannedDraftModel { model: planned.clone(), processor });
        let line = format!(
            "llama-server -m m.gguf -c 1024 -np 1 -t 16 --device none -ngl 0 -md d.gguf --spec-type draft-simple --spec-draft-n-max 4 {flags}"
        );
        check(&case.export(Engine::LlamaCpp), &[&line], &[]);
    }
}

#[test]
fn output_matrix_stays_on_the_head() {
    let rows = [("desktop", "d3", 16, 16, ""), ("laptop", "d2", 16, 16, "10.0.0.2:1")];
    let command = |case: &Case| case.export(Engine::LlamaCpp).commands.pop().expect("the head").command;
    let mut case = Case::new("llama-8b", &rows);
    case.plan.output_processor = Processor::Gpu;
    assert!(command(&case).ends_with(r"--tensor-split 16,17 -ot '^output\.weight$=CUDA0'"));
    case.cluster.members[0].device.gpu.as_mut().expect("a GPU").kind = GpuKind::Metal;
    assert!(
        command(&case)
            .ends_with(r"--device MTL0,RPC0 -ngl 33 --tensor-split 16,17 -ot '^output\.weight$=MTL0'")
    );

    case.cluster.model.shape.has_tied_embeddings = true;
    case.plan.model = PlannedModel::from_profile(&case.cluster.model);
    case.plan.model.shape_digest = case.cluster.model.shape_digest();
    assert!(command(&case).ends_with("--tensor-split 16,17"));
    let limits = case.export(Engine::LlamaCpp).not_expressed;
    assert!(
        limits[0].contains("on `laptop`, the last device, instead of the GPU of `desktop`"),
        "{limits:?}"
    );
    case.plan.output_processor = Processor::Cpu;
    assert!(command(&case).ends_with(r"-ot '^token_embd\.weight$=CPU'"));
}

#[test]
fn threads_are_those_of_the_scenario() {
    let mut case = Case::new("llama-8b", &[("desktop", "d3", 32, 0, "")]);
    case.scenario.devices[0].limits = Some(ResourceLimits { threads: Some(3), ..Default::default() });
    for (engine, threads) in [(Engine::LlamaCpp, " -t 3 --device"), (Engine::PrimaCpp, " -t 3 -ngl")] {
        let command = &case.export(engine).commands[0].command;
        assert!(command.contains(threads), "{command}");
    }
}

#[test]
fn ranks_of_prima_cpp() {
    let exported = Case::new("llama-8b", &HOME).export(Engine::PrimaCpp);
    let lines = [
        "llama-cli -m m.gguf -c 1024 -t 16 --world 3 --rank 0 --master DESKTOP_ADDRESS --next 192.168.1.7 -lw 16,10,6 -ngl 10 --prefetch",
        "llama-cli -m m.gguf -c 1024 -t 8 --world 3 --rank 1 --master DESKTOP_ADDRESS --next phone.local -lw 16,10,6 -ngl 5 --prefetch",
        "llama-cli -m m.gguf -c 1024 -t 8 --world 3 --rank 2 --master DESKTOP_ADDRESS --next DESKTOP_ADDRESS -lw 16,10,6 -ngl 0 --prefetch",
    ];
    check(&exported, &lines, &[]);
    assert_eq!(layers_texts(&exported)[0], "layers 0-9 on the GPU, 10-15 on the CPU");
    assert_eq!(exported.placeholders.len(), 1);
    let notes = exported.notes.join("\n");
    for words in
        ["the commands were not tried", "resolves host names, such as that of `phone`", "have no ports"]
    {
        assert!(notes.contains(words), "{notes}");
    }
}

#[test]
fn rounds_and_residency_of_prima_cpp() {
    // 32 layers in rounds of 6: the sixth has two, both on the first device.
    let rows = [("desktop", "d3", 4, 3, ""), ("relay", "d1", 0, 0, ""), ("phone", "d4", 2, 0, "")];
    let mut case = Case::new("llama-8b", &rows);
    case.plan.devices[0].residency = ResidencyOptions::with_policy(Residency::Managed);
    case.plan.devices[2].residency = ResidencyOptions::with_policy(Residency::Os).without_prefetch();
    case.plan.activation_format = ActivationFormat::F16;
    let exported = case.export(Engine::PrimaCpp);
    let common = "--master DESKTOP_ADDRESS --next";
    let lines: [String; 3] = [
        format!(
            "llama-cli -m m.gguf -c 1024 -t 16 --world 3 --rank 0 {common} RELAY_ADDRESS -lw 4,0,2 -ngl 3 --prefetch"
        ),
        format!(
            "llama-cli -m m.gguf -c 1024 -t 8 --world 3 --rank 1 {common} PHONE_ADDRESS -lw 4,0,2 -ngl 0"
        ),
        format!(
            "llama-cli -m m.gguf -c 1024 -t 8 --world 3 --rank 2 {common} DESKTOP_ADDRESS -lw 4,0,2 -ngl 0"
        ),
    ];
    let lines = lines.each_ref().map(String::as_str);
    let limits = [
        "The last of 6 rounds has 2 of 6 layers",
        "`relay` only forwards messages",
        "`activations: f16`",
        "Residency `managed` of `desktop`",
    ];
    check(&exported, &lines, &limits);
    assert!(exported.notes.iter().any(|note| note.contains("those of one window or of all rounds")));
    let relays = case.export(Engine::LlamaCpp);
    assert_eq!(relays.commands.len(), 2, "llama.cpp has no relays");
    assert!(relays.not_expressed.iter().any(|limit| limit.contains("`relay` only forwards messages")));
}

#[test]
fn one_device_of_prima_cpp_is_no_ring() {
    let mut case = Case::new("llama-8b", &[("desktop", "d3", 32, 32, "")]);
    case.plan.output_processor = Processor::Gpu;
    let line = "llama-cli -m m.gguf -c 1024 -t 16 -ngl 32";
    check(&case.export(Engine::PrimaCpp), &[line], &["`output: gpu`"]);
}

#[test]
fn missing_model_file_is_a_placeholder() {
    let case = Case::new("llama-8b", &[("desktop", "d3", 32, 0, "")]);
    let files = ModelFiles::default();
    let exported =
        export(Engine::LlamaCpp, &case.plan, &case.scenario, &case.cluster, files).expect("commands");
    assert!(exported.commands[0].command.starts_with("llama-server -m MODEL.gguf "));
    assert_eq!(exported.placeholders[0].meaning, "the path of the model file");
}

#[test]
fn plans_of_other_scenarios_are_rejected() {
    let case = Case::new("llama-8b", &[("desktop", "d3", 32, 20, "")]);
    let error = |plan: &Plan, cluster: &Cluster| {
        export(Engine::LlamaCpp, plan, &case.scenario, cluster, FILES).expect_err("an error")
    };
    let mut renamed = case.cluster.clone();
    renamed.members[0].name = "other".to_owned();
    assert_eq!(error(&case.plan, &renamed), ExportError::UnknownDevice { name: "desktop".to_owned() });
    let mut without_gpu = case.cluster.clone();
    without_gpu.members[0].device.gpu = None;
    assert_eq!(error(&case.plan, &without_gpu), ExportError::NoGpu { name: "desktop".to_owned() });
    let other =
        Cluster { model: shipped_profile("llama-14b").expect("a shipped model"), ..case.cluster.clone() };
    assert!(matches!(error(&case.plan, &other), ExportError::OtherModel { .. }));
    let system = hearth_halda::systems::SystemPlanOptions::default();
    let tensor =
        hearth_halda::systems::plan("dllama", &case.cluster, &scenario_record(), system).expect("a plan");
    assert!(matches!(tensor.kind, PlanKind::Tensor(_)));
    assert_eq!(error(&tensor, &case.cluster), ExportError::TensorPlan);
}

/// Returns the value of an argument.
fn value<'a>(command: &'a DeviceCommand, name: &str) -> Option<&'a str> {
    let at = command.arguments.iter().position(|argument| argument == name)?;
    command.arguments.get(at + 1).map(String::as_str)
}

/// Returns the device of a layer as llama.cpp chooses it from `-ngl`, `--device` and `--tensor-split`, in its arithmetic
/// of f32; `None` is the CPU of the head. The output matrix is the layer with the number `layers`.
fn device_by_llama_cpp(head: &DeviceCommand, layer: u32, layers: u32) -> Option<String> {
    let devices: Vec<&str> = value(head, "--device")?.split(',').filter(|name| *name != "none").collect();
    let offloaded: u32 = value(head, "-ngl")?.parse().expect("a number");
    let start = (layers + 1).saturating_sub(offloaded);
    if layer < start || devices.is_empty() {
        return None;
    }
    let split = value(head, "--tensor-split").unwrap_or("1");
    let mut ends: Vec<f32> = Vec::new();
    for share in split.split(',') {
        ends.push(ends.last().unwrap_or(&0.0) + share.parse::<f32>().expect("a number"));
    }
    let sum = *ends.last().expect("a device");
    let place = (layer - start) as f32 / offloaded as f32;
    let index = ends.iter().position(|end| end / sum > place).expect("within the sum");
    Some(devices[index].to_owned())
}

/// Checks that llama.cpp assigns to each device the layers that its command lists, and as many as the plan.
fn check_assignment(case: &Case) {
    let exported = case.export(Engine::LlamaCpp);
    let (layers, head) = (case.plan.model.layers, exported.commands.last().expect("the head"));
    // The devices of the servers in the order in which llama.cpp numbers them.
    let mut names: Vec<(Option<String>, &LayerRange)> = Vec::new();
    let mut number = 0;
    for range in &head.layers {
        names.push(((range.processor == Processor::Gpu).then(|| "CUDA0".to_owned()), range));
    }
    for server in &exported.commands[..exported.commands.len() - 1] {
        let processors = value(server, "-d").expect("a list").split(',').count();
        assert_eq!(processors, server.layers.len(), "{server:?}");
        for range in &server.layers {
            names.push((Some(format!("RPC{number}")), range));
            number += 1;
        }
    }
    let mut covered = 0;
    for (name, range) in &names {
        for layer in range.first..=range.last {
            assert_eq!(&device_by_llama_cpp(head, layer, layers), name, "layer {layer}: {}", head.command);
            covered += 1;
        }
    }
    assert_eq!(covered, layers, "{}", head.command);
    for (index, device) in case.plan.devices.iter().enumerate() {
        let count = |ranges: &[LayerRange], processor| -> u32 {
            let on = ranges.iter().filter(|range| range.processor == processor);
            on.map(|range| range.last - range.first + 1).sum()
        };
        let command = exported.commands.iter().find(|command| command.device == device.name);
        let own = command.map_or(&[][..], |command| &command.layers);
        let planned = case.plan.windows(index).into_iter().map(|window| window.len() as u32).sum::<u32>();
        let on_gpu: u32 =
            (0..case.plan.rounds).map(|round| case.plan.gpu_window(index, round).len() as u32).sum();
        assert_eq!((count(own, Processor::Gpu), count(own, Processor::Cpu)), (on_gpu, planned - on_gpu));
    }
}

proptest! {
    #![proptest_config(config_with_cases(512))]

    #[test]
    fn llama_cpp_assigns_the_layers_of_the_plan(
        windows in prop::collection::vec((1..40_u32, 0..40_u32), 1..4),
        model in prop::sample::select(vec!["llama-8b", "llama-70b", "qwen3-30b-a3b"]),
    ) {
        let devices = [("desktop", "d3"), ("laptop", "d2"), ("other", "d3")];
        let rows: Vec<Row> = devices
            .iter()
            .zip(&windows)
            .map(|((name, profile), (window, gpu))| (*name, *profile, *window, *gpu.min(window), ""))
            .collect();
        let layers = shipped_profile(model).expect("a shipped model").shape.layers.0;
        let before: u32 = windows[..windows.len() - 1].iter().map(|(window, _)| window).sum();
        // In a valid plan, every device has a layer.
        prop_assume!(before < layers && windows[0].0 <= layers);
        prop_assume!(rows.iter().all(|row| row.2 <= layers));
        check_assignment(&Case::new(model, &rows));
    }
}
