//! Digests of the weights of a model, in the section `model` of a plan.

use hearth_profiles::document::DocumentError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The digests of the weights of a model, each `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightDigests {
    /// The digest of each layer: of the tensors that a device needs to compute the layer.
    pub layers: Vec<String>,
    /// The digest of the tensors outside the layers: embedding, output matrix and norm.
    pub outside_layers: String,
}

impl WeightDigests {
    /// Checks the format of the digests, and that there is one for each of the `layers` layers.
    pub(super) fn validate(&self, layers: u32) -> Result<(), DocumentError> {
        let reject = |what: String| Err(DocumentError::invalid_document(what));
        if self.layers.len() != layers as usize {
            return reject(format!(
                "`model.weight_digests.layers` has {} digests, but the model has {layers} layers: plan again with \
                 `--hash-weights`",
                self.layers.len()
            ));
        }
        match self.layers.iter().chain([&self.outside_layers]).find(|digest| !is_sha256(digest)) {
            Some(digest) => reject(format!(
                "`model.weight_digests`: `{digest}` is not `sha256:` and 64 hexadecimal digits in lower case"
            )),
            None => Ok(()),
        }
    }
}

fn is_sha256(digest: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digest.strip_prefix("sha256:").is_some_and(|digits| digits.len() == 64 && digits.bytes().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_and_format_of_digests_are_checked() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        let digests =
            |layer: &str| WeightDigests { layers: vec![layer.into(); 2], outside_layers: digest.clone() };
        digests(&digest).validate(2).expect("two digests for two layers");
        let error = digests(&digest).validate(3).expect_err("a digest is missing").message();
        assert!(error.contains("2 digests") && error.contains("3 layers"), "{error}");
        for wrong in ["", "sha256:", &digest[..70], &digest.to_uppercase(), &digest.replace('f', "g")] {
            let error = digests(wrong).validate(2).expect_err(wrong).message();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
