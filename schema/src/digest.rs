//! Digests of documents: `sha256:` and the first 64 bits of the text's SHA-256, as 16 hexadecimal digits.

use sha2::{Digest as _, Sha256};

/// Returns the digest of a document's text.
pub fn digest_text(text: &str) -> String {
    format!("sha256:{:.16x}", Sha256::digest(text))
}

#[cfg(test)]
mod tests {
    #[test]
    fn equal_strings_have_equal_digests() {
        // SHA-256 of the empty text begins e3b0c442 98fc1c14 (FIPS 180-4).
        assert_eq!(super::digest_text(""), "sha256:e3b0c44298fc1c14");
        assert_ne!(super::digest_text("a"), super::digest_text("b"));
    }
}
