#!/usr/bin/env python3
"""Compares the plans of the strategies for a ring with random placements of the layers, all in the simulator.

    python3 docs/studies/experts/placements.py target/release/hearth scenarios/experts/three-with-little-memory.yaml

Needs only Python.
"""

import argparse
import json
import random
import subprocess

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("hearth")
parser.add_argument("scenario")
parser.add_argument("--draw", type=int, default=200, help="number of random placements")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--tokens", type=int, default=256, help="generated tokens of each simulation")
arguments = parser.parse_args()


def run(command, *flags):
    words = [arguments.hearth, command, arguments.scenario, "--json", *flags]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def simulate(*flags):
    """Returns the mean time per token in milliseconds, with as many weights in memory at the start as fit."""
    return run("simulate", "--warm", "--draws", "0", "--tokens", str(arguments.tokens), *flags)["tpot_ms"]["mean"]


found = {}
for strategy in ["overlap", "mem", "halda"]:
    plan = run("plan", "--strategy", strategy)
    windows = [device["window"] for device in plan["devices"]]
    found[strategy] = simulate("--strategy", strategy)
    print(f"{strategy}: windows {windows}, rounds {plan['rounds']}: {found[strategy]:.1f} ms", flush=True)
layers, count = sum(windows) * plan["rounds"], len(windows)
source = random.Random(arguments.seed)
times = []
for _ in range(arguments.draw):
    rounds = source.choice([1, 1, 2])
    cuts = sorted(source.sample(range(1, layers // rounds), count - 1))
    windows = [end - start for start, end in zip([0, *cuts], [*cuts, layers // rounds])]
    flags = ["--windows", ",".join(map(str, windows)), "--rounds", str(rounds)]
    times.append((simulate(*flags), windows, rounds))
times.sort()
print(f"{len(times)} random placements: median {times[len(times) // 2][0]:.1f} ms, the fastest:")
for time, windows, rounds in times[:3]:
    print(f"  windows {windows}, rounds {rounds}: {time:.1f} ms")
for strategy, time in found.items():
    print(f"{strategy}: {time / times[0][0]:.3f} of the fastest random placement")
