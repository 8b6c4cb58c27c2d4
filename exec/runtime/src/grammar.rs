//! Constrained decoding: only tokens that continue a text of a grammar can be sampled.
//!
//! A [`GrammarCompiler`] belongs to the vocabulary of a model. It compiles grammars in the Lark syntax of the crate
//! llguidance, which may contain JSON Schemas (`%json`), and a [`GrammarMatcher`] follows the text token by token.
//! Control tokens are written as `<[id]>`. A text that is complete can only be followed by an end-of-generation token.
//!
//! Grammars come from clients and may be malicious: the size of a grammar, the memory of its states and the work per
//! token are limited, and a grammar is compiled on a thread whose stack is large enough for the longest chain of rules. A
//! matcher that exceeds its limits ends the text, and [`GrammarMatcher::failure`] has the reason.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::chat::with_large_stack;
use crate::error::{ExecError, sanitize};
use crate::tokenizer::Tokenizer;

/// Longest token that a grammar can produce, in bytes. source: assumed; published vocabularies have tokens of up to 1024
/// spaces, which no grammar needs, and toktrie allows 1024
const MAX_TOKEN_BYTES: usize = 256;
/// Maximum length of a grammar with its JSON Schemas, in bytes. source: assumed; 128 tools with long schemas
const MAX_GRAMMAR_BYTES: usize = 512 << 10;
/// Maximum number of lines, which bounds the length of a chain of rules, over which llguidance recurses.
/// source: assumed; published grammars of programming languages have some hundred rules
const MAX_LINES: usize = 2000;
/// Maximum number of states of a lexer, each of 1 to 2 kB. source: assumed; published schemas need a few thousand
const MAX_LEXER_STATES: usize = 50_000;

/// Compiles grammars for the vocabulary of a model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    ends: Vec<u32>,
}

/// The position of a text in its grammar.
pub struct GrammarMatcher {
    matcher: Matcher,
    ends: Vec<u32>,
    failure: Arc<OnceLock<String>>,
}

impl GrammarCompiler {
    /// Creates a compiler for a model with logits of `vocab_size` tokens. Takes some 100 ms for a large vocabulary.
    pub fn new(tokenizer: &Tokenizer, vocab_size: u32) -> Result<GrammarCompiler, ExecError> {
        let ends: Vec<u32> = tokenizer.stop_tokens().into_iter().filter(|&end| end < vocab_size).collect();
        let Some(&end) = ends.first() else {
            return Err(failed("the model has no token that ends a text", "use another model"));
        };
        let bytes = |token: u32| match tokenizer.control_text(token) {
            // With this mark, llguidance keeps control tokens apart from the same text.
            Some(text) => [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat(),
            None => tokenizer.token_bytes(token).to_vec(),
        };
        let usable = |bytes: Vec<u8>| if bytes.len() > MAX_TOKEN_BYTES { Vec::new() } else { bytes };
        let words: Vec<Vec<u8>> = (0..vocab_size).map(|token| usable(bytes(token))).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, end), &words).with_eos_tokens(&ends);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| failed(format!("grammars cannot be used: {error}"), "use another model"))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;
        Ok(GrammarCompiler { factory, ends })
    }

    /// Compiles a grammar. Fails if it is not valid, too large, or uses what is not supported.
    pub fn compile(&self, lark: &str) -> Result<GrammarMatcher, ExecError> {
        if lark.len() > MAX_GRAMMAR_BYTES {
            let what = format!("the grammar has {} bytes, more than {MAX_GRAMMAR_BYTES}", lark.len());
            return Err(failed(what, "use fewer or shorter JSON Schemas"));
        }
        if lark.lines().count() > MAX_LINES {
            let what = format!("the grammar has more than {MAX_LINES} lines");
            return Err(failed(what, "use fewer rules"));
        }
        let grammar = TopLevelGrammar::from_lark(lark.to_owned());
        let matcher = with_large_stack(|| Matcher::new(self.factory.create_parser(grammar)))?;
        if let Some(error) = matcher.get_error() {
            // Further lines quote the grammar.
            let reason = error.lines().next().unwrap_or_default();
            let what = format!("the grammar is not supported: {}", sanitize(reason));
            return Err(failed(what, "use the Lark syntax of llguidance, and a simpler JSON Schema"));
        }
        Ok(GrammarMatcher { matcher, ends: self.ends.clone(), failure: Arc::default() })
    }
}

impl GrammarMatcher {
    /// Sets the logits of all tokens that cannot follow to NaN, which the sampler ignores.
    pub fn restrict(&mut self, logits: &mut [f32]) {
        let allowed = match self.matcher.compute_mask_or_eos() {
            Ok(allowed) if !allowed.is_zero() => Ok(allowed),
            Ok(_) => Err("no token can follow".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let allowed = allowed.inspect_err(|why| self.fail(why));
        for (token, logit) in (0..).zip(logits) {
            let is_allowed = match &allowed {
                Ok(allowed) => (token as usize) < allowed.len() && allowed.is_allowed(token),
                Err(_) => self.ends.contains(&token),
            };
            if !is_allowed {
                *logit = f32::NAN;
            }
        }
    }

    /// Advances by a token that was sampled from restricted logits.
    pub fn accept(&mut self, token: u32) {
        if self.matcher.is_stopped() || self.ends.contains(&token) {
            return;
        }
        if let Err(error) = self.matcher.consume_token(token) {
            self.fail(&error.to_string());
        }
    }

    /// Returns where the reason will be, if the matcher has to end the text early.
    pub fn failure(&self) -> Arc<OnceLock<String>> {
        self.failure.clone()
    }

    fn fail(&self, why: &str) {
        let _ = self.failure.set(sanitize(why));
    }
}

impl Clone for GrammarMatcher {
    /// Returns an independent matcher at the same position, for another sequence.
    fn clone(&self) -> Self {
        let matcher = self.matcher.deep_clone();
        GrammarMatcher { matcher, ends: self.ends.clone(), failure: Arc::default() }
    }
}

impl std::fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarMatcher").field("failure", &self.failure).finish_non_exhaustive()
    }
}

fn failed(what: impl Into<String>, hint: &'static str) -> ExecError {
    ExecError::Grammar { what: what.into(), hint }
}

#[cfg(test)]
mod tests {
    use hearth_profiles::gguf::Value as MetadataValue;
    use serde_json::{Value, json};

    use super::*;
    use crate::sampler::{Sampler, SamplerOptions};
    use crate::tokenizer::tests::metadata;

    /// A tokenizer of 256 byte tokens (1 to 256), some words, the control token `<call>` (262) and the end (263).
    fn tokenizer() -> Tokenizer {
        let mut texts = vec!["<unk>".to_owned()];
        texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        texts.extend(["\":", "tr", "true", "[1", "{\"", "<call>", "</s>"].map(String::from));
        let kind = |id: usize| match id {
            0 => 2,
            1..=256 => 6,
            262 | 263 => 3,
            _ => 1,
        };
        let keys = [("eos_token_id", MetadataValue::U32(263)), ("add_bos_token", MetadataValue::Bool(false))];
        Tokenizer::new(&metadata("llama", texts, kind, &keys)).expect("a tokenizer")
    }

    /// Generates with random logits, and returns the text with control tokens and whether it ended by itself.
    fn generate(grammar: &str, seed: u64) -> (String, bool) {
        let tokenizer = tokenizer();
        let compiler = GrammarCompiler::new(&tokenizer, 270).expect("a compiler");
        let options = SamplerOptions { temperature: 1.0, top_k: 0, top_p: 1.0, seed, ..Default::default() };
        let matcher = compiler.compile(grammar).expect("a grammar");
        let failure = matcher.failure();
        let mut sampler = Sampler::new(options).expect("a sampler").with_grammar(matcher);
        let mut text = String::new();
        for _ in 0..400 {
            let token = sampler.sample(&[0.0; 270]);
            if tokenizer.is_eog(token) {
                assert_eq!(failure.get(), None);
                return (text, true);
            }
            text += &tokenizer.text_of(token);
        }
        (text, false)
    }

    #[test]
    fn random_tokens_become_valid_json() {
        let schema = json!({
            "type": "object",
            "properties": {"is_on": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
            "required": ["is_on", "level"],
            "additionalProperties": false
        });
        for seed in 0..20 {
            let (text, ended) = generate(&format!("start: %json {schema}"), seed);
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(ended && value["is_on"].is_boolean() && value["level"].is_u64(), "{text}");
        }
    }

    #[test]
    fn control_tokens_are_not_text() {
        let grammar = r#"start: "<call>" <[262]> "x""#;
        assert_eq!(generate(grammar, 0), ("<call><call>x".to_owned(), true));
        for seed in 0..20 {
            assert!(!generate(r"start: /(.|\n)*/", seed).0.contains("<call>"));
        }
    }

    #[test]
    fn invalid_grammars_are_clear_errors() {
        let compiler = GrammarCompiler::new(&tokenizer(), 264).expect("a compiler");
        for grammar in [
            "start: missing",
            "",
            "start: %json {\"type\": \"klingon\"}",
            "start: %json {\"uniqueItems\": true}",
        ] {
            let error = compiler.compile(grammar).expect_err("not valid").to_string();
            assert!(error.starts_with("the grammar is not supported: ") && !error.contains('\n'), "{error}");
        }
        let nested = (0..100).fold(json!(true), |inner, _| json!({"items": inner}));
        assert!(compiler.compile(&format!("start: %json {nested}")).is_ok());
        let _ = compiler.compile(&format!("start: %json {}1", "{\"items\": ".repeat(40_000)));
        // Long chains of rules and of terminals.
        for name in ["a", "A"] {
            let rules: Vec<String> = (0..1990).map(|at| format!("{name}{at}: {name}{}", at + 1)).collect();
            let _ = compiler.compile(&format!("start: {name}0\n{}\n{name}1990: \"x\"\n", rules.join("\n")));
        }
        // Deep nesting on one line.
        for part in [
            "(",
            "[",
            "%lark { start: ",
            "%lark{\nstart: ",
            "~",
            "%json {\"a\": ",
            "\"a\" & ",
            "a | ",
            "a ",
            "/a/ & ~",
            "%regex {\"a\": ",
        ] {
            let _ = compiler.compile(&format!("start: {}", part.repeat((64 << 10) / part.len())));
            let _ = compiler.compile(&format!("start: X\nX: {}", part.repeat((64 << 10) / part.len())));
        }
        let definitions: Vec<String> =
            (0..1000).map(|at| format!("\"d{at}\": {{\"$ref\": \"#/$defs/d{}\"}}", at + 1)).collect();
        let _ = compiler.compile(&format!(
            "start: %json {{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{}, \"d1000\": {{\"type\": \"null\"}}}}}}",
            definitions.join(", ")
        ));
        let _ = compiler.compile(&format!("start: /{}a{}/", "(".repeat(30_000), ")".repeat(30_000)));
        for endless in ["x".repeat(MAX_GRAMMAR_BYTES + 1), "\n".repeat(MAX_LINES + 1)] {
            assert!(compiler.compile(&endless).is_err());
        }
    }
}
