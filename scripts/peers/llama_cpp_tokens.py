#!/usr/bin/env python3
"""Records how llama.cpp tokenises difficult texts.

Needs the packages llama-cpp-python and gguf. Generates two small vocabularies from the texts below, byte-level BPE
and SentencePiece, tokenises every text in llama.cpp with every pre-tokenizer, and writes vocabularies and tokens for
the test `tokens` of hearth-runtime:

    python3 scripts/peers/llama_cpp_tokens.py -o exec/runtime/tests/data/tokens

Merges are learned on whole texts, not on words, so that only the pre-tokenizer separates pairs that span a space, a
digit or a line end: another split gives other tokens.
"""

import argparse
import collections
import json
import pathlib
import tempfile

import gguf
import llama_cpp

TEXTS = [
    "", " ", "  ", "   x", "x   ", "Hello, world!", "hello hello", "In the year 1984, 12345678 people paid $1,234.56.",
    "3.14159 2.71828e-10 0x1F4A9 1/2 50% 10^6", "007 1 12 123 1234 12345 123456", "I'm you're we've they'll he'd it's can't",
    "I'M YOU'RE WE'VE THEY'LL HE'D IT'S CAN'T", "'sneeze 'twas 're 'S", "don''t ''' '' '", "\n", "\n\n", "a\nb\n\nc\n\n\nd",
    "line one\r\nline two\r\n\r\nline four", "\t\ttabs\tand  spaces\t ", "    def f(x):\n        return x ** 2  # square\n",
    "if (a<=b && c!=d) { return a->b[0]; } // done\n", "foo_bar.baz::qux(\"str\\n\") => {'k': [1,2,3]};",
    "你好，世界！今天是2024年5月1日。", "日本語のテキストです。カタカナとひらがな。", "한국어 텍스트입니다. 안녕하세요?", "中文English混合123文本",
    "Привет, мир! Ёлка и ёж.", "Γειά σου Κόσμε", "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया १२३", "สวัสดีชาวโลก",
    "naïve café résumé Ångström", "cafe\u0301 re\u0301sume\u0301 e\u0301\u0301\u0301", "z\u0335a\u0336l\u0337g\u0338o", "😀😃😄 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️",
    "x😀y 1😀2", "½ ² ³ ① Ⅳ ٣", "“quotes” ‘single’ – dash — em … «guillemets»", "\u00a0non\u00a0breaking\u2003em\u3000ideographic\u200bzero",
    "https://example.com/a?b=c&d=e#f user@example.org", "C++ C# F# .NET -> => <= >= != == ~= ^ | `code` $x$", "<s>not special</s>",
    "<|im_start|>user\nhi<|im_end|>", "a<|im_end|>b <|im_end|> c", "<0x41> <unk>", "end of text   \n  \n", " \n \n x", "\n \n\n  \n   y",
    "___---***===", "...!!!???", " ...x !!!y", "A B C D", "UPPER lower MiXeD camelCase snake_case kebab-case", "1st 2nd 3rd 4th", "x1y2z3",
    "$100 $ 100 €5 ¥ £9", "a\u0000b\u0007c", "ﬁ ﬂ ﬀ Ａｂｃ １２３ ！", "\u2028line\u2029para\u0085nel", "ǅ ǈ ß ẞ ſ ı İ",
    "[TOOL] call [/TOOL] and[TOOL]more", "token  [TOOL]  spaced",
]
PRE = ["default", "gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "deepseek-v3", "smollm"]
MERGES = 700
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "[TOOL]", "<unk>", "<s>", "</s>"]


def learned(texts, count):
    """Learns `count` BPE merges: repeatedly merges the most frequent pair of adjacent symbols."""
    words, merges = [list(text) for text in texts], []
    for _ in range(count):
        pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        if not pairs:
            break
        for special in SPECIAL:
            for pair in [pair for pair in pairs if "".join(pair) == special]:
                del pairs[pair]
        (a, b), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        merges.append((a, b))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (a, b):
                    word[at:at + 2] = [a + b]
                at += 1
    return merges


def visible():
    """Returns GPT-2's mapping from bytes to printable characters."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)}


def bpe(path, pre):
    table = visible()
    texts = ["".join(table[byte] for byte in text.encode()) for text in TEXTS]
    merges = learned(texts, MERGES)
    tokens = [table[byte] for byte in range(256)]
    for a, b in merges:
        if a + b not in tokens:
            tokens.append(a + b)
    # Whole words that no merge produces.
    tokens += [word for word in ("\u0120people", "English", "world!") if word not in tokens]
    types = [NORMAL] * len(tokens)
    tokens += ["<|bos|>", "<|im_start|>", "<|im_end|>", "[TOOL]"]
    types += [CONTROL, CONTROL, CONTROL, USER]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(len(tokens) - 4)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_add_bos_token(True)
    finish(writer, len(tokens))


def spm(path, prefix):
    texts = ["\u2581" + text.replace(" ", "\u2581") for text in TEXTS]
    # Every fourth non-ASCII character is not in the vocabulary, so that byte tokens occur.
    characters = sorted({c for text in texts for c in text if ord(c) % 4 or c.isascii()} - {"\0"})
    merges = [(a, b) for a, b in learned(texts, MERGES) if all(c in characters for c in a + b)]
    tokens, types = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    pieces = characters + [a + b for a, b in merges]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in tokens]
    joined = [a + b for a, b in merges]
    scores = [0.0] * len(tokens) + [-float(joined.index(p) // 3) if p in joined else -1000.0 for p in pieces]
    tokens, types = tokens + pieces, types + [NORMAL] * len(pieces)
    tokens += ["<|im_start|>", "<|im_end|>", "[TOOL]"]
    types += [CONTROL, CONTROL, USER]
    scores += [0.0] * 3
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(prefix)
    finish(writer, len(tokens))


def finish(writer, count):
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answers(path):
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    cut = lambda text, special: model.tokenize(text.encode(), add_bos=True, special=special)
    return {"plain": [cut(text, False) for text in TEXTS], "special": [cut(text, True) for text in TEXTS]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    kept = {"llama_cpp_python": llama_cpp.__version__, "texts": TEXTS, "bpe": {}, "spm": {}}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE:
            path = pathlib.Path(folder) / "bpe.gguf"
            bpe(path, pre)
            kept["bpe"][pre] = answers(path)
        for prefix in (True, False):
            path = pathlib.Path(folder) / "spm.gguf"
            spm(path, prefix)
            kept["spm"][str(prefix).lower()] = answers(path)
    bpe(output / "bpe.gguf", "default")
    spm(output / "spm.gguf", True)
    text = json.dumps(kept, ensure_ascii=True, separators=(",", ":"))
    (output / "tokens.json").write_text(text.replace("},", "},\n") + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
