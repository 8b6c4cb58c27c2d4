#!/usr/bin/env python3
"""Writes the lab scenarios of this study: 20 fixed ones, or some that are drawn with a seed.

    python3 docs/studies/network/scenarios.py out/1b.gguf -o out/network [--draw 12 --seed 5]
    for file in out/network/*.yaml; do hearth lab $file --report ${file%.yaml}; done   # as root

Each device is a host in a network namespace. Needs only Python.
"""

import argparse
import pathlib
import random

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("-o", "--output", default="out/network")
parser.add_argument("--draw", type=int, help="number of drawn scenarios, instead of the 20 fixed ones")
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()
output = pathlib.Path(arguments.output)
output.mkdir(parents=True, exist_ok=True)
model = pathlib.Path(arguments.model).resolve()


def write(name, windows, latency, rate, impairments="", wifi=None, limits=(), prompt=64, ipv6=False):
    """Writes a scenario; latency in milliseconds, rate in Mbit/s, and sigma of the delay as `wifi`."""
    names = "abcde"[: len(windows)]
    limits = list(limits) + [""] * len(names)
    value = lambda number, unit: f'{{value: {number} {unit}, source: "set"}}'
    lines = [
        f"# Are {len(names)} devices as fast as predicted over this network?",
        "schema: scenario/1",
        f"name: {name}",
        "seed: 1",
        f"model: {{file: {model}}}",
        "context: 1024",
        f"workload: {{prompt: {prompt}, generate: 48}}",
        "devices:",
        *(f"  - {{name: {one}, profile: measured, limits: {{threads: 2{limit}}}}}" for one, limit in zip(names, limits)),
        "links:",
        "  emulation: namespaces",
        f"  ipv6: {str(ipv6).lower()}",
        *([f"  impairments: {impairments}"] if impairments else []),
        f"  default: {{latency: {value(latency, 'ms')}, bandwidth: {value(rate, 'Mbit/s')}}}",
    ]
    if wifi is not None:
        delay = f"{{median: {value(latency, 'ms')}, sigma: {{value: {wifi}, source: \"set\"}}}}"
        lines += [
            "  wifi:",
            "    channels:",
            f"      - {{name: wifi, bandwidth: {value(rate, 'Mbit/s')}, delay: {delay}, stations: [{', '.join(names)}]}}",
            "    tcp: {loss: {value: 0 %, source: \"set\"}}",
        ]
    lines.append(f"planner: {{strategy: manual, windows: [{', '.join(map(str, windows))}]}}")
    (output / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def fixed():
    two, three = [8, 8], [6, 5, 5]
    write("two-clean-20", two, 2, 20)
    write("two-clean-5", two, 5, 5)
    write("two-clean-1000", two, 0.2, 1000)
    write("three-clean-100", three, 1, 100)
    write("two-far", two, 20, 100, prompt=256)
    write("two-jitter", two, 4, 100, "{jitter: {sigma: 0.4, correlation: 0.3}}")
    write("two-loss", two, 3, 100, "{loss: {rate: 1 %}}", prompt=256)
    write("two-loss-burst", two, 10, 50, "{loss: {rate: 1 %, burst: 3}}", prompt=256)
    write("two-bloat", two, 5, 20, "{queue: {size: 4 MiB}}", prompt=512)
    write("two-shallow", two, 10, 50, "{queue: {size: 30 KiB}}", prompt=512)
    write("two-codel", two, 10, 20, "{queue: {size: 4 MiB, discipline: codel}}", prompt=512)
    write("three-air", three, 2, 100, wifi=0.2, prompt=128)
    write("two-air-slow", two, 3, 20, wifi=0.2, prompt=128)
    write("five-air", [4, 3, 3, 3, 3], 2, 200, wifi=0.2)
    write("two-ipv6", two, 2, 50, ipv6=True)
    write("three-memory", three, 2, 100, limits=["", ", memory_share: 70 %, disk_read: 200 MB/s"])
    write("two-memory-air", two, 3, 50, wifi=0.2, limits=["", ", memory_share: 60 %, disk_read: 300 MB/s"])
    write("four-mixed", [4, 4, 4, 4], 6, 30, "{jitter: {sigma: 0.3}, loss: {rate: 0.5 %}}")
    write("two-air-jitter", two, 6, 60, wifi=0.5, prompt=128)
    write("two-reorder", two, 8, 40, "{reordering: 2 %}", prompt=256)


def drawn(count):
    chance = random.Random(arguments.seed)
    for number in range(count):
        devices = chance.choice([2, 2, 3, 4])
        windows = {2: [8, 8], 3: [6, 5, 5], 4: [4, 4, 4, 4]}[devices]
        latency = round(0.2 * 100 ** chance.random(), 1)
        rate = round(10 * 100 ** chance.random())
        wifi = round(chance.uniform(0.1, 0.5), 2) if chance.random() < 0.3 else None
        parts = []
        if chance.random() < 0.3:
            parts.append(f"jitter: {{sigma: {chance.uniform(0.1, 0.5):.2f}}}")
        if chance.random() < 0.3:
            parts.append(f"loss: {{rate: {chance.uniform(0.1, 1):.2f} %, burst: {chance.choice([1, 2, 4])}}}")
        if chance.random() < 0.3:
            discipline = chance.choice(["drop-tail", "codel"])
            parts.append(f"queue: {{size: {chance.choice([64, 256, 2048])} KiB, discipline: {discipline}}}")
        limits = ["", ", memory_share: 70 %, disk_read: 200 MB/s"] if chance.random() < 0.2 else []
        impairments = f"{{{', '.join(parts)}}}" if parts else ""
        prompt = chance.choice([16, 64, 256])
        write(f"drawn-{arguments.seed}-{number}", windows, latency, rate, impairments, wifi, limits, prompt)


drawn(arguments.draw) if arguments.draw else fixed()
