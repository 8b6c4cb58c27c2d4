#!/usr/bin/env python3
"""Measures the gain of several passes in flight, for docs/studies/flight/README.md.

    python3 docs/studies/flight/measure.py target/release/hearth tests/data/models drafts sequences prompt

Rings of processes on loopback, one thread each. Every comparison alternates its variants and prints medians. The part
`prompt` limits each device to a share of a processor with the cpu controller of cgroup v1, so it needs root.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HEARTH, MODELS, PARTS = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
FOLDER = pathlib.Path(tempfile.mkdtemp())
LARGE, DRAFT = MODELS / "psalm-7m-q4_k.gguf", MODELS / "psalm-draft-1m-q8_0.gguf"
PROMPTS = ["And Jesus said unto them,", "Now the king of Babylon", "And it came to pass,", "The Lord is my"]
ROUNDS = int(os.environ.get("ROUNDS", "3"))
COUNTS = [int(count) for count in os.environ.get("DRAFTS", "2,4").split(",")]


def hearth(*arguments):
    done = subprocess.run([HEARTH, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{arguments}: {done.stderr}")
    return done.stdout


class Group:
    """A control group that limits one process to a share of a processor."""

    def __init__(self, name, share):
        self.path = pathlib.Path("/sys/fs/cgroup/cpu") / f"flight-{os.getpid()}-{name}"
        self.path.mkdir()
        (self.path / "cpu.cfs_period_us").write_text("10000")
        (self.path / "cpu.cfs_quota_us").write_text(str(int(10000 * share)))

    def enter(self):
        (self.path / "tasks").write_text(str(os.getpid()))

    def remove(self):
        self.path.rmdir()


class Rings:
    """The workers of a ring, and a plan for them and the head."""

    def __init__(self, model, windows, delay, context, share=None):
        self.delay = ["--link-delay", delay] if delay else []
        self.groups = [Group(place, share) for place in range(len(windows))] if share else []
        self.model, self.workers, addresses = model, [], []
        for place in range(1, len(windows)):
            command = [HEARTH, "worker", "--listen", "127.0.0.1:0", "--model", model, "--threads", "1", *self.delay]
            enter = self.groups[place].enter if share else None
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
            self.workers.append(worker)
            addresses.append(re.search(r"at (\S+) with", worker.stdout.readline())[1])
        devices = "".join(
            f"  - {{name: d{place}, profile: d3{f', address: {addresses[place - 1]!r}' if place else ', head: true'}}}\n"
            for place in range(len(windows))
        )
        scenario = FOLDER / "scenario.yaml"
        scenario.write_text(
            f"schema: scenario/1\nname: flight\nseed: 1\nmodel: {{file: '{pathlib.Path(model).resolve()}'}}\n"
            f"context: {context}\nworkload: {{prompt: 8, generate: 8}}\ndevices:\n{devices}"
            "links: {default: {latency: {value: 5 ms, source: study}, bandwidth: {value: 1 GB/s, source: study}}}\n"
            "residency: {policy: os, prefetch: false}\n"
        )
        self.plan = FOLDER / "plan.yaml"
        self.plan.unlink(missing_ok=True)
        hearth("plan", scenario, "--windows", ",".join(map(str, windows)), "-o", self.plan)

    def run(self, *arguments):
        command = [HEARTH, "--json", "execute", self.plan, "--model", self.model, "--threads", "1"]
        command += ["--ignore-end", *self.delay, *arguments]
        enter = self.groups[0].enter if self.groups else None
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, preexec_fn=enter)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout)

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.wait()
        for group in self.groups:
            group.remove()


def alternating(sides):
    """Runs all variants alternately and returns the results of each one."""
    results = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, run in sides.items():
            results[name].append(run())
    return results


def median(results, key):
    return statistics.median(result[key] for result in results)


def drafts():
    for windows, delay in [([8], None), ([3, 3, 2], None), ([3, 3, 2], "5ms")]:
        ring = Rings(LARGE, windows, delay, 256)
        for number, prompt in enumerate(PROMPTS[:3]):
            plain = ["--prompt", prompt, "--tokens", 64]
            sides = {"plain": lambda: ring.run(*plain)}
            for count in COUNTS:
                draft = ["--draft-model", DRAFT, "--draft-tokens", count]
                sides[count] = lambda draft=draft: ring.run(*plain, *draft)
            results = alternating(sides)
            before = median(results["plain"], "tokens_per_s")
            for count in COUNTS:
                one = results[count][0]
                same = all(r["token_ids"] == results["plain"][0]["token_ids"] for r in results[count])
                rate = median(results[count], "tokens_per_s")
                said = one["speculation"]
                print(
                    f"windows {windows} delay {delay} prompt {number} drafts {count}: same tokens {same}, "
                    f"acceptance {said['acceptance']:.3f} ({said['accepted']}/{said['drafted']}), "
                    f"{said['tokens_per_step']:.2f} tokens a step, {before:.1f} -> {rate:.1f} tokens/s, "
                    f"{rate / before:.2f}x",
                    flush=True,
                )
        ring.close()


def sequences():
    ring = Rings(LARGE, [3, 3, 2], "5ms", 1024)

    def prompts(count):
        return [word for prompt in PROMPTS[:count] for word in ("--prompt", prompt)]

    sides = {count: lambda count=count: ring.run(*prompts(count), "--tokens", 64) for count in (1, 2, 4)}
    draft = ["--draft-model", DRAFT, "--draft-tokens", 4]
    sides["4 with 4 drafts"] = lambda: ring.run(*prompts(4), "--tokens", 64, *draft)
    results = alternating(sides)
    one = median(results[1], "tokens_per_s")
    alone = [ring.run("--prompt", prompt, "--tokens", 64)["token_ids"] for prompt in PROMPTS]
    for name, some in results.items():
        rate = median(some, "tokens_per_s")
        same = all(alone[at] == s["token_ids"] for r in some for at, s in enumerate(r["sequences"]))
        tpot = statistics.median(r["tpot_ms"]["mean"] for r in some)
        print(f"{name} sequences: tokens as alone {same}, {rate:.1f} tokens/s, {rate / one:.2f}x, {tpot:.1f} ms a token of one")
    ring.close()


def prompt():
    model = FOLDER / "synth.gguf"
    hearth("synth", "--layers", 9, "--dim", 512, "--quant", "q4_k_m", "-o", model)
    # In the second ring the head has only one layer in addition to the embedding and the output.
    for windows in ([3, 3, 3], [1, 3, 3, 2]):
        ring = Rings(model, windows, None, 600, share=0.3)
        sides = {
            batch: lambda batch=batch: ring.run("--prompt-tokens", 512, "--tokens", 2, "--micro-batch", batch)
            for batch in (512, 128, 64)
        }
        results = alternating(sides)
        whole = median(results[512], "ttft_ms")
        for batch, some in results.items():
            ms = median(some, "ttft_ms")
            print(f"windows {windows}, batches of {batch}: first token after {ms:.0f} ms, {whole / ms:.2f}x", flush=True)
        ring.close()


for part in PARTS:
    {"drafts": drafts, "sequences": sequences, "prompt": prompt}[part]()
