#!/usr/bin/env python3
"""Compares the embeddings of `hearth serve` with those of llama.cpp.

    python3 scripts/peers/embeddings.py target/release/hearth MODEL.gguf...

Needs the packages llama-cpp-python, gguf and numpy. Serves each model with `--pooling last`, and a copy whose file says
that EOS ends a text if the file says that it does not. Both programs tokenize the texts. Prints for each model the
largest difference of an embedding, relative to its length of 1, and the smallest cosine. Exits with 1 if the numbers of
tokens differ, or if a cosine is below 0.999.
"""

import argparse
import base64
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request

import gguf
import llama_cpp
import numpy as np

TEXTS = ["In the beginning", "Blessed are the poor in spirit", "a", "The LORD is my shepherd; I shall not want. " * 8,
         "Grüße, 世界! 1234 \n\t tabs", "def f(x):\n    return x + 1\n"]
MIN_COSINE = 0.999


def with_eos(path, folder):
    """Returns a copy of the model in which EOS ends a text; `None` if it does already, or if the key is missing."""
    field = gguf.GGUFReader(path).get_field("tokenizer.ggml.add_eos_token")
    if field is None or field.contents():
        return None
    copy = pathlib.Path(folder) / f"eos-{pathlib.Path(path).name}"
    shutil.copy(path, copy)
    field = gguf.GGUFReader(copy, "r+").get_field("tokenizer.ggml.add_eos_token")
    field.parts[field.data[0]][0] = True
    return copy


def own_embeddings(hearth, path):
    command = [hearth, "serve", str(path), "--pooling", "last", "--kv-cache", "f32", "--context", "512",
               "--threads", "2", "--listen", "127.0.0.1:0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        address = json.loads(server.stdout.readline())["listening"]
        body = json.dumps({"input": TEXTS, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(f"http://{address}/v1/embeddings", body, {"Content-Type": "application/json"})
        response = json.load(urllib.request.urlopen(request))
    finally:
        server.terminate()
        server.wait()
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in response["data"]]
    return np.array(vectors, np.float64), response["usage"]["prompt_tokens"]


def peer_embeddings(path):
    llm = llama_cpp.Llama(str(path), embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_LAST, n_ctx=512,
                          n_batch=512, n_threads=2, type_k=0, type_v=0, flash_attn=False, verbose=False)
    vectors, count = llm.embed(TEXTS, normalize=True, return_count=True)
    return np.array(vectors, np.float64), count


parser = argparse.ArgumentParser()
parser.add_argument("hearth")
parser.add_argument("models", nargs="+")
arguments = parser.parse_args()
failed = False
print("| model | tokens | largest relative difference | smallest cosine |\n| --- | --- | --- | --- |")
with tempfile.TemporaryDirectory() as folder:
    for model in arguments.models:
        for path in filter(None, [model, with_eos(model, folder)]):
            (own, own_count), (peer, peer_count) = own_embeddings(arguments.hearth, path), peer_embeddings(path)
            difference = np.linalg.norm(own - peer, axis=1) / np.linalg.norm(peer, axis=1)
            cosine = (own * peer).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(peer, axis=1)
            failed |= own_count != peer_count or cosine.min() < MIN_COSINE
            tokens = own_count if own_count == peer_count else f"{own_count}, llama.cpp {peer_count}"
            print(f"| {pathlib.Path(path).name} | {tokens} | {difference.max():.1e} | {cosine.min():.9f} |", flush=True)
sys.exit(1 if failed else 0)
