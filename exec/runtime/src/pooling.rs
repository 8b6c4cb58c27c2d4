//! Pooling: how the final hidden states of the tokens of a text become the embedding of the text.
//!
//! A model file names the pooling type for which the model was trained (`{architecture}.pooling_type`). In a decoder
//! model only the last token attends to all others, so its hidden state stands for the text.
//!
//! Not here: the hidden state itself, which the head of a ring computes ([`crate::InputOutputLayers::norm`]).

use std::str::FromStr;

use hearth_profiles::gguf::Metadata;
use hearth_profiles::model::Architecture;

/// The names of the pooling types, by their number in model files. source: llama.cpp
const NAMES: [&str; 5] = ["none", "mean", "cls", "last", "rank"];

/// A supported pooling type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of the last token.
    Last,
}

impl FromStr for Pooling {
    type Err = String;

    /// Parses the name of a pooling type. The error says why another type is not supported.
    fn from_str(name: &str) -> Result<Pooling, String> {
        let reason = match name {
            "last" => return Ok(Pooling::Last),
            "none" => "gives a vector for each token instead of one for the text",
            "mean" => "needs the hidden states of all tokens, but only that of the last token is computed",
            "cls" => "needs a first token that attends to all others, as in encoder models",
            "rank" => "scores pairs of texts with an output layer of its own, and gives no embeddings",
            _ => "is unknown",
        };
        Err(format!(
            "pooling type `{name}` is not supported, because it {reason}; use a model with type `last`"
        ))
    }
}

impl Pooling {
    /// Returns how the embeddings of a model are computed: as `requested` or, without a request, as its file says. The
    /// error says why the model has no embeddings.
    pub fn for_model(
        metadata: &Metadata,
        architecture: Architecture,
        requested: Option<Pooling>,
    ) -> Result<Pooling, String> {
        let read = |error: hearth_profiles::gguf::GgufError| error.to_string();
        if metadata.get_bool(&format!("{architecture}.attention.causal")).map_err(read)? == Some(false) {
            return Err("its tokens attend to later tokens; use a model with causal attention".into());
        }
        if let Some(pooling) = requested {
            return Ok(pooling);
        }
        match metadata.get_u32(&format!("{architecture}.pooling_type")).map_err(read)? {
            None => {
                Err("its file has no pooling type; use an embedding model, or set `--pooling last`".into())
            }
            Some(number) => {
                NAMES.get(number as usize).map_or_else(|| number.to_string(), ToString::to_string).parse()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::gguf::Value;

    use super::*;

    fn metadata(keys: &[(&str, Value)]) -> Metadata {
        let mut metadata = Metadata::default();
        for (key, value) in keys {
            metadata.insert(format!("qwen3.{key}"), value.clone());
        }
        metadata
    }

    #[test]
    fn pooling_type_is_that_of_the_file_or_the_requested_one() {
        let check = |keys: &[(&str, Value)], requested: Option<Pooling>, expected: Result<Pooling, &str>| {
            let found = Pooling::for_model(&metadata(keys), Architecture::Qwen3, requested);
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
                (found, expected) => panic!("{keys:?}: {found:?} instead of {expected:?}"),
            }
        };
        let last = Pooling::Last;
        check(&[("pooling_type", Value::U32(3))], None, Ok(last));
        check(&[], None, Err("no pooling type"));
        check(&[], Some(last), Ok(last));
        check(&[("pooling_type", Value::U32(1))], Some(last), Ok(last));
        for (number, name) in [(0, "none"), (1, "mean"), (2, "cls"), (4, "rank"), (7, "7")] {
            check(&[("pooling_type", Value::U32(number))], None, Err(&format!("pooling type `{name}`")));
        }
        let bidirectional = [("attention.causal", Value::Bool(false)), ("pooling_type", Value::U32(3))];
        check(&bidirectional, None, Err("later tokens"));
        check(&bidirectional, Some(last), Err("later tokens"));
    }
}
