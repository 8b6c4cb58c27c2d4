//! Shipped models: the documents of `profiles/models/`, which are compiled into the program.
//!
//! The shipped models are the seven sizes in Table 4 of the prima.cpp paper, the sizes of Qwen 2.5 (QwQ and distilled
//! models have the same shapes), draft models for some of these sizes, two models with layers of different kinds, and
//! the presets of synthetic models that `runtime::synth` can write.

use super::document::ModelDocument;
use super::profile::ModelProfile;
use crate::document::Document;
use crate::shipped::{UnknownDocument, shipped};

shipped!(
    "model" in "models":
    "tiny", "120m", "1b", "llama-1b", "3b",
    "llama-8b", "llama-14b", "llama-30b", "llama-45b", "llama-60b", "llama-65b", "llama-70b",
    "qwen-0.5b", "qwen-1.5b", "qwen-7b", "qwen-14b", "qwen-32b", "qwen-72b",
    "llama-3b", "mistral-nemo-12b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
    "qwen3.5-27b", "gemma-4-31b",
);

pub fn shipped_document(name: &str) -> Result<ModelDocument, UnknownDocument> {
    let document = ModelDocument::from_yaml(shipped_yaml(name)?);
    Ok(document.expect("shipped documents are valid: a test reads them all"))
}

pub fn shipped_profile(name: &str) -> Result<ModelProfile, UnknownDocument> {
    let profile = shipped_document(name)?.to_profile();
    Ok(profile.expect("shipped documents are valid: a test reads them all"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_models_are_valid() {
        for name in shipped_names() {
            let document = shipped_document(name).unwrap();
            assert_eq!(document.name, name);
            assert_eq!(shipped_profile(name).unwrap().layers.len(), document.layers.0 as usize, "{name}");
        }
        let error = shipped_profile("9b").unwrap_err().to_string();
        let expected = "no model `9b` is shipped: use one of tiny, 120m, 1b, llama-1b, 3b, llama-8b";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn sizes_match_published_files() {
        // Published Q4_K_M files, in GB: Llama 3 8B 4.92, Llama 1 30B 19.6, 65B 39.3, Llama 3 70B 42.5.
        for (name, published) in
            [("llama-8b", 4.92e9), ("llama-30b", 19.6e9), ("llama-65b", 39.3e9), ("llama-70b", 42.5e9)]
        {
            let total = shipped_profile(name).unwrap().total_bytes().as_f64();
            assert!((total / published - 1.0).abs() < 0.005, "{name}: {total}");
        }
    }
}
