//! Shipped models: the documents of `profiles/models/`, which are compiled into the program.
//!
//! The shipped models are the presets of synthetic models that `runtime::synth` can write, the seven sizes in Table 4
//! of the prima.cpp paper, the sizes of Qwen 2.5, and models that people run at home.

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
    "codellama-34b", "codestral-22b", "deepseek-r1-0528-qwen3-8b", "deepseek-r1-distill-llama-70b",
    "deepseek-r1-distill-llama-8b", "deepseek-r1-distill-qwen-14b", "deepseek-r1-distill-qwen-32b",
    "deepseek-r1-distill-qwen-7b", "falcon3-10b", "falcon3-7b", "gemma-2-27b", "gemma-2-2b", "gemma-2-9b",
    "gemma-3-12b", "gemma-3-1b", "gemma-3-270m", "gemma-3-27b", "gemma-3-4b", "gemma-4-12b",
    "gemma-4-26b-a4b", "gemma-4-e2b", "gemma-4-e4b", "gpt-oss-120b", "gpt-oss-20b", "granite-3-moe-3b",
    "granite-3.3-2b", "granite-3.3-8b", "granite-4.2-30b", "granite-4.2-3b", "granite-4.2-8b",
    "internlm2.5-1.8b", "internlm2.5-20b", "internlm2.5-7b", "llama-2-13b", "llama-2-70b", "llama-2-7b",
    "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b", "llama-3.3-70b", "llama-4-scout", "minimax-m2.5",
    "ministral-8b", "mistral-7b", "mistral-large-123b", "mistral-small-24b", "mistral-small-3.2-24b",
    "mixtral-8x22b", "mixtral-8x7b", "olmo-2-13b", "olmo-2-32b", "olmo-2-7b", "olmo-3-7b", "olmo-3.1-32b",
    "olmoe-1b-7b", "phi-3.5-mini", "phi-4-14b", "phi-4-mini", "qwen2.5-3b", "qwen2.5-coder-14b",
    "qwen2.5-coder-32b", "qwen2.5-coder-7b", "qwen3-0.6b", "qwen3-235b-a22b", "qwen3-30b-a3b",
    "qwen3-30b-a3b-2507", "qwen3-4b", "qwen3-4b-2507", "qwen3-coder-30b-a3b", "qwen3-coder-480b-a35b",
    "qwen3.5-0.8b", "qwen3.5-122b-a10b", "qwen3.5-2b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b", "qwen3.5-4b",
    "qwen3.5-9b", "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b", "qwq-32b", "smollm2-1.7b", "smollm2-135m",
    "smollm2-360m", "smollm3-3b", "tinyllama-1.1b", "yi-34b",
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
        let error = shipped_profile("qwen3-30b").unwrap_err().to_string();
        let expected = "no model `qwen3-30b` is shipped: use one of qwen3-30b-a3b, qwen3-30b-a3b-2507, ";
        assert!(
            error.starts_with(expected) && error.ends_with("or another of `hearth model list`"),
            "{error}"
        );
    }

    #[test]
    fn parameters_match_published_numbers() {
        // Number of tensor elements on the pages of the models, and the active parameters that the authors state.
        for (name, total, active) in [
            ("llama-3.1-405b", 405_853_388_800.0, 405.9e9),
            ("gemma-3-27b", 27_009_346_304.0, 27.0e9),
            ("olmo-3.1-32b", 32_233_522_176.0, 32.2e9),
            ("qwen3-30b-a3b", 30_532_122_624.0, 3.3e9),
            ("mixtral-8x7b", 46_702_792_704.0, 12.9e9),
            ("qwen3.5-4b", 4_205_751_296.0, 4.2e9),
        ] {
            let profile = shipped_profile(name).unwrap();
            let difference = (profile.parameters as f64 / total - 1.0).abs();
            assert!(difference < 1e-3, "{name}: {}", profile.parameters);
            assert!((profile.active_parameters as f64 / active - 1.0).abs() < 0.02, "{name}");
        }
    }

    #[test]
    fn sizes_match_published_files() {
        // Published files in GB, in Q4_K_M: Llama 3 8B 4.92, Llama 1 30B 19.6, 65B 39.3, Llama 3 70B 42.5, Qwen3
        // 30B-A3B 18.56, Mixtral 28.45; gpt-oss 20B in MXFP4 12.1.
        for (name, published) in [
            ("llama-8b", 4.92e9),
            ("llama-30b", 19.6e9),
            ("llama-65b", 39.3e9),
            ("llama-70b", 42.5e9),
            ("qwen3-30b-a3b", 18.56e9),
            ("mixtral-8x7b", 28.45e9),
            ("gpt-oss-20b", 12.1e9),
        ] {
            let total = shipped_profile(name).unwrap().total_bytes().as_f64();
            assert!((total / published - 1.0).abs() < 0.005, "{name}: {total}");
        }
    }
}
