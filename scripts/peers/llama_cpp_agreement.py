#!/usr/bin/env python3
"""Compares the logits of hearth with those of llama.cpp, for every architecture and weight type.

Needs the packages llama-cpp-python, gguf and numpy, and two programs of this workspace:

    cargo build --release -p hearth -p hearth-runtime --bin hearth --example logits
    python3 scripts/peers/llama_cpp_agreement.py -o docs/studies/llama-cpp

Makes a model of random weights for each case with `hearth synth`, runs the same 80 tokens through llama.cpp, through
hearth and, for unquantised weights, through a reference pass in NumPy f32, and prints a table. The KV cache is f32
everywhere. Exits with 1 if a case exceeds a bound:

- relative RMS of the logits against llama.cpp at most 1e-3 for F32 and F16, 1e-2 for other types;
- relative RMS against NumPy at most 1e-4 (F32 and F16);
- at the last 64 positions the same largest logit as llama.cpp, unless llama.cpp's two largest differ by less than four
  times the RMS difference at that position.

`--fixtures FOLDER` writes the logits of some cases for the test `architectures` of hearth-runtime.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap

import gguf
import llama_cpp
import numpy as np

TOKENS, STEPS, VOCABULARY, CONTEXT = 80, 64, 512, 48
# Options of `hearth synth` for variants of an architecture.
VARIANTS = {"gemma4-shared": ["--shared-kv", "6", "--per-layer-input", "256"], "llama-experts": ["--experts", "8"]}
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "internlm2", "smollm3", "phi3", "granite",
                 "olmo2", "gemma4", "gemma4-shared", "qwen35", "qwen3moe", "olmoe", "llama-experts",
                 "granitemoe", "gpt-oss", "qwen35moe"]
TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s",
         "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "mxfp4", "q4_k_m",
         "q5_k_m", "q3_k_m", "q2_k_m", "iq1_s_m"]
# Bounds of the relative RMS against llama.cpp, and against NumPy.
PLAIN, ROUNDED, NUMPY = 1e-3, 1e-2, 1e-4
# Three of four layers have a gated delta net.
QWEN_35 = ("qwen35", "qwen35moe")
# Rows of logits in a fixture.
FIXTURE_ROWS = [0, 1, 40, 79]
FIXTURES = [("llama", "f16"), ("llama", "q4_k_m"), ("qwen2", "f16"), ("qwen2", "q8_0"), ("qwen3", "f16"),
            ("qwen3", "q4_k"), ("gemma", "f16"), ("gemma", "q8_0"), ("gemma2", "f16"), ("gemma2", "q6_k"),
            ("internlm2", "f16"), ("internlm2", "q8_0"), ("gemma3", "f16"), ("gemma3", "q4_k_m"),
            ("smollm3", "f16"), ("smollm3", "q8_0"), ("phi3", "f16"), ("phi3", "q4_k_m"), ("granite", "f16"),
            ("granite", "q8_0"), ("olmo2", "f16"), ("olmo2", "q8_0"),
            ("gemma4", "f16"), ("gemma4", "q8_0"), ("gemma4-shared", "f16"), ("gemma4-shared", "q8_0"),
            ("qwen35", "f32"), ("qwen35", "q8_0"), ("qwen3moe", "f32"), ("qwen3moe", "q8_0"), ("olmoe", "f32"), ("llama-experts", "f32"),
            ("granitemoe", "f32"), ("gpt-oss", "f32"), ("gpt-oss", "mxfp4"),
            ("qwen35moe", "f32")]


def tokens():
    return [(at * at * 7 + at * 37 + 11) % VOCABULARY for at in range(TOKENS)]


def base(arch):
    """Returns the architecture and the variant of a case."""
    return tuple(arch.rsplit("-", 1)) if arch in VARIANTS else (arch, "")


def synth(hearth, arch, quant, path, gain=None):
    """Generates a small model. Returns None if `hearth synth` does not support the type."""
    variant, arch = VARIANTS.get(arch, []), base(arch)[0]
    layers = "12" if "--shared-kv" in variant else "7" if arch in ("gemma3", "gemma4") else "4"
    gain = gain or (1.0 if quant in ("f32", "f16") else 0.5)
    kv_heads = "4" if arch == "olmoe" else "2"
    head_length = "128" if arch in ("qwen3", "gemma4", "qwen35", "qwen35moe") else "64"
    command = [hearth, "synth", "--arch", arch, "--layers", layers, "--dim", "256", "--ffn", "512", "--heads", "4",
               "--kv-heads", kv_heads, "--head-length", head_length, "--context", str(CONTEXT), "--vocab", str(VOCABULARY), "--quant", quant, "--gain", str(gain), *variant, "-o", str(path)]
    if arch in ("llama", "phi3", "gemma4"):
        command.append("--rope-factors")
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    return path if made.returncode == 0 else None


def rewritten(path, out, keys=(), biases=False, parts=0, fused=False):
    """Writes a copy of the model with additional keys, random biases, several parts, or fused matrices of experts."""
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(out, arch, split_max_tensors=parts)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", *(key for key, _ in keys)):
            continue
        kind = field.types[0]
        sub = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for key, value in keys:
        put = writer.add_string if isinstance(value, str) else \
            writer.add_uint32 if isinstance(value, int) else writer.add_float32
        put(key, value)
    random = np.random.default_rng(5)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in reader.tensors:
        if fused and tensor.name.endswith("ffn_up_exps.weight"):
            continue
        if fused and tensor.name.endswith("ffn_gate_exps.weight"):
            up = by_name[tensor.name.replace("gate", "up")]
            both = np.concatenate([tensor.data, up.data], axis=1)
            writer.add_tensor(tensor.name.replace("gate", "gate_up"), both, raw_dtype=tensor.tensor_type)
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        stem, kind = tensor.name.rsplit(".", 1)
        if biases and tensor.name.startswith("blk.") and len(tensor.shape) == 2 and kind == "weight":
            bias = (random.standard_normal(int(tensor.shape[1])) * 0.1).astype(np.float32)
            writer.add_tensor(f"{stem}.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peer_logits(path):
    llm = llama_cpp.Llama(str(path), n_ctx=256, n_batch=256, logits_all=True, type_k=0, type_v=0, n_threads=2,
                          flash_attn=False, verbose=False)
    llm.eval(tokens())
    return np.array(llm.scores[:TOKENS], dtype=np.float64)


def own_logits(program, path):
    ran = subprocess.run([program, str(path), *map(str, tokens())], capture_output=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.decode().strip())
    return np.frombuffer(ran.stdout, np.float32).reshape(TOKENS, VOCABULARY).astype(np.float64)


class Plain:
    """The reference forward pass in NumPy f32, with all tokens in one batch."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.arch = self.keys["general.architecture"]
        self.weights = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
                        .reshape(tuple(int(n) for n in reversed(tensor.shape))) for tensor in reader.tensors}

    def key(self, name, default=None):
        return self.keys.get(f"{self.arch}.{name}", default)

    def norm(self, x, name):
        epsilon = np.float32(self.key("attention.layer_norm_rms_epsilon"))
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * self.weights[name]

    def product(self, x, name):
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def has_window(self, layer):
        period = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo2": 4, "gpt-oss": 2}.get(self.arch, 1)
        return layer % period + 1 < period

    def angles(self, count, size, layer):
        pairs = np.arange(size // 2, dtype=np.float64)
        base, factor = float(self.key("rope.freq_base")), float(self.key("rope.scaling.factor", 1.0))
        is_local = self.arch in ("gemma3", "gemma4") and self.has_window(layer)
        if is_local:
            base, factor = 10000.0, 1.0
        frequency = base ** (-2 * pairs / size)
        magnitude = 1.0
        if self.key("rope.scaling.type") == "yarn":
            trained = self.key("rope.scaling.original_context_length", self.key("context_length"))
            pair = [size * np.log(trained / (beta * 2 * np.pi)) / (2 * np.log(base)) for beta in (32, 1)]
            low, high = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), size - 1)
            kept = 1 - np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
            frequency = frequency * (kept + (1 - kept) / factor)
            magnitude = 1 + 0.1 * np.log(factor)
        else:
            frequency = frequency / factor
        # Both programs have a context longer than the one in training.
        for name in ("rope_freqs.weight", "rope_factors_long.weight") if not is_local else ():
            frequency = frequency / self.weights.get(name, 1.0)
        magnitude *= self.key("rope.scaling.attn_factor", 1.0)
        angle = np.arange(count)[:, None] * frequency
        return (magnitude * np.cos(angle)).astype(np.float32), (magnitude * np.sin(angle)).astype(np.float32)

    def rotate(self, x, layer):
        if self.arch == "smollm3" and layer % 4 == 3:
            return x
        if self.arch in QWEN_35:
            size = self.key("rope.dimension_count")
            x, rest = x[..., :size], x[..., size:]
        cos, sin = (part[:, None] for part in self.angles(x.shape[0], x.shape[-1], layer))
        if self.arch in ("llama", "internlm2", "smollm3", "granite", "granitemoe"):
            a, b = x[..., 0::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)
        a, b = np.split(x, 2, -1)
        rotated = [a * cos - b * sin, a * sin + b * cos]
        return np.concatenate(rotated + [rest] if self.arch in QWEN_35 else rotated, -1)

    def attention(self, x, layer):
        name = f"blk.{layer}."
        if self.arch in QWEN_35 and layer % 4 != 3:
            return self.delta_net(x, name)
        count, heads, groups = len(x), self.key("attention.head_count"), self.key("attention.head_count_kv")
        groups = groups[layer] if isinstance(groups, list) else groups
        if f"{name}attn_qkv.weight" in self.weights:
            fused, head = self.product(x, name + "attn_qkv"), self.key("attention.key_length")
            q, k, v = np.split(fused, [heads * head, (heads + groups) * head], -1)
        else:
            # Layers without keys use those of the last layer of their kind that has keys.
            kind = self.has_window(layer)
            if f"{name}attn_k.weight" in self.weights:
                v = "attn_v" if f"{name}attn_v.weight" in self.weights else "attn_k"
                self.sources[kind] = name, x, v
            source, before, v = self.sources[kind]
            q = self.product(x, name + "attn_q")
            k, v = (self.product(before, source + part) for part in ("attn_k", v))
        if self.arch in ("olmo2", "olmoe"):
            q, k = self.norm(q, name + "attn_q_norm.weight"), self.norm(k, name + "attn_k_norm.weight")
        q, k, v = (part.reshape(count, of, -1) for part, of in ((q, heads), (k, groups), (v, groups)))
        if self.arch in QWEN_35:
            q, gate = np.split(q, 2, -1)
        if self.arch == "gemma4":
            v = v / np.sqrt((v * v).mean(-1, keepdims=True) + np.float32(1e-5))
        if self.arch in ("qwen3", "qwen3moe", "gemma3", "gemma4", "qwen35", "qwen35moe"):
            q, k = self.norm(q, name + "attn_q_norm.weight"), self.norm(k, source + "attn_k_norm.weight")
        q, k = self.rotate(q, layer), self.rotate(k, layer)
        k, v = (np.repeat(part, heads // groups, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(
            1.0 if self.arch == "gemma4" else self.key("attention.scale", q.shape[-1] ** -0.5))
        if self.arch == "gemma2":
            cap = np.float32(self.key("attn_logit_softcapping"))
            scores = cap * np.tanh(scores / cap)
        at = np.arange(count)
        hidden = at[None, :] > at[:, None]
        if self.has_window(layer):
            hidden |= at[:, None] - at[None, :] >= self.key("attention.sliding_window")
        scores = np.where(hidden, np.float32(-np.inf), scores)
        sinks = self.weights.get(name + "attn_sinks.weight", np.full(heads, -np.inf, np.float32))[:, None, None]
        largest = np.maximum(scores.max(-1, keepdims=True), sinks)
        scores = np.exp(scores - largest)
        scores /= scores.sum(-1, keepdims=True) + np.exp(sinks - largest)
        mixed = np.einsum("hqk,khd->qhd", scores, v)
        if self.arch in QWEN_35:
            mixed = mixed / (1 + np.exp(-gate))
        return self.product(mixed.reshape(count, -1), name + "attn_output")

    def delta_net(self, x, name):
        count, epsilon = len(x), np.float32(self.key("attention.layer_norm_rms_epsilon"))
        size, groups, heads = (self.key(f"ssm.{part}") for part in ("state_size", "group_count", "time_step_rank"))
        silu = lambda value: value / (1 + np.exp(-value))
        u, kernels = self.product(x, name + "attn_qkv"), self.weights[name + "ssm_conv1d.weight"]
        length = kernels.shape[1]
        u = np.concatenate([np.zeros((length - 1, u.shape[1]), np.float32), u])
        u = silu(sum(u[at:at + count] * kernels[:, at] for at in range(length)))
        q, k, v = np.split(u, [groups * size, 2 * groups * size], -1)
        q, k, v = (part.reshape(count, -1, size) for part in (q, k, v))
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + epsilon) for part in (q, k))
        q, k = (np.tile(part, (1, heads // groups, 1)) for part in (q, k))
        step = np.log1p(np.exp(self.product(x, name + "ssm_alpha") + self.weights[name + "ssm_dt.bias"]))
        decay = np.exp(self.weights[name + "ssm_a"] * step)
        beta = 1 / (1 + np.exp(-self.product(x, name + "ssm_beta")))
        state, out = np.zeros((heads, size, size), np.float32), []
        for t in range(count):
            state = state * decay[t][:, None, None]
            change = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
            state = state + change[:, :, None] * k[t][:, None]
            out.append(np.einsum("hvk,hk->hv", state, q[t]) * np.float32(size ** -0.5))
        out = self.norm(np.stack(out), name + "ssm_norm.weight").reshape(count, -1)
        return self.product(out * silu(self.product(x, name + "attn_gate")), name + "ssm_out")

    @staticmethod
    def gelu(x):
        z = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x ** 3)
        return np.float32(0.5) * x * (1 + np.tanh(z))

    def experts(self, x, name):
        weights = [self.weights[f"{name}ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        biases = [self.weights.get(f"{name}ffn_{part}_exps.bias") for part in ("gate", "up", "down")]
        scores = self.product(x, name + "ffn_gate_inp")
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for row, (token, score) in enumerate(zip(x, scores)):
            chosen = np.argsort(-score, kind="stable")[:self.key("expert_used_count")]
            total = np.float32(1.0) if self.arch == "olmoe" else score[chosen].sum()
            for expert in np.sort(chosen):
                gate, up, down = (part[expert] for part in weights)
                gate_bias, up_bias, down_bias = (0 if part is None else part[expert] for part in biases)
                hidden, other = gate @ token + gate_bias, up @ token + up_bias
                if self.arch == "gpt-oss":
                    hidden, other = np.minimum(hidden, 7), np.clip(other, -7, 7) + 1
                    hidden = hidden / (1 + np.exp(np.float32(-1.702) * hidden)) * other
                else:
                    hidden = hidden / (1 + np.exp(-hidden)) * other
                out[row] += score[expert] / total * (down @ hidden + down_bias)
        if f"{name}ffn_up_shexp.weight" in self.weights:
            gate, up = (self.product(x, f"{name}ffn_{part}_shexp") for part in ("gate", "up"))
            shared = self.product(gate / (1 + np.exp(-gate)) * up, name + "ffn_down_shexp")
            out += shared / (1 + np.exp(-(x @ self.weights[name + "ffn_gate_inp_shexp.weight"])))[:, None]
        return out

    def feed_forward(self, x, layer):
        name = f"blk.{layer}."
        if f"{name}ffn_gate_inp.weight" in self.weights:
            return self.experts(x, name)
        if f"{name}ffn_gate.weight" in self.weights:
            gate, up = self.product(x, name + "ffn_gate"), self.product(x, name + "ffn_up")
        else:
            gate, up = np.split(self.product(x, name + "ffn_up"), 2, -1)
        if self.arch.startswith("gemma"):
            gate = self.gelu(gate)
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.product(gate * up, name + "ffn_down")

    def logits(self):
        h = self.weights["token_embd.weight"][tokens()]
        if self.arch.startswith("gemma"):
            h = h * np.float32(np.sqrt(h.shape[-1]))
        h = h * np.float32(self.key("embedding_scale", 1.0))
        self.sources = {}
        inputs = None
        if "per_layer_token_embd.weight" in self.weights:
            count, layers = len(h), self.key("block_count")
            own = self.weights["per_layer_token_embd.weight"][tokens()].reshape(count, layers, -1)
            inputs = (self.product(h, "per_layer_model_proj") / np.float32(np.sqrt(h.shape[-1]))).reshape(own.shape)
            inputs = self.norm(inputs, "per_layer_proj_norm.weight") + own * np.float32(np.sqrt(own.shape[-1]))
            inputs = inputs / np.float32(np.sqrt(2))
        scale = np.float32(self.key("residual_scale", 1.0))
        for layer in range(self.key("block_count")):
            name = f"blk.{layer}."
            ffn_norm = "post_attention_norm" if self.arch in ("qwen35", "qwen35moe", "gpt-oss") else "ffn_norm"
            for block, before, after in ((self.attention, "attn_norm", "post_attention_norm"),
                                         (self.feed_forward, ffn_norm, "post_ffw_norm")):
                x = h if self.arch == "olmo2" else self.norm(h, f"{name}{before}.weight")
                change = block(x, layer)
                if self.arch in ("gemma2", "gemma3", "gemma4", "olmo2"):
                    change = self.norm(change, f"{name}{after}.weight")
                h = h + scale * change
            if inputs is not None:
                change = self.product(self.gelu(self.product(h, name + "inp_gate")) * inputs[:, layer], name + "proj")
                h = h + self.norm(change, f"{name}post_norm.weight")
            h = h * self.weights.get(f"{name}layer_output_scale.weight", np.float32(1.0))
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        logits = self.norm(h, "output_norm.weight") @ head.T
        if self.arch in ("gemma2", "gemma4"):
            cap = np.float32(self.key("final_logit_softcapping"))
            logits = cap * np.tanh(logits / cap)
        return logits.astype(np.float64) / self.key("logit_scale", 1.0)


def rms(x):
    return float(np.sqrt((x * x).mean()))


def case(name, quant, path, program, opened=None):
    """Returns a table row and llama.cpp's logits. `opened` is the file for hearth: another part of a split model."""
    peer, own = peer_logits(path), own_logits(program, opened or path)
    error = rms(own - peer)
    choices = np.flatnonzero(own[-STEPS:].argmax(-1) != peer[-STEPS:].argmax(-1))
    top = np.sort(peer[-STEPS:], -1)
    margins = top[:, -1] - top[:, -2]
    ties = margins < 4 * np.sqrt(((own - peer)[-STEPS:] ** 2).mean(-1))
    wrong = [int(step) for step in choices if not ties[step]]
    row = {"case": name, "type": quant, "relative_rms": error / rms(peer), "equal": STEPS - len(choices),
           "wrong": len(wrong), "near_ties": int(ties.sum()), "numpy": None, "peer_numpy": None}
    bound = PLAIN if quant in ("f32", "f16") else ROUNDED
    row["good"] = not wrong and row["relative_rms"] <= bound
    if not opened:
        plain = Plain(path).logits()
        row["numpy"], row["peer_numpy"] = rms(own - plain) / rms(plain), rms(peer - plain) / rms(plain)
        row["good"] &= quant not in ("f32", "f16") or row["numpy"] <= NUMPY
    return row, peer


def variants(hearth, program, folder):
    """Yields the rows of models with rope scaling, with biases, and in several parts."""
    llama, qwen, oss = (folder / f"{arch}-f32.gguf" for arch in ("llama", "qwen2", "gpt-oss"))
    for arch, path in (("llama", llama), ("qwen2", qwen), ("gpt-oss", oss)):
        synth(hearth, arch, "f32", path)
    yarn = [("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0),
            ("rope.scaling.original_context_length", 32)]
    linear = [("rope.scaling.type", "linear"), ("rope.scaling.factor", 2.5)]
    for name, source, keys, biases in [("qwen2, yarn", qwen, yarn, False), ("llama, yarn", llama, yarn, False),
                                       ("gpt-oss, yarn", oss, yarn, False),
                                       ("llama, linear", llama, linear, False), ("llama, biases", llama, [], True)]:
        path = folder / "variant.gguf"
        arch = name.split(",")[0]
        rewritten(source, path, [(f"{arch}.{key}", value) for key, value in keys], biases)
        yield case(name, "f32", path, program)[0]
    # NumPy reads the file with separate matrices.
    path, fused = folder / "qwen35moe-f32.gguf", folder / "fused.gguf"
    synth(hearth, "qwen35moe", "f32", path)
    rewritten(path, fused, fused=True)
    yield case("qwen35moe, fused", "f32", path, program, opened=fused)[0]
    rewritten(qwen, folder / "parts.gguf", parts=15)
    parts = sorted(folder.glob("parts-*-of-*.gguf"))
    yield case(f"qwen2, part 2 of {len(parts)}", "f32", parts[0], program, opened=parts[1])[0]


def table(rows):
    lines = ["| model | type | relative RMS | NumPy | llama.cpp, NumPy | equal choices | near ties | |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    number = lambda value: "" if value is None else f"{value:.1e}"
    for row in rows:
        lines.append(f"| {row['case']} | {row['type']} | {number(row['relative_rms'])} | {number(row['numpy'])} | "
                     f"{number(row['peer_numpy'])} | {row['equal']} of {STEPS} | {row['near_ties']} | "
                     f"{'' if row['good'] else '**out of bounds**'} |")
    return "\n".join(lines)


REPORT = """# Logits compared with llama.cpp, for every architecture and weight type

Models of random weights (4 layers, 7 of `gemma3` and `gemma4`, 12 of `gemma4-shared`, width 256, vocabulary
{vocabulary}; `gemma2` and `gemma3` with a window of {window} positions, as `olmo2`, `llama` and `phi3` with factors
of rotary frequencies), {tokens} tokens, KV caches in f32, llama-cpp-python {version}. Made by

    cargo build --release -p hearth -p hearth-runtime --bin hearth --example logits
    python3 scripts/peers/llama_cpp_agreement.py -o docs/studies/llama-cpp

`relative RMS`: of the difference from llama.cpp's logits. `NumPy`: of the difference from a reference pass in NumPy
f32, which is part of the script; `llama.cpp, NumPy`: the difference between llama.cpp and that pass. `equal choices`:
positions, of the last {steps}, with the same largest logit; `near ties`: positions where llama.cpp's two largest logits
differ by less than four times the RMS difference at that position, so that either may be chosen.

{table}

Bounds: 1e-3 for F32 and F16 and 1e-2 for other types against llama.cpp, 1e-4 against NumPy, and different choices
only at near ties.

{verdict}

Causes of the differences: llama.cpp rounds activations to f16 for F16 weights, to bf16 for BF16 weights, and to eight
bits with an f16 scale for quantised weights, where hearth has an f32 scale
([decision 2](../../decisions/0002-one-reduction-order.md)). It computes GELU with a table in f16. A sum that differs
in its last bit is sometimes rounded to the next of the 255 steps, which changes the logits as much as rounding
itself. Therefore both programs differ from NumPy, which does not round, as much as from each other. In mixtures of
experts rounding can also change which experts a token gets, if two have nearly the same score; then its logits differ
by a tenth or more.

Weights of unquantised models have a standard deviation of `1 / sqrt(row length)`, those of the others half of that.
With the full deviation, rounding to eight bits changes the logits of random models of this depth by 2 to 3 % in
either program (column `NumPy` with `--gain 1`), more than the bound. With half of it, as in a trained model, a layer
changes the residual stream less.

Another order of additions changes llama.cpp's own logits, so no other program can be expected to be closer. Models of
16 layers with the full deviation, `scripts/peers/llama_cpp_itself.py`: the same 64 tokens one by one instead of in
one batch differ by 2.7e-2 (q4_k_m), with flash attention by 4.9e-2, and hearth's by 2.8e-2. With half of the
deviation 1.1e-2, 1.9e-2 and 1.1e-2.
{skipped}"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hearth", default="target/release/hearth")
    parser.add_argument("--logits", default="target/release/examples/logits")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("-o", "--output", type=pathlib.Path)
    parser.add_argument("--fixtures", type=pathlib.Path)
    parser.add_argument("--gain", type=float, help="scale of the weights; 1 for unquantised types, else 0.5")
    options = parser.parse_args()
    rows, kept, skipped = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for arch in options.architectures.split(","):
            for quant in options.types.split(","):
                path = folder / "model.gguf"
                if not synth(options.hearth, arch, quant, path, options.gain):
                    skipped[f"{arch} {quant}"] = "`hearth synth` does not write it"
                    continue
                try:
                    row, peer = case(arch, quant, path, options.logits)
                except (RuntimeError, ValueError) as error:
                    skipped[f"{arch} {quant}"] = str(error).splitlines()[-1]
                    continue
                rows.append(row)
                print(table([row]).splitlines()[-1], flush=True)
                if (arch, quant) in FIXTURES:
                    kept.append((arch, quant, hashlib.sha256(path.read_bytes()).hexdigest(), peer, row))
        for row in variants(options.hearth, options.logits, folder):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
    bad = [row for row in rows if not row["good"]]
    verdict = "All hold."
    if bad:
        excess = max(row["relative_rms"] / (PLAIN if row["type"] in ("f32", "f16") else ROUNDED) for row in bad) - 1
        verdict = (f"{len(bad)} of {len(rows)} do not hold, by at most {excess:.0%}; there, both programs are about as "
                   f"far from NumPy as from each other. {sum(row['wrong'] for row in rows)} choices differ elsewhere.")
    print(verdict, *(f"skipped {quant}: {why}" for quant, why in skipped.items()), sep="\n")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        notes = "".join(f"\nNot compared: {quant}, {why}.\n" for quant, why in skipped.items())
        (options.output / "report.md").write_text(REPORT.format(
            vocabulary=VOCABULARY, window=CONTEXT // 2, tokens=TOKENS, steps=STEPS, version=llama_cpp.__version__,
            table=table(rows), verdict=textwrap.fill(verdict, 120), skipped=notes), encoding="utf-8")
    if options.fixtures:
        options.fixtures.mkdir(parents=True, exist_ok=True)
        cases = []
        for arch, quant, digest, peer, row in kept:
            file = f"{arch}-{quant}.f32"
            (options.fixtures / file).write_bytes(peer[FIXTURE_ROWS].astype("<f4").tobytes())
            arch, variant = base(arch)
            cases.append({"architecture": arch, "variant": variant, "quant": quant, "sha256": digest, "logits": file,
                          "relative_rms": round(row["relative_rms"], 7)})
        text = json.dumps({"tokens": tokens(), "rows": FIXTURE_ROWS, "vocabulary": VOCABULARY, "context": CONTEXT,
                           "llama_cpp_python": llama_cpp.__version__, "cases": cases}, indent=1)
        (options.fixtures / "cases.json").write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
