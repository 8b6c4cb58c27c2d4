//! Tests of packed weights: the same bits as with the weights of the model file, and clear errors for wrong files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::Format;
use hearth_profiles::model::{Architecture, Quant};
use hearth_runtime::synth::SynthOptions;
use hearth_runtime::weights::digest_cache::DigestCache;
use hearth_runtime::weights::digests::WeightPart;
use hearth_runtime::weights::packed::packed_path;
use hearth_runtime::{Cpu, Engine, KvFormat, ThreadPool, ThreadPoolOptions, Weights};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::models::{self, shape, synthetic};

/// A model and its packed weights in a folder.
struct Fixture {
    _folder: TempDir,
    model: PathBuf,
    packed: PathBuf,
}

impl Fixture {
    fn new(file: &Path) -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        fs::copy(file, &model).expect("a copy");
        let packed = packed_path(&model);
        let size = Weights::open(&model).expect("a model").pack(&packed, &mut |_, _| ()).expect("room");
        assert_eq!(size.file_bytes, fs::metadata(&packed).expect("a file").len());
        assert!(size.matrices > 0, "nothing was packed");
        Fixture { _folder: folder, model, packed }
    }

    fn open(&self) -> Result<Weights, String> {
        let mut weights = Weights::open(&self.model).expect("a model");
        weights.use_packed_file(&self.packed).map_err(|error| error.to_string())?;
        Ok(weights)
    }

    /// Changes the bytes of the packed file.
    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(&self.packed).expect("a file");
        change(&mut bytes);
        fs::write(&self.packed, bytes).expect("room");
    }
}

/// Returns the bits of the logits after prompts of several lengths, and after each of two more tokens.
fn logits(weights: Weights) -> Vec<u32> {
    let vocabulary = weights.shape().vocab_size;
    let pool = ThreadPoolOptions { threads: 3, pin_workers: false, ..ThreadPoolOptions::default() };
    let cpu = Cpu::new(Arc::new(ThreadPool::new(pool).expect("threads")));
    let mut engine = Engine::new(Arc::new(weights), cpu, 128, KvFormat::F16).expect("an engine");
    let mut bits = Vec::new();
    for length in [1, 2, 5, 8, 13, 70] {
        engine.reset();
        let prompt: Vec<u32> = (0..length).map(|at| (at * 7919 + length) % vocabulary).collect();
        for tokens in [&prompt[..], &[3], &[4]] {
            bits.extend(engine.next_logits(tokens).expect("logits").iter().map(|value| value.to_bits()));
        }
    }
    bits
}

#[test]
fn packed_weights_give_the_same_bits() {
    let mut files: Vec<PathBuf> = ["psalm-7m-q4_k.gguf", "psalm-7m-q8_0.gguf", "psalm-moe-q8_0.gguf"]
        .map(|file| models::folder().join(file))
        .into();
    // Matrices that are parts of one tensor, tied embeddings, gated delta nets, experts; formats with all divisions.
    let made: Vec<_> = [
        (Architecture::Llama, Format::Q3K),
        (Architecture::Llama, Format::Q6K),
        (Architecture::Llama, Format::Iq4Xs),
        (Architecture::Phi3, Format::Q4_0),
        (Architecture::Gemma4, Format::Q5_1),
        (Architecture::Qwen35, Format::Q8_0),
        (Architecture::GptOss, Format::Mxfp4),
    ]
    .into_iter()
    .map(|(architecture, format)| {
        let mut shape = shape(architecture);
        shape.context_length = 128;
        synthetic(&SynthOptions::new("small", shape, Quant::Pure(format)))
    })
    .collect();
    files.extend(made.iter().map(|file| file.path().to_owned()));
    for file in files {
        let fixture = Fixture::new(&file);
        let packed = fixture.open().expect("packed weights");
        assert!(packed.uses_packed() && packed.check_packed(&mut |_, _| ()).expect("readable"));
        let expected = logits(Weights::open(&file).expect("a model"));
        assert!(logits(packed) == expected, "{}: the logits differ", file.display());
    }
}

#[test]
fn packed_weights_of_another_model_or_damaged_ones_are_refused() {
    let fixture = Fixture::new(&models::folder().join("psalm-7m-q4_k.gguf"));
    let original = fs::read(&fixture.packed).expect("a file");
    let refused = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        fixture.change(change);
        let error = fixture.open().expect_err("wrong packed weights");
        assert!(error.contains(what) && error.contains("hearth pack"), "{error}");
        fs::write(&fixture.packed, &original).expect("room");
    };
    let damaged = "are incomplete or damaged";
    refused(damaged, &|bytes| bytes.truncate(10));
    refused(damaged, &|bytes| bytes.truncate(200));
    refused(damaged, &|bytes| bytes.truncate(bytes.len() - 1));
    refused(damaged, &|bytes| bytes[100] ^= 1);
    refused(damaged, &|bytes| bytes[16..24].fill(0xff));
    refused("another version of hearth", &|bytes| bytes[15] = b'9');
    // With a correct digest of the index.
    let index = |change: fn(&mut Vec<serde_json::Value>)| {
        move |bytes: &mut Vec<u8>| {
            let length = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes")) as usize;
            let mut index: serde_json::Value = serde_json::from_slice(&bytes[24..24 + length]).expect("JSON");
            change(index["matrices"].as_array_mut().expect("a list"));
            let mut json = serde_json::to_vec(&index).expect("JSON");
            assert!(json.len() <= length);
            json.resize(length, b' ');
            let digest = Sha256::digest(&json);
            bytes[24..24 + length].copy_from_slice(&json);
            bytes[24 + length..56 + length].copy_from_slice(&digest);
        }
    };
    refused(damaged, &index(|matrices| drop(matrices.pop())));
    refused(damaged, &index(Vec::clear));
    refused(damaged, &index(|matrices| matrices[1] = matrices[0].clone()));
    refused(damaged, &index(|matrices| matrices[0]["bytes"] = 32.into()));
    refused(damaged, &index(|matrices| matrices[0]["file_index"] = 9.into()));
    refused(damaged, &index(|matrices| matrices.last_mut().expect("a matrix")["offset"] = 9_999_936.into()));
    refused(damaged, &index(|matrices| matrices[0]["offset"] = 1.into()));
    fs::copy(models::folder().join("psalm-7m-q8_0.gguf"), &fixture.model).expect("a copy");
    refused("are those of another model", &|_| ());
}

#[test]
fn packed_weights_that_are_older_than_the_model_are_refused() {
    let fixture = Fixture::new(&models::folder().join("psalm-7m-q4_k.gguf"));
    let file = File::options().append(true).open(&fixture.packed).expect("a file");
    let modified = fs::metadata(&fixture.model).and_then(|model| model.modified()).expect("a time");
    file.set_modified(modified - Duration::from_secs(1)).expect("a file");
    let error = fixture.open().expect_err("old packed weights");
    assert!(error.contains("are older than the model"), "{error}");
}

#[test]
fn model_without_quantised_weights_cannot_be_packed() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = Weights::open(models::folder().join("psalm-7m-f16.gguf")).expect("a model");
    let error = model.pack(&folder.path().join("packed"), &mut |_, _| ()).expect_err("nothing to pack");
    assert!(error.to_string().contains("no matrix that can be packed"), "{error}");
}

#[test]
fn changed_packed_weights_are_found() {
    let fixture = Fixture::new(&models::folder().join("psalm-7m-q4_k.gguf"));
    let digests = Weights::open(&fixture.model).expect("a model").compute_digests(1, None, &|_, _| true);
    let digests = digests.expect("readable");
    let parts: Vec<_> = (0..digests.layers.len() as u32).map(WeightPart::Layer).collect();
    let damaged = |fixture: &Fixture| {
        let weights = fixture.open().expect("packed weights");
        let found = weights.find_damaged_parts(&parts, &digests, 1, None, &|_, _| true).expect("readable");
        (weights.check_packed(&mut |_, _| ()).expect("readable"), found)
    };
    assert_eq!(damaged(&fixture), (true, Vec::new()));
    // Digests that are computed for a plan say nothing about packed weights, so they are not cached with them.
    let cache = DigestCache::new(fixture.packed.with_file_name("digests.json"));
    let open = || fixture.open().expect("packed weights");
    open().compute_digests(1, Some(&cache), &|_, _| true).expect("readable");
    assert!(!fixture.packed.with_file_name("digests.json").exists());
    // The matrices are in the order of the model file, which begins with the embedding and the layers.
    let middle = |bytes: &mut Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    };
    fixture.change(middle);
    let (is_correct, found) = damaged(&fixture);
    assert!(!is_correct && found.len() == 1, "{found:?}");
}
