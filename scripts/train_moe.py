#!/usr/bin/env python3
"""Train "psalm-moe", a small mixture-of-experts model (qwen3moe), on the King James Bible, on a CPU.

  train_moe.py corpus KJV.txt TOKENIZER.gguf WORK    text -> WORK/data.npz
  train_moe.py train  WORK --minutes 14              -> WORK/moe.pt
  train_moe.py export WORK TOKENIZER.gguf OUT        -> OUT/psalm-moe-f16.gguf and -q8_0.gguf
  train_moe.py golden OUT                            llama.cpp's greedy texts -> OUT/golden-moe.json
  train_moe.py check  WORK OUT                       the files in PyTorch, compared with llama.cpp

KJV.txt holds one verse a line, "Ge1:1 In the beginning ...", as printed by
`bible -f gen1:1-rev22:21` of Debian's bible-kjv. TOKENIZER.gguf is psalm-7m-f16.gguf, or any other
file of that model: only its tokenizer is read.
Needs: numpy, torch, gguf; tokenizers (corpus); llama-cpp-python (export, golden, check).
"""
import argparse, ctypes, json, math, os, re, sys, time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")      # spinning threads hold up a shared machine; set before torch

import gguf
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

NAME, BOS, EOS, SEQ = "psalm-moe", 0, 1, 256
SHAPE = dict(vocab=2048, d=256, layers=4, heads=4, kv_heads=2, head=64, experts=16, used=4, ffn=64,
             eps=1e-6, rope_base=10000.0)
BALANCE = 0.01                                           # weight of the load-balancing loss
PROMPTS = ["And Jesus said unto them,", "Now the king of Babylon", "And it came to pass"]
NEW_TOKENS = 64

BOOKS = dict(pair.replace("_", " ").split("=") for pair in """
    Ge=Genesis Exo=Exodus Lev=Leviticus Num=Numbers Deu=Deuteronomy Josh=Joshua Jdgs=Judges Ruth=Ruth 1Sm=1_Samuel
    2Sm=2_Samuel 1Ki=1_Kings 2Ki=2_Kings 1Chr=1_Chronicles 2Chr=2_Chronicles Ezra=Ezra Neh=Nehemiah Est=Esther
    Job=Job Psa=Psalm Prv=Proverbs Eccl=Ecclesiastes SSol=Song_of_Solomon Isa=Isaiah Jer=Jeremiah Lam=Lamentations
    Eze=Ezekiel Dan=Daniel Hos=Hosea Joel=Joel Amos=Amos Obad=Obadiah Jonah=Jonah Mic=Micah Nahum=Nahum Hab=Habakkuk
    Zep=Zephaniah Hag=Haggai Zec=Zechariah Mal=Malachi Mat=Matthew Mark=Mark Luke=Luke John=John Acts=Acts
    Rom=Romans 1Cor=1_Corinthians 2Cor=2_Corinthians Gal=Galatians Eph=Ephesians Phi=Philippians Col=Colossians
    1Th=1_Thessalonians 2Th=2_Thessalonians 1Tim=1_Timothy 2Tim=2_Timothy Titus=Titus Phmn=Philemon Heb=Hebrews
    Jas=James 1Pet=1_Peter 2Pet=2_Peter 1Jn=1_John 2Jn=2_John 3Jn=3_John Jude=Jude Rev=Revelation
""".split())

# ---------------------------------------------------------------- data
def make_corpus(source, tokenizer, work):
    """Chapters become documents: a heading line, then one verse a line. One in 40 is held out."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = gguf.GGUFReader(tokenizer).fields
    tokens, merges = (fields[f"tokenizer.ggml.{n}"].contents() for n in ("tokens", "merges"))
    assert len(tokens) == SHAPE["vocab"] and tokens[BOS] == "<|bos|>" and tokens[EOS] == "<|eos|>"
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # gpt-2

    chapters = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        book, chapter, verse = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line).groups()
        chapters.setdefault((BOOKS[book], int(chapter)), []).append(" ".join(verse.split()))
    docs = [[f"{b} {n}\n"] + [v + "\n" for v in vs] for (b, n), vs in chapters.items()]
    parts = {"heldout": docs[20::40], "train": [d for i, d in enumerate(docs) if i % 40 != 20]}
    arrays = {}
    for name, part in parts.items():
        ids, starts = [], []
        for doc in part:
            ids.append(BOS)
            for verse in tok.encode_batch(doc):
                starts.append(len(ids))
                ids += verse.ids
            ids.append(EOS)
        size = sum(len(s.encode()) for d in part for s in d)
        arrays |= {name: np.array(ids, np.int64), name + "_starts": np.array(starts), name + "_bytes": size}
        print(f"{name}: {len(part)} chapters, {size} bytes, {len(ids)} tokens")
    work.mkdir(parents=True, exist_ok=True)
    np.savez(work / "data.npz", **arrays)

def batches(data, size, rng):
    """Windows that open with <|bos|> at a random verse, as a prompt does."""
    ids, starts = data["train"], data["train_starts"]
    starts = starts[starts + SEQ <= len(ids)]
    while True:
        order = rng.permutation(starts)
        for i in range(0, len(order) - size + 1, size):
            y = torch.from_numpy(ids[order[i : i + size, None] + np.arange(SEQ)])
            yield torch.cat((torch.full((size, 1), BOS), y[:, :-1]), 1), y

def heldout_windows(data):
    """Each held-out token once: runs of whole verses of one chapter, <|bos|> before each run."""
    ids, starts = data["heldout"], data["heldout_starts"].tolist()
    ends = [e - 1 if ids[e - 1] == BOS else e for e in starts[1:]] + [len(ids)]
    run = None
    for s, e in zip(starts, ends):
        if run and (s != run[1] or e - run[0] > SEQ - 1):
            yield [BOS] + ids[run[0] : run[1]].tolist()
            run = None
        run = (run[0] if run else s, min(e, (run[0] if run else s) + SEQ - 1))
    yield [BOS] + ids[run[0] : run[1]].tolist()

# ---------------------------------------------------------------- model
def make_model(c=SHAPE):
    """The parameters have the names and shapes of the GGUF tensors, less the ending ".weight"."""
    def matrix(*shape, std=0.02):
        return nn.Parameter(torch.randn(*shape) * std)

    def rope(x, cos, sin):                               # NEOX: element i turns with i + head/2
        lo, hi = x.chunk(2, dim=-1)
        return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), dim=-1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            d, q, kv, e = c["d"], c["heads"] * c["head"], c["kv_heads"] * c["head"], c["experts"]
            small = 0.02 / math.sqrt(2 * c["layers"])    # what adds to the residual stream starts small
            self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
            self.attn_q_norm = nn.Parameter(torch.ones(c["head"]))
            self.attn_k_norm = nn.Parameter(torch.ones(c["head"]))
            self.attn_q, self.attn_k, self.attn_v = matrix(q, d), matrix(kv, d), matrix(kv, d)
            self.attn_output = matrix(d, q, std=small)
            self.ffn_gate_inp = matrix(e, d)             # the router
            self.ffn_gate_exps, self.ffn_up_exps = matrix(e, c["ffn"], d), matrix(e, c["ffn"], d)
            self.ffn_down_exps = matrix(e, d, c["ffn"], std=small)

        def attention(self, x, cos, sin):
            b, t, d = x.shape
            heads = lambda w, n: F.linear(x, w).view(b, t, n, c["head"]).transpose(1, 2)
            q, k = heads(self.attn_q, c["heads"]), heads(self.attn_k, c["kv_heads"])
            v = heads(self.attn_v, c["kv_heads"])
            q = rope(F.rms_norm(q, (c["head"],), self.attn_q_norm, c["eps"]), cos, sin)
            k = rope(F.rms_norm(k, (c["head"],), self.attn_k_norm, c["eps"]), cos, sin)
            k, v = (z.repeat_interleave(c["heads"] // c["kv_heads"], dim=1) for z in (k, v))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.linear(a.transpose(1, 2).reshape(b, t, -1), self.attn_output)

        def experts(self, x):
            """Also returns the router's probabilities and the weights it gives, 0 where not chosen."""
            used = c["used"]
            probs = F.linear(x, self.ffn_gate_inp).softmax(-1)
            best, which = probs.topk(used, dim=-1)
            best = best / best.sum(-1, keepdim=True)
            order = which.flatten().argsort(stable=True)         # the rows of each expert together
            counts = torch.bincount(which.flatten(), minlength=c["experts"]).tolist()
            gate_up, out = torch.cat((self.ffn_gate_exps, self.ffn_up_exps), 1), []
            for e, rows in enumerate(x.index_select(0, order // used).split(counts)):
                gate, up = F.linear(rows, gate_up[e]).chunk(2, -1)
                out.append(F.linear(F.silu(gate) * up, self.ffn_down_exps[e]))
            out = torch.cat(out) * best.flatten().index_select(0, order)[:, None]
            y = torch.zeros_like(x).index_add(0, order // used, out)
            return y, probs, torch.zeros_like(probs).scatter(-1, which, best)

        def forward(self, x, cos, sin):
            x = x + self.attention(F.rms_norm(x, (c["d"],), self.attn_norm, c["eps"]), cos, sin)
            rows = F.rms_norm(x, (c["d"],), self.ffn_norm, c["eps"]).flatten(0, 1)
            y, *routing = self.experts(rows)
            return x + y.view(x.shape), *(r.view(*x.shape[:2], -1) for r in routing)

    class Model(nn.Module):
        """Input and output embeddings are tied: llama.cpp takes token_embd where there is no output."""
        def __init__(self):
            super().__init__()
            self.token_embd, self.output_norm = matrix(c["vocab"], c["d"]), nn.Parameter(torch.ones(c["d"]))
            self.blk = nn.ModuleList(Block() for _ in range(c["layers"]))
            freq = c["rope_base"] ** (-torch.arange(0, c["head"], 2).float() / c["head"])
            angle = torch.outer(torch.arange(2 * SEQ).float(), freq)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

        def forward(self, ids):
            """The logits, and of each layer the router's probabilities and the weights."""
            x, t, routing = self.token_embd[ids], ids.shape[1], []
            for block in self.blk:
                x, probs, weights = block(x, self.cos[:t], self.sin[:t])
                routing.append((probs, weights))
            x = F.rms_norm(x, (c["d"],), self.output_norm, c["eps"])
            return x @ self.token_embd.T, routing

    return Model()

def imbalance(routing):
    """Load-balancing loss of the Switch Transformer, summed over layers; 1 a layer when even."""
    total = 0.0
    for probs, weights in routing:
        share = (weights > 0).float().mean((0, 1)) / SHAPE["used"]
        total = total + SHAPE["experts"] * (share * probs.mean((0, 1))).sum()
    return total

# ---------------------------------------------------------------- training
def train(work, minutes, batch, lr):
    torch.manual_seed(7)
    data, model = dict(np.load(work / "data.npz")), make_model()
    params = list(model.parameters())
    print(f"{sum(p.numel() for p in params)} parameters", flush=True)
    opt = torch.optim.AdamW([{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
                             {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}],
                            lr=lr, betas=(0.9, 0.95), fused=True)
    stream = batches(data, batch, np.random.default_rng(7))
    t0, step, mean, budget = time.time(), 0, None, minutes * 60
    while time.time() - t0 < budget:
        part = min(1.0, (time.time() - t0) / budget)     # cosine schedule over wall time
        now = lr * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * part)))
        for group in opt.param_groups:
            group["lr"] = now
        x, y = next(stream)
        logits, routing = model(x)
        loss, uneven = F.cross_entropy(logits.view(-1, SHAPE["vocab"]), y.reshape(-1)), imbalance(routing)
        (loss + BALANCE * uneven).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step == 10 or step % 50 == 0:
            took = time.time() - t0
            print(f"step {step} {took:.0f}s loss {mean:.3f} imbalance {uneven.item() / SHAPE['layers']:.3f} "
                  f"lr {now:.2e} {step * batch * SEQ / took:.0f} tok/s", flush=True)
    torch.save({"shape": SHAPE, "steps": step, "tokens": step * batch * SEQ, "minutes": minutes,
                "state": model.state_dict()}, work / "moe.pt")
    print(json.dumps(dict(quality(model.eval(), data), steps=step, tokens=step * batch * SEQ)))

def quality(model, data):
    """Perplexity on the held-out chapters, and how evenly each layer uses its experts there."""
    nll, count, used = 0.0, 0, torch.zeros(SHAPE["layers"], SHAPE["experts"])
    with torch.no_grad():
        for w in heldout_windows(data):
            ids = torch.tensor([w])
            logits, routing = model(ids[:, :-1])
            nll += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
            count += len(w) - 1
            used += torch.stack([(weights[0] > 0).float().sum(0) for _, weights in routing])
    shares = used / used.sum(1, keepdim=True)            # even: 1/16 = 6.25%
    return {"ppl": round(math.exp(nll / count), 3), "tokens_heldout": count,
            "bits_per_byte": round(nll / math.log(2) / float(data["heldout_bytes"]), 4),
            "expert_share_percent_min_max": [[round(100 * s.min().item(), 2), round(100 * s.max().item(), 2)]
                                             for s in shares]}

# ---------------------------------------------------------------- GGUF
def export(work, tokenizer, out):
    import llama_cpp.llama_cpp as L
    ck = torch.load(work / "moe.pt")
    c = ck["shape"]
    out.mkdir(parents=True, exist_ok=True)
    f16, q8 = out / f"{NAME}-f16.gguf", out / f"{NAME}-q8_0.gguf"
    g = gguf.GGUFWriter(f16, "qwen3moe")
    g.add_name(NAME)
    g.add_description("Mixture-of-experts toy model trained on the King James Bible (public domain)")
    g.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    sizes = {"vocab_size": c["vocab"], "context_length": SEQ, "embedding_length": c["d"],
             "block_count": c["layers"], "expert_count": c["experts"], "expert_used_count": c["used"],
             "feed_forward_length": c["ffn"] * c["used"],        # no dense layer, but some readers want the key
             "expert_feed_forward_length": c["ffn"], "rope.dimension_count": c["head"],
             "attention.head_count": c["heads"], "attention.head_count_kv": c["kv_heads"],
             "attention.key_length": c["head"], "attention.value_length": c["head"]}
    for key, size in sizes.items():
        g.add_uint32("qwen3moe." + key, size)
    g.add_layer_norm_rms_eps(c["eps"])
    g.add_rope_freq_base(c["rope_base"])
    for key, field in gguf.GGUFReader(tokenizer).fields.items():
        if key.startswith("tokenizer."):
            g.add_key_value(key, field.contents(), field.types[0],
                            field.types[1] if len(field.types) > 1 else None)
    for name, p in ck["state"].items():
        full = p.dim() == 1 or name.endswith("ffn_gate_inp")     # norms and routers stay F32
        g.add_tensor(name + ".weight", p.numpy().astype(np.float32 if full else np.float16))
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    p = L.llama_model_quantize_default_params()
    p.nthread, p.ftype = 1, L.LLAMA_FTYPE_MOSTLY_Q8_0
    assert L.llama_model_quantize(str(f16).encode(), str(q8).encode(), ctypes.byref(p)) == 0
    for path in (f16, q8):
        print(f"{path.name}: {path.stat().st_size} bytes")

def from_gguf(path):
    """The model with the dequantised weights of a file."""
    model = make_model()
    model.load_state_dict({
        t.name.removesuffix(".weight"):
            torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32))
        for t in gguf.GGUFReader(path).tensors})
    return model.eval()

# ---------------------------------------------------------------- llama.cpp
class Reference:
    """llama.cpp as plainly as it goes: one thread, no weight repacking, no flash attention, F32 KV."""

    def __init__(self, path):
        import llama_cpp.llama_cpp as L
        global quiet                                     # llama.cpp keeps the pointer
        quiet = L.llama_log_callback(lambda level, text, _: level in (3, 4) and sys.stderr.write(text.decode()))
        L.llama_log_set(quiet, None)
        L.llama_backend_init()
        self.L = L
        mp = L.llama_model_default_params()
        mp.n_gpu_layers, mp.use_extra_bufts = 0, False
        self.model = L.llama_model_load_from_file(str(path).encode(), mp)
        assert self.model, path
        cp = L.llama_context_default_params()
        cp.n_ctx = cp.n_batch = cp.n_ubatch = SEQ
        cp.n_threads = cp.n_threads_batch = 1
        cp.flash_attn_type = 0
        cp.type_k = cp.type_v = 0
        self.ctx = L.llama_init_from_model(self.model, cp)
        self.vocab = L.llama_model_get_vocab(self.model)

    def tokenize(self, text):
        raw, buf = text.encode(), (self.L.llama_token * 512)()
        return list(buf[: self.L.llama_tokenize(self.vocab, raw, len(raw), buf, 512, True, False)])

    def text(self, ids):
        raw, buf = b"", ctypes.create_string_buffer(256)
        for t in ids:
            n = self.L.llama_token_to_piece(self.vocab, t, buf, 256, 0, True)
            raw += buf.raw[:n]
        return raw.decode("utf-8", "replace")

    def logits(self, ids, fresh=False):
        """Append ids to the sequence, or start one; the logits after the last."""
        if fresh:
            self.L.llama_memory_clear(self.L.llama_get_memory(self.ctx), True)
        held = (self.L.llama_token * len(ids))(*ids)     # the batch only points at it
        assert self.L.llama_decode(self.ctx, self.L.llama_batch_get_one(held, len(ids))) == 0
        return np.ctypeslib.as_array(self.L.llama_get_logits_ith(self.ctx, -1), (SHAPE["vocab"],)).copy()

    def greedy(self, prompt, n):
        """One prompt, prefilled in one batch, then token by token; stops early only at <|eos|>."""
        ids, margins, first, z = [], [], None, self.logits(prompt, fresh=True)
        while True:
            top = np.argsort(-z, kind="stable")[:5]
            first = first or [[int(t), round(float(z[t]), 4)] for t in top]
            ids.append(int(top[0]))
            margins.append(round(float(z[top[0]] - z[top[1]]), 4))
            if len(ids) == n or ids[-1] == EOS:
                return ids, margins, first
            z = self.logits(ids[-1:])

def golden(out):
    import llama_cpp
    files = {}
    for path in sorted(out.glob(f"{NAME}-*.gguf")):
        ref, files[path.name] = Reference(path), []
        for prompt in PROMPTS:
            ids = ref.tokenize(prompt)
            new, margins, first = ref.greedy(ids, NEW_TOKENS)
            files[path.name].append({
                "prompt": prompt, "prompt_ids": ids, "greedy_ids": new, "text": ref.text(new),
                "first_step_top5": first, "min_margin": min(margins), "margins": margins})
            print(f"{path.name} | min margin {min(margins)}\n{prompt}>>>{ref.text(new)}\n")
    avx512 = " AVX-512" if b"AVX512 = 1" in llama_cpp.llama_print_system_info() else ""
    about = {"made_by": f"llama-cpp-python {llama_cpp.__version__}, its vendored llama.cpp, "
                        f"x86-64{avx512} CPU backend",
             "settings": "1 thread, no repacking, no flash attention, F32 KV cache, prompt in one batch",
             "margins": "logit of the chosen token minus that of the runner-up, each step; other arithmetic may "
                        "differ from greedy_ids where this is small", "new_tokens": NEW_TOKENS}
    text = json.dumps({"about": about, "files": files}, indent=1)
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    json.loads(text)
    (out / "golden-moe.json").write_text(text + "\n")

def check(work, out):
    """Each file's dequantised weights in PyTorch, F32: quality, and agreement with llama.cpp."""
    data, result = dict(np.load(work / "data.npz")), {}
    recorded = json.loads((out / "golden-moe.json").read_text())
    for name, runs in recorded["files"].items():
        model, ref = from_gguf(out / name), Reference(out / name)
        same, off, close, margins = [], [], [], []
        for run in runs:
            ids, n = run["prompt_ids"], len(run["prompt_ids"])
            with torch.no_grad():                        # every step at once, on llama.cpp's own text
                logits, routing = model(torch.tensor([ids + run["greedy_ids"][:-1]]))
            off.append(np.abs(logits[0, n - 1].numpy() - ref.logits(ids, fresh=True)).max().item())
            hits = logits[0, n - 1 :].argmax(-1).numpy() == run["greedy_ids"]
            same.append(int(hits.argmin()) if not hits.all() else len(hits))
            margins.append([m for m, hit in zip(run["margins"], hits) if not hit])
            # Other arithmetic may also choose another expert, where the last chosen has hardly a
            # higher router logit (the logarithm of the probability) than the first left out.
            last = [probs.log().sort(dim=-1, descending=True).values for probs, _ in routing]
            close.append(min((s[..., SHAPE["used"] - 1] - s[..., SHAPE["used"]]).min().item() for s in last))
        result[name] = quality(model, data) | {
            "first_logits_off_by": [round(x, 5) for x in off], "leading_greedy_ids_as_llama_cpp": same,
            "margins_where_not": margins, "smallest_router_margin": [round(x, 5) for x in close]}
        print(name, json.dumps(result[name]), flush=True)
    (work / "check.json").write_text(json.dumps(result, indent=1) + "\n")

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["corpus", "train", "export", "golden", "check"])
    p.add_argument("paths", nargs="+", type=Path)
    p.add_argument("--minutes", type=float, default=14)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    how = (a.minutes, a.batch, a.lr) if a.what == "train" else ()
    verbs = {"corpus": make_corpus, "train": train, "export": export, "golden": golden, "check": check}
    verbs[a.what](*a.paths, *how)

if __name__ == "__main__":
    main()
