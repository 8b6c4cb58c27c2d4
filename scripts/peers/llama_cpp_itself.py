"""Measures how much llama.cpp's logits depend on the order of additions, and compares hearth's logits with them.

    python3 scripts/peers/llama_cpp_itself.py MODEL.gguf [target/release/examples/logits]

Runs the same 64 tokens in llama.cpp in one batch, one by one, and in one batch with flash attention, and in hearth.
Prints the relative RMS of the differences of logits to the first run. The differences of llama.cpp alone come from
the order of additions, so another program cannot be expected to be closer. Needs llama-cpp-python and numpy.
"""
import ctypes, subprocess, sys

import llama_cpp as L
import numpy as np

TOKENS = 64
quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, ctypes.c_void_p(0))
L.llama_backend_init()


def logits(path, batch, flash):
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    options = L.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 256, 128, 128
    options.n_threads = options.n_threads_batch = 1
    options.flash_attn_type = int(flash)
    options.type_k = options.type_v = 0  # f32, as in `logits`
    context = L.llama_init_from_model(model, options)
    vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    tokens = [(at * 7919 + 11) % vocabulary for at in range(TOKENS)]
    rows = []
    for start in range(0, TOKENS, batch):
        part = L.llama_batch_init(batch, 0, 1)
        part.n_tokens = batch
        for at in range(batch):
            part.token[at], part.pos[at] = tokens[start + at], start + at
            part.n_seq_id[at], part.seq_id[at][0], part.logits[at] = 1, 0, 1
        if L.llama_decode(context, part) != 0:
            sys.exit("llama.cpp cannot run the tokens")
        for at in range(batch):
            row = L.llama_get_logits_ith(context, at)
            rows.append(np.ctypeslib.as_array(row, (vocabulary,)).copy())
    return tokens, np.array(rows)


def distance(a, b):
    return float(np.sqrt(((a - b) ** 2).mean() / (a**2).mean()))


path = sys.argv[1]
program = sys.argv[2] if len(sys.argv) > 2 else "target/release/examples/logits"
tokens, whole = logits(path, TOKENS, False)
print(f"llama.cpp, one by one: {distance(whole, logits(path, 1, False)[1]):.1e}")
print(f"llama.cpp, flash attention: {distance(whole, logits(path, TOKENS, True)[1]):.1e}")
run = subprocess.run([program, path, *map(str, tokens)], check=True, capture_output=True)
print(f"hearth: {distance(whole, np.frombuffer(run.stdout, np.float32).reshape(whole.shape)):.1e}")
