#!/usr/bin/env python3
"""Compares hearth with llama.cpp on a public model: tokens, choices and perplexity.

    python3 scripts/peers/llama_cpp_public.py MODEL.gguf [--logits target/release/examples/logits]
    python3 scripts/peers/llama_cpp_public.py --tokens exec/runtime/tests/data/public MODEL.gguf...

Needs the packages llama-cpp-python, gguf and numpy, and the files of scripts/public-models.sh. The first form runs the first
512 tokens of a text (LICENSE-APACHE) in both programs and prints

- the relative RMS of the differences of the logits, and the mean KL divergence,
- the positions at which the largest logits differ, and how many of them llama.cpp decides by more than four times the
  RMS of the differences at this position,
- the perplexity of both, with a KV cache in f32, and with the KV caches of `--kv-cache`,
- the perplexity of a longer text, compared with that of llama.cpp with a copy of the weights in F16, which `gguf`
  dequantises, and without rounded activations.

The second form writes 1000 texts (code, prose, chat templates, random characters of all scripts) to texts.json, and
llama.cpp's tokens of each text and model to MODEL.json, for the test `public` of hearth-runtime.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import tempfile

import gguf
import llama_cpp
import numpy as np

import llama_cpp_tokens

FOLDER = pathlib.Path(os.environ.get("HEARTH_PUBLIC", "target/public")) / "llama.cpp"
COUNT, LENGTH = 1000, 512
LONG_TEXT = ["LICENSE-APACHE", "README.md", "docs/concepts/simulator.md", "docs/concepts/residency.md",
             "docs/concepts/planners.md", "docs/guides/serving.md"]
# Blocks of Unicode with the scripts that most people write, and some that hardly anybody writes.
BLOCKS = [(0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5F4), (0x600, 0x6FF),
          (0x900, 0x97F), (0xE01, 0xE5B), (0x1100, 0x11FF), (0x2000, 0x206F), (0x2190, 0x21FF), (0x3040, 0x30FF),
          (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1F6FF)]


def texts():
    """Returns 1000 texts. The same files give the same texts."""
    choice = random.Random(1)
    found = list(llama_cpp_tokens.TEXTS)
    cases = (FOLDER / "ggml-vocab-gpt-2.gguf.inp").read_text(errors="replace")
    found += cases.split("\n__ggml_vocab_test__\n")
    sources = [path.read_text() for path in sorted((FOLDER / "templates").glob("*.jinja"))]
    sources += [path.read_text() for path in sorted(pathlib.Path("scripts/peers").glob("llama_cpp_[at]*.py"))]
    sources += [cases, pathlib.Path("LICENSE-APACHE").read_text()]
    while len(found) < COUNT * 3 // 4:
        source = choice.choice(sources)
        start = choice.randrange(len(source))
        found.append(source[start:start + choice.randrange(1, 120)])
    while len(found) < COUNT:
        blocks = choice.sample(BLOCKS, choice.randrange(1, 4))
        found.append("".join(chr(choice.randint(*choice.choice(blocks))) for _ in range(choice.randrange(1, 40))))
    # A null character ends a text in C.
    return [text.replace("\0", "") for text in found]


def open_model(path, context, kv_type=0):
    # Values can be quantised only with flash attention.
    return llama_cpp.Llama(str(path), n_ctx=context, n_batch=context, logits_all=True, type_k=kv_type, type_v=kv_type,
                           n_threads=2, flash_attn=kv_type > 1, verbose=False)


def write_tokens(folder, paths):
    folder.mkdir(parents=True, exist_ok=True)
    given = texts()
    write = lambda name, value: (folder / name).write_text(
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in value) + "\n]\n")
    write("texts.json", given)
    for path in paths:
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        write(f"{path.stem}.json", [model.tokenize(text.encode(), add_bos=False, special=False) for text in given])


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def own_logits(program, path, ids, shape, kv_cache="f32"):
    ran = subprocess.run([program, f"--kv-cache={kv_cache}", str(path), *map(str, ids)], capture_output=True, check=True)
    return np.frombuffer(ran.stdout, np.float32).reshape(shape).astype(np.float64)


def perplexity(logits, ids):
    log = log_softmax(logits)
    return np.exp(-np.mean([log[at, ids[at + 1]] for at in range(len(ids) - 1)]))


def write_f16(path, out):
    """Writes a copy of the model whose quantised matrices are dequantised to F16."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if len(tensor.shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_perplexities(path, program, model):
    """Prints the perplexities of parts of a longer text, of 512 tokens each, compared with those of weights in F16."""
    ids = model.tokenize("".join(pathlib.Path(name).read_text() for name in LONG_TEXT).encode(), add_bos=False)
    first = model.tokenize(b"")
    parts = [first + ids[at:at + LENGTH - len(first)] for at in range(0, len(ids) - LENGTH, LENGTH - len(first))]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "f16.gguf"
        write_f16(path, copy)
        exact_model = open_model(copy, LENGTH)
        losses = []
        for part in parts:
            row = []
            for peer in (exact_model, model):
                peer.reset()
                peer.eval(part)
                row.append(np.log(perplexity(np.array(peer.scores[:len(part)], dtype=np.float64), part)))
            own = own_logits(program, path, part, (len(part), model.n_vocab()))
            losses.append([*row, np.log(perplexity(own, part))])
    exact, peer, own = np.exp(np.mean(losses, 0))
    print(f"  {len(parts)} parts of {LENGTH} tokens: perplexity with weights in F16 {exact:.4f}; hearth "
          f"{own / exact - 1:+.2%}, llama.cpp {peer / exact - 1:+.2%}")


def compare(path, program, kv_caches):
    text = pathlib.Path("LICENSE-APACHE").read_text()
    model = open_model(path, LENGTH)
    ids = model.tokenize(text.encode())[:LENGTH]
    model.eval(ids)
    peer = np.array(model.scores[:len(ids)], dtype=np.float64)
    own = own_logits(program, path, ids, peer.shape)
    rms = lambda values, axis=None: np.sqrt((values * values).mean(axis))
    error = rms(own - peer, -1)
    own_log, peer_log = log_softmax(own), log_softmax(peer)
    divergence = (np.exp(peer_log) * (peer_log - own_log)).sum(-1).mean()
    top = np.sort(peer, -1)
    differs = own.argmax(-1) != peer.argmax(-1)
    decided = top[:, -1] - top[:, -2] > 4 * error
    print(f"{path.name}: {len(ids)} tokens; relative RMS {rms(own - peer) / rms(peer):.1e}, mean KL {divergence:.1e}; "
          f"{differs.sum()} other choices, {(differs & decided).sum()} of them decided by llama.cpp; perplexity "
          f"{perplexity(own, ids):.4f}, llama.cpp {perplexity(peer, ids):.4f}")
    compare_perplexities(path, program, model)
    for kv_cache in kv_caches:
        logits = own_logits(program, path, ids, peer.shape, kv_cache)
        llama_type = {"f16": 1, "q8_0": 8, "q4_0": 2}[kv_cache]
        model = open_model(path, LENGTH, llama_type)
        model.eval(ids)
        llama = perplexity(np.array(model.scores[:len(ids)], dtype=np.float64), ids)
        print(f"  KV cache in {kv_cache}: perplexity {perplexity(logits, ids):.4f}, llama.cpp {llama:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    parser.add_argument("--logits", default="target/release/examples/logits")
    parser.add_argument("--tokens", type=pathlib.Path)
    parser.add_argument("--kv-cache", default="f16,q8_0,q4_0")
    options = parser.parse_args()
    if options.tokens:
        write_tokens(options.tokens, options.models)
        return
    for path in options.models:
        compare(path, options.logits, options.kv_cache.split(","))


if __name__ == "__main__":
    main()
