//! Tests of the digests of weights and of their cache.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use hearth_profiles::Format;
use hearth_profiles::model::{Architecture, Quant};
use hearth_runtime::synth::SynthOptions;
use hearth_runtime::weights::digest_cache::DigestCache;
use hearth_runtime::weights::digests::WeightPart;
use hearth_runtime::{ExecError, Weights};
use hearth_schema::plan::WeightDigests;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::models::{shape, synthetic};

const LAYERS: u32 = 4;

/// A small model with RoPE factors, whose content was changed long ago, and a cache.
struct Fixture {
    folder: TempDir,
    model: PathBuf,
    cache: DigestCache,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        let options = SynthOptions::new("small", shape(Architecture::Llama), Quant::Pure(Format::Q4K));
        let options = SynthOptions { add_rope_factors: true, ..options };
        fs::copy(synthetic(&options).path(), &model).expect("a copy");
        set_age(&model, Duration::from_hours(1));
        let cache = DigestCache::new(folder.path().join("cache/digests.json"));
        Fixture { folder, model, cache }
    }

    fn cache_path(&self) -> PathBuf {
        self.folder.path().join("cache/digests.json")
    }

    fn digests(&self) -> WeightDigests {
        Weights::open(&self.model).expect("a model").compute_digests(2, None, &|_, _| true).expect("readable")
    }

    /// Returns the damaged parts, and the number of bytes that were hashed.
    fn damaged_parts(&self, expected: &WeightDigests, cache: Option<&DigestCache>) -> (Vec<WeightPart>, u64) {
        let weights = Weights::open(&self.model).expect("a model");
        let layers = (0..LAYERS).map(WeightPart::Layer);
        let parts: Vec<_> = std::iter::once(WeightPart::OutsideLayers).chain(layers).collect();
        let hashed = AtomicU64::new(0);
        let on_progress = |done, total| {
            assert!(done <= total && hashed.swap(done, Ordering::Relaxed) < done);
            true
        };
        let damaged = weights.find_damaged_parts(&parts, expected, 2, cache, &on_progress).expect("readable");
        (damaged, hashed.into_inner())
    }
}

#[allow(clippy::disallowed_methods)] // only files have this time
fn set_age(path: &Path, age: Duration) {
    let file = File::options().write(true).open(path).expect("the file");
    file.set_modified(SystemTime::now() - age).expect("its time");
}

#[test]
fn digest_is_the_hash_of_the_names_sizes_and_bytes_of_the_tensors() {
    let fixture = Fixture::new();
    let (bytes, weights) = (fs::read(&fixture.model).unwrap(), Weights::open(&fixture.model).unwrap());
    let expected = |is_own: &dyn Fn(&str) -> bool| {
        let mut text = Vec::new();
        for tensor in weights.model().tensors.iter().filter(|tensor| is_own(&tensor.name)) {
            text.extend((tensor.name.len() as u64).to_le_bytes());
            text.extend(tensor.bytes.0.to_le_bytes());
            text.extend(tensor.name.as_bytes());
            text.extend(&bytes[tensor.offset as usize..][..tensor.bytes.0 as usize]);
        }
        format!("sha256:{:x}", Sha256::digest(text))
    };
    let digests = fixture.digests();
    for (layer, digest) in digests.layers.iter().enumerate() {
        let prefix = format!("blk.{layer}.");
        let is_own = |name: &str| name.starts_with(&prefix) || name == "rope_freqs.weight";
        assert_eq!(*digest, expected(&is_own), "layer {layer}");
    }
    assert_eq!(digests.layers.len(), LAYERS as usize);
    assert_eq!(digests.outside_layers, expected(&|name| !name.starts_with("blk.")));
}

#[test]
fn hashing_stops_when_its_caller_no_longer_needs_it() {
    let fixture = Fixture::new();
    let reports = AtomicU64::new(0);
    let on_progress = |_, _| reports.fetch_add(1, Ordering::Relaxed) < 1;
    let stopped = Weights::open(&fixture.model).unwrap().compute_digests(1, None, &on_progress);
    assert!(matches!(stopped, Err(ExecError::HashingStopped)), "{stopped:?}");
    assert_eq!(reports.into_inner(), 2);
}

#[test]
fn every_changed_bit_is_found() {
    let fixture = Fixture::new();
    let digests = fixture.digests();
    let tensors = Weights::open(&fixture.model).unwrap().model().tensors.clone();
    let file = File::options().read(true).write(true).open(&fixture.model).unwrap();
    let layers: Vec<_> = (0..LAYERS).map(WeightPart::Layer).collect();
    for tensor in tensors {
        let expected = match tensor.name.strip_prefix("blk.") {
            Some(rest) => vec![WeightPart::Layer(rest[..1].parse().unwrap())],
            None if tensor.name == "rope_freqs.weight" => {
                [vec![WeightPart::OutsideLayers], layers.clone()].concat()
            }
            None => vec![WeightPart::OutsideLayers],
        };
        // The first byte of a small f32 is the last of its fraction, so the RoPE factors stay valid.
        for offset in [tensor.offset, tensor.offset + tensor.bytes.0 - 4] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
            assert_eq!(fixture.damaged_parts(&digests, None).0, expected, "{} at {offset}", tensor.name);
            file.write_all_at(&byte, offset).unwrap();
        }
    }
    assert_eq!(fixture.damaged_parts(&digests, None).0, []);
}

#[test]
fn unchanged_file_is_hashed_once() {
    let fixture = Fixture::new();
    let (digests, cache) = (fixture.digests(), Some(&fixture.cache));
    let (damaged, all) = fixture.damaged_parts(&digests, cache);
    assert!(damaged.is_empty() && all > 1 << 20, "{damaged:?} {all}");
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], 0));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&fixture.cache_path()), mode(fixture.cache_path().parent().unwrap())), (0o600, 0o700));
    // The digests are cached, not the fact that they were right.
    let mut other = digests.clone();
    other.layers[2].clone_from(&digests.layers[1]);
    let (damaged, again) = fixture.damaged_parts(&other, cache);
    assert!(damaged == [WeightPart::Layer(2)] && again < all / 2, "only this layer is hashed again: {again}");
    // The same bytes with a new time are another identity.
    set_age(&fixture.model, Duration::from_mins(30));
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], all));
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], 0));
}

#[test]
fn file_that_was_changed_just_now_is_not_cached() {
    let fixture = Fixture::new();
    set_age(&fixture.model, Duration::ZERO);
    let (digests, cache) = (fixture.digests(), Some(&fixture.cache));
    let (_, all) = fixture.damaged_parts(&digests, cache);
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], all));
    assert!(!fixture.cache_path().exists());
}

#[test]
fn damaged_cache_is_replaced() {
    let fixture = Fixture::new();
    let (digests, cache) = (fixture.digests(), Some(&fixture.cache));
    let (_, all) = fixture.damaged_parts(&digests, cache);
    let text = fs::read_to_string(fixture.cache_path()).unwrap();
    let wrong_digest = text.replace(&digests.layers[0], &digests.layers[1]);
    let truncated = text[..text.len() / 2].to_owned();
    let other_version = text.replace("\"version\":1", "\"version\":2");
    let huge = format!("{}{text}", " ".repeat(5 << 20));
    for damaged in [truncated, other_version, huge, "\0".repeat(99), "[]".into()] {
        fs::write(fixture.cache_path(), damaged).unwrap();
        assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], all));
        assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], 0));
    }
    fs::write(fixture.cache_path(), wrong_digest).unwrap();
    let (damaged, again) = fixture.damaged_parts(&digests, cache);
    assert!(damaged.is_empty() && again > 0 && again < all / 2, "{damaged:?} {again}");
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], 0));
    // A folder in the place of the cache cannot be replaced.
    fs::remove_file(fixture.cache_path()).unwrap();
    fs::create_dir(fixture.cache_path()).unwrap();
    assert_eq!(fixture.damaged_parts(&digests, cache), (vec![], all));
    let left: Vec<_> = fs::read_dir(fixture.cache_path().parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");
}

#[test]
fn cache_keeps_a_limited_number_of_models() {
    let fixture = Fixture::new();
    let digests = fixture.digests();
    let models: Vec<PathBuf> =
        (0..70).map(|number| fixture.folder.path().join(format!("{number}.gguf"))).collect();
    let mut fixture = fixture;
    for model in &models {
        fs::copy(&fixture.model, model).unwrap();
        set_age(model, Duration::from_hours(1));
        fixture.model.clone_from(model);
        fixture.damaged_parts(&digests, Some(&fixture.cache));
    }
    let text = fs::read_to_string(fixture.cache_path()).unwrap();
    assert_eq!(text.matches("\"outside_layers\"").count(), 64);
    assert_eq!(fixture.damaged_parts(&digests, Some(&fixture.cache)).1, 0, "the newest is kept");
}
