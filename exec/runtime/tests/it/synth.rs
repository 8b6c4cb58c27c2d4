//! Tests that synthetic models are valid, have the requested shape, and are reproducible.

use std::path::Path;

use hearth_core::schedule::ModelPart;
use hearth_profiles::gguf::GgufModel;
use hearth_profiles::model::{Architecture, DigestMatch, ModelProfile, Quant, shipped_profile};
use hearth_profiles::{Bytes, Format};
use hearth_runtime::Weights;
use hearth_runtime::synth::{SynthError, SynthOptions, TokenizerKind, synthesise};

fn tiny() -> SynthOptions {
    let mut options = SynthOptions::from_preset("tiny").unwrap();
    // The model is smaller than the shipped one, so that all formats take little time.
    options.shape.vocab_size = 512;
    options.shape.layers = hearth_profiles::Layers(3);
    options
}

fn make(options: &SynthOptions, path: &Path) -> Vec<u8> {
    synthesise(options, path, &mut |_, _| ()).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn a_plan_made_for_a_shipped_model_fits_the_preset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let (mut last, mut calls) = ((0, 0), 0);
    let made = synthesise(&SynthOptions::from_preset("tiny").unwrap(), &path, &mut |done, total| {
        assert!(done > last.0 && done <= total);
        (last, calls) = ((done, total), calls + 1);
    })
    .unwrap();
    assert_eq!(last.0, last.1, "the last report is complete");
    let planned = shipped_profile("tiny").unwrap();
    assert_eq!(Bytes(last.1), planned.total_bytes());
    let model = GgufModel::open(&path).unwrap();
    assert_eq!((model.file_bytes(), model.tensors.len()), (made.file_bytes, made.tensor_count));
    let profile = ModelProfile::from_gguf(&model).unwrap();
    assert_eq!(profile.match_digest(&planned.digest), DigestMatch::SameShape);
    assert_eq!((&profile.layers, &profile.output_head), (&planned.layers, &planned.output_head));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no unfinished file is left");
}

#[test]
fn bytes_depend_on_options_and_not_on_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // With this vocabulary the embedding has two chunks.
    let mut options = tiny();
    options.shape.vocab_size = 5000;
    let one = make(&SynthOptions { threads: 1, ..options.clone() }, &path);
    let four = make(&SynthOptions { threads: 4, ..options.clone() }, &path);
    assert_eq!(one, four);
    assert_ne!(one, make(&SynthOptions { seed: 2, ..options.clone() }, &path));
    // A tensor does not depend on the number of layers.
    let tensor = |name: &str| {
        let model = GgufModel::open(&path).unwrap();
        let tensor = model.tensor(name).unwrap();
        std::fs::read(&path).unwrap()[tensor.offset as usize..tensor.end_offset() as usize].to_vec()
    };
    let pure = SynthOptions { quant: Quant::Pure(Format::Q4K), ..options.clone() };
    make(&pure, &path);
    let before = tensor("blk.1.ffn_up.weight");
    let mut deeper = pure;
    deeper.shape.layers = hearth_profiles::Layers(5);
    make(&deeper, &path);
    assert_eq!(tensor("blk.1.ffn_up.weight"), before);
}

#[test]
fn every_format_and_architecture_opens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // The profile of the file agrees with that of a document of the same shape.
    let check = |options: &SynthOptions| {
        make(options, &path);
        let profile = ModelProfile::from_gguf(&GgufModel::open(&path).unwrap()).unwrap();
        let planned = ModelProfile::from_shape("planned", options.shape.clone(), options.quant).unwrap();
        let name = format!("{} {}", options.shape.architecture, options.quant);
        assert_eq!(profile.layers, planned.layers, "{name}");
        assert_eq!(profile.output_head, planned.output_head, "{name}");
        assert_eq!(profile.shape, options.shape, "{name}");
        (profile, planned)
    };
    let pure = Format::ALL.iter().map(|&format| Quant::Pure(format));
    for quant in pure.chain(Quant::MIXED_QUANTS.iter().copied()) {
        check(&SynthOptions { quant, ..tiny() });
    }
    for architecture in Architecture::all_runnable() {
        let mut options = SynthOptions { tokenizer: TokenizerKind::Bpe, ..tiny() };
        options.shape.architecture = architecture;
        options.shape.has_tied_embeddings = true;
        options.shape = options.shape.with_default_hybrid().with_default_experts();
        options.add_rope_factors = architecture == Architecture::Llama;
        let (profile, planned) = check(&options);
        assert_eq!(profile.match_digest(&planned.digest), DigestMatch::SameShape);
        let factors = if options.add_rope_factors { Bytes(4 * 32) } else { Bytes(0) };
        assert_eq!(profile.shared_tensors.bytes(), factors, "32 rope factors of 4 bytes");
        let weights = Weights::open(&path).unwrap();
        for (layer, group) in planned.layers.iter().enumerate() {
            let part = ModelPart::Layers(layer as u32..layer as u32 + 1);
            let small: u64 = weights.vector_extents(&part).iter().map(|extent| extent.length).sum();
            let large: u64 = weights.matrix_extents(&part).iter().map(|extent| extent.length).sum();
            assert_eq!(Bytes(small + large), group.bytes(), "{architecture}, layer {layer}");
        }
    }
}

#[test]
fn invalid_options_are_rejected_and_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let error = |change: &dyn Fn(&mut SynthOptions)| {
        let mut options = tiny();
        change(&mut options);
        synthesise(&options, &path, &mut |_, _| ()).unwrap_err()
    };
    let odd_block = error(&|options| {
        options.quant = Quant::Pure(Format::Q4K);
        options.shape.feed_forward_length = 700;
    });
    assert!(matches!(odd_block, SynthError::Block(_)));
    assert!(matches!(error(&|options| options.shape.heads = 0), SynthError::Shape(_)));
    let untied = error(&|options| options.shape.architecture = Architecture::Gemma2);
    assert!(matches!(untied, SynthError::Untied { .. }));
    let factors = error(&|options| {
        options.add_rope_factors = true;
        options.shape.architecture = Architecture::Qwen3;
    });
    assert!(matches!(factors, SynthError::RopeFactors { .. }));
    assert!(matches!(error(&|options| options.shape.vocab_size = 300), SynthError::Vocabulary { .. }));
    let endless = error(&|options| {
        options.quant = Quant::Pure(Format::F32);
        options.shape.layers = hearth_profiles::Layers(4096);
        options.shape.embedding_length = 1 << 18;
        options.shape.feed_forward_length = 1 << 20;
    });
    assert!(matches!(endless, SynthError::Space { .. } | SynthError::Block(_)), "13 PB");
    let odd = error(&|options| (options.shape.key_length, options.shape.value_length) = (33, 33));
    assert!(matches!(odd, SynthError::KeyLength { found: 33 }));
    for gain in [0.0, 1e-4, -1.0, 1e38, f32::INFINITY, f32::NAN] {
        assert!(matches!(error(&|options| options.gain = gain), SynthError::Gain { .. }), "{gain}");
    }
    let nowhere =
        synthesise(&tiny(), &folder.path().join("no/such/folder.gguf"), &mut |_, _| ()).unwrap_err();
    assert!(matches!(nowhere, SynthError::Io { .. }));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    for gain in [1e-3, 1e3] {
        make(&SynthOptions { gain, ..tiny() }, &path);
        Weights::open(&path).unwrap();
    }
}
