//! `hearth model`: the models that ship with hearth.

use std::fmt::Write;

use hearth_profiles::model::{
    ModelDocument, ModelProfile, Quant, shipped_document, shipped_names, shipped_yaml,
};
use hearth_profiles::{Bytes, Format};
use serde::Serialize;

use super::print_result;
use crate::cli::{ModelArgs, ModelCommand};
use crate::diagnostics::{ExitCode, Failure};
use crate::output::format_parameter_count;

/// The formats whose sizes are shown, from the largest.
const QUANTS: [Quant; 6] = [
    Quant::Pure(Format::F16),
    Quant::Pure(Format::Q8_0),
    Quant::Pure(Format::Q6K),
    Quant::Q5KM,
    Quant::Q4KM,
    Quant::Q3KM,
];
/// Number of tokens for which the size of the KV cache is shown.
const CACHE_TOKENS: u32 = 1000;

/// A model as `--json` prints it.
#[derive(Serialize)]
struct Listed {
    name: String,
    parameters: u64,
    active_parameters: u64,
    quant: String,
    #[serde(rename = "size_bytes", serialize_with = "Bytes::serialize_number")]
    size: Bytes,
    /// Size of the KV cache in f16 for [`CACHE_TOKENS`] tokens.
    #[serde(rename = "cache_bytes_of_1000_tokens", serialize_with = "Bytes::serialize_number")]
    cache_of_1000_tokens: Bytes,
    context_length: u32,
    license: Option<String>,
    released: Option<String>,
    repository: Option<String>,
}

/// The size of a model in a format.
#[derive(Serialize)]
struct FormatSize {
    quant: String,
    #[serde(rename = "size_bytes", serialize_with = "Bytes::serialize_number")]
    bytes: Bytes,
    perplexity_increase: Option<f64>,
}

#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    model: Listed,
    sizes: Vec<FormatSize>,
}

pub fn run(args: &ModelArgs, json: bool) -> Result<ExitCode, Failure> {
    match &args.command {
        ModelCommand::List(args) => {
            let words: Vec<String> = args.words.iter().map(|word| word.to_lowercase()).collect();
            let names = shipped_names().filter(|name| words.iter().all(|word| name.contains(word.as_str())));
            let found = names
                .map(|name| listed(&shipped_document(name).map_err(Failure::invalid)?))
                .collect::<Result<Vec<_>, Failure>>()?;
            if found.is_empty() {
                let what = format!("no model has all of these words in its name: {}", args.words.join(", "));
                return Err(Failure::invalid(what).with_hint("list all models with `hearth model list`"));
            }
            print_result(json, &found, |found| table(found))
        }
        ModelCommand::Show(args) => show(&args.name, json),
    }
}

fn profile(document: &ModelDocument) -> Result<ModelProfile, Failure> {
    document.to_profile().map_err(Failure::failed)
}

fn listed(document: &ModelDocument) -> Result<Listed, Failure> {
    let model = profile(document)?;
    Ok(Listed {
        name: document.name.clone(),
        parameters: model.parameters,
        active_parameters: model.active_parameters,
        quant: document.quant.clone(),
        size: model.total_bytes(),
        cache_of_1000_tokens: model.shape.cache_bytes(CACHE_TOKENS, Format::F16),
        context_length: document.context_length,
        license: document.license.clone(),
        released: document.released.clone(),
        repository: document.repository.clone(),
    })
}

fn table(models: &[Listed]) -> String {
    let mut text = format!(
        "{:<30} {:>10} {:>8} {:>10} {:>9} {:>8}  {:<8}  licence\n",
        "model", "parameters", "active", "format", "size", "context", "released"
    );
    for model in models {
        let unknown = || "-".to_owned();
        let _ = writeln!(
            text,
            "{:<30} {:>10} {:>8} {:>10} {:>9} {:>8}  {:<8}  {}",
            model.name,
            format_parameter_count(model.parameters),
            format_parameter_count(model.active_parameters),
            model.quant,
            model.size.to_string(),
            model.context_length,
            model.released.clone().unwrap_or_else(unknown),
            model.license.clone().unwrap_or_else(unknown),
        );
    }
    text
}

fn show(name: &str, json: bool) -> Result<ExitCode, Failure> {
    let document = shipped_document(name).map_err(Failure::invalid)?;
    let yaml = shipped_yaml(name).map_err(Failure::invalid)?;
    let shape = document.to_shape();
    // Some models have rows that are no whole blocks of a format.
    let sizes = QUANTS.into_iter().filter_map(|quant| {
        let model = ModelProfile::from_shape(name, shape.clone(), quant).ok()?;
        let perplexity_increase = quant.perplexity_increase();
        Some(FormatSize { quant: quant.to_string(), bytes: model.total_bytes(), perplexity_increase })
    });
    let shown = Shown { model: listed(&document)?, sizes: sizes.collect() };
    print_result(json, &shown, |Shown { model, sizes }| {
        let mut text = format!(
            "{yaml}\n{} parameters, {} of them active; a KV cache of {} for {CACHE_TOKENS} tokens\n",
            format_parameter_count(model.parameters),
            format_parameter_count(model.active_parameters),
            model.cache_of_1000_tokens
        );
        for FormatSize { quant, bytes, perplexity_increase } in sizes {
            let quality = perplexity_increase.map_or_else(String::new, |increase| {
                format!("  perplexity {:+.1} % (measured with Llama 3 8B)", increase * 100.0)
            });
            let _ = writeln!(text, "  {quant:<7} {:>9}{quality}", bytes.to_string());
        }
        text
    })
}
