#!/usr/bin/env python3
"""Measures the time of llama.cpp for each token, and the bytes that it reads from disk.

Needs the package llama-cpp-python. Prints one JSON object: seconds and bytes read of each token.

    python3 scripts/peers/llama_cpp_decode.py MODEL.gguf --threads 2 --prompt 16 --tokens 12

Weights stay in the mapped file, as with its `--mmap`: copies in another layout ("extra buffers") cannot be
reclaimed, so the process would be killed if memory is smaller than the weights. Batches are at most as long as
the prompt, so that the buffers are small. There is no warm-up.

The bytes come from the throttle of the block controller (`--counter FILE`, or the one of its own control group),
or from /proc/self/io if there is none.
"""

import argparse
import json
import os
import sys
import time


def throttle_file():
    """Returns the counter file of this process's control group, or None."""
    mounts = {"blkio": "/sys/fs/cgroup/blkio", "": "/sys/fs/cgroup"}
    try:
        with open("/proc/self/cgroup", encoding="ascii") as groups:
            lines = groups.read().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller, mount in mounts.items():
            if controller not in controllers.split(",") or path == "/":
                continue
            name = "blkio.throttle.io_service_bytes" if controller else "io.stat"
            file = mount + path + "/" + name
            if os.path.exists(file):
                return file
    return None


def bytes_in(file):
    """Returns the bytes read, from a counter file of control groups (v1 or v2) or an `io` file of a process."""
    with open(file, encoding="ascii") as counters:
        text = counters.read()
    total = 0
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] == "Read":
            total += int(words[2])
        elif words and words[0] == "read_bytes:":
            total += int(words[1])
        else:
            total += sum(int(word[7:]) for word in words if word.startswith("rbytes="))
    return total


def open_model(options):
    """Opens the model with all weights in the mapped file."""
    import llama_cpp
    from llama_cpp import llama

    defaults = llama_cpp.llama_model_default_params

    def without_extra_buffers():
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama.llama_cpp.llama_model_default_params = without_extra_buffers
    batch = max(options.prompt, 8)
    return llama_cpp.Llama(
        options.model, n_threads=options.threads, n_threads_batch=options.threads, use_mmap=True,
        n_ctx=256, n_batch=batch, n_ubatch=batch, verbose=False,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16, help="number of prompt tokens")
    parser.add_argument("--tokens", type=int, default=12, help="number of tokens to decode after the prompt")
    parser.add_argument("--counter", help="file with a counter of bytes read")
    options = parser.parse_args()
    if options.prompt < 1 or options.tokens < 1 or options.prompt + options.tokens > 256:
        parser.error("--prompt and --tokens must be at least 1 and at most 256 together")

    counter = options.counter or throttle_file() or "/proc/self/io"
    before = (time.perf_counter(), bytes_in(counter))
    model = open_model(options)
    loaded = (time.perf_counter(), bytes_in(counter))
    # The token ids affect neither the computation time nor the bytes read.
    model.eval([(7919 * place + 5) % model.n_vocab() for place in range(options.prompt)])
    last = (time.perf_counter(), bytes_in(counter))
    result = {
        "peer": "llama.cpp", "counter": counter, "threads": options.threads,
        "load": {"s": loaded[0] - before[0], "bytes": loaded[1] - before[1]},
        "prompt": {"s": last[0] - loaded[0], "bytes": last[1] - loaded[1], "tokens": options.prompt},
        "tokens": [],
    }
    for _ in range(options.tokens):
        model.eval([model.sample(temp=0.0)])
        now = (time.perf_counter(), bytes_in(counter))
        result["tokens"].append({"s": now[0] - last[0], "bytes": now[1] - last[1]})
        last = now
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
