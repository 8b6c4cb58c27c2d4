//! Pre-tokenizers: the regular expressions that split a text into words, before BPE merges within these words.
//!
//! A pre-tokenizer has a list of regular expressions. Each expression splits the words that the previous expressions
//! produced: a match is a word, and so is the text between two matches. The metadata key `tokenizer.ggml.pre` names the
//! pre-tokenizer. An unknown name is an error, because a wrong pre-tokenizer gives plausible but wrong tokens. The
//! expressions are those that each model family publishes with its tokenizer (`tokenizer.json`), in the form in which
//! llama.cpp applies them; `scripts/peers/llama_cpp_tokens.py` compares the results.
//!
//! Deviation: with the pre-tokenizers of DeepSeek LLM and Coder, a text with U+2003 (em space) is not split
//! as by llama.cpp, which searches for Chinese characters in a text whose spaces it has replaced. Here it is
//! split as by the published tokenizers.
//!
//! Deviation: for Tekken and GPT-4o llama.cpp replaces the classes of upper and lower case letters by the letters from A
//! to Z and a to z. Here the expressions are the published ones.
//!
//! Not here: merging. That is [`super::bpe`].

/// The expression of GPT-2 (Radford et al. 2019); the text after the last match is a word too.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
/// The expression of Llama 3: digits are split into groups of up to three.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Qwen 2 and later: each digit is a word.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Qwen 3.5: as [`QWEN_2`], but combining marks belong to the letters.
const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of GPT-4o: a word begins where lower case changes to upper case.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Tekken, the tokenizer of Mistral: as [`GPT_4O`], without contractions, and each digit is a word.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression of Gemma 4: words are lines and line ends.
const LINES: &str = r"[^\n]+|[\n]+";
/// The expression of DeepSeek for words of Chinese, Japanese and Korean characters.
const DEEPSEEK_CJK: &str = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+";
/// The expression of DeepSeek LLM for words in scripts with upper and lower case.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-z\x{b5}À-ÖØ-öø-ƺƼ-ƿ\x{1c4}-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\x{3f5}Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼ\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// The regular expressions, in the order of application.
    pub(super) patterns: &'static [&'static str],
    /// How words are written in the vocabulary.
    pub(super) symbols: Symbols,
    /// Whether a word that is itself a token is encoded as this token, without merges.
    pub(super) ignore_merges: bool,
    /// Whether a BOS token is added before the text.
    pub(super) bos: BosPolicy,
}

/// The characters of a BPE vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbols {
    /// A visible character for each byte, as in GPT-2.
    Bytes,
    /// The characters of the text, with `▁` instead of spaces, and byte tokens such as `<0x0A>` for others, as in
    /// `SentencePiece`.
    Characters,
}

/// Whether a BOS token is added before the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BosPolicy {
    /// Only if the model file says so.
    Omitted,
    /// Unless the model file says otherwise.
    Added,
    /// Always: model files that say otherwise are wrong.
    Required,
}

/// The supported pre-tokenizers with their names in model files. A name stands for several model families if their
/// expressions are equal.
const FAMILIES: &[(&[&str], PreTokenizer)] = &[
    (&["gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion", "granite-docling"], bytes(&[GPT_2])),
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        PreTokenizer { ignore_merges: true, bos: BosPolicy::Added, ..bytes(&[LLAMA_3]) },
    ),
    (&["smaug-bpe", "dbrx", "chatglm-bpe"], bytes(&[LLAMA_3])),
    (&["glm4", "glm5"], PreTokenizer { ignore_merges: true, ..bytes(&[LLAMA_3]) }),
    (
        &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"],
        bytes(&[QWEN_2]),
    ),
    (&["qwen35"], bytes(&[QWEN_3_5])),
    (&["gpt-4o", "llama4", "kanana2", "minimax-m2"], bytes(&[GPT_4O])),
    (&["tekken"], PreTokenizer { ignore_merges: true, bos: BosPolicy::Added, ..bytes(&[TEKKEN]) }),
    (&["gemma4"], PreTokenizer { symbols: Symbols::Characters, bos: BosPolicy::Required, ..bytes(&[LINES]) }),
    (
        &["deepseek-llm"],
        bytes(&[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            r"\s+$",
            DEEPSEEK_CJK,
            r"\p{N}+",
        ]),
    ),
    (&["deepseek-coder"], bytes(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"])),
    (
        &["deepseek-v3", "hunyuan-dense"],
        bytes(&[
            r"\p{N}{1,3}",
            r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ]),
    ),
    (
        &["smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        bytes(&[r"\p{N}", GPT_2]),
    ),
    (&["falcon"], bytes(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"])),
    (&["default"], bytes(&[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"])),
];

const fn bytes(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { patterns, symbols: Symbols::Bytes, ignore_merges: false, bos: BosPolicy::Omitted }
}

impl PreTokenizer {
    pub(super) fn by_name(name: &str) -> Option<PreTokenizer> {
        FAMILIES.iter().find(|(names, _)| names.contains(&name)).map(|&(_, pre_tokenizer)| pre_tokenizer)
    }

    /// Returns the names of all supported pre-tokenizers, separated by commas.
    pub(super) fn names() -> String {
        FAMILIES.iter().flat_map(|(names, _)| *names).copied().collect::<Vec<_>>().join(", ")
    }
}
