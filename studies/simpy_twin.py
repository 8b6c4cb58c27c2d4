#!/usr/bin/env python3
"""Compares the speed of the simulator's event kernel with that of SimPy, on the same two models.

Needs the package simpy. The models are those of sim/examples/event_rate/queues.rs: `hold` (a number of processes that
repeatedly wait for a random time) and `tandem` (jobs in a closed ring of servers with queues). Prints a line for each
model: its name, events, time of the last event, time waited, seconds of processor time.

    python3 studies/simpy_twin.py             # only SimPy
    python3 studies/simpy_twin.py --beside    # both; checks that the results are equal and prints the ratio

`--beside` builds and runs the example `event_rate`, which prints the same lines for the kernel.
"""

import argparse
import subprocess
import sys
import time

import simpy

# Delays are the 20 high bits of a xorshift generator, as in the Rust example.
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# Number of events of each model: enough for a second of SimPy.
EVENTS = 300_000
REPEATS = 5


def delays(state):
    """Yields the same delays as the Rust example."""
    while True:
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        yield state >> 44


def hold(pending, events):
    """Runs the hold model: each event schedules the next event of its process."""
    env = simpy.Environment()
    draw = delays(GOLDEN)

    def step():
        while True:
            yield env.timeout(next(draw))

    for _ in range(pending):
        env.process(step())
    # The first event of every process starts the process and is not counted.
    for _ in range(pending):
        env.step()
    started = time.process_time()
    for _ in range(events):
        env.step()
    return events, env.now, 0, time.process_time() - started


def tandem(servers, jobs, services):
    """Runs the tandem model: jobs in a closed ring of servers with queues."""
    env = simpy.Environment()
    ring = [simpy.Resource(env, capacity=1) for _ in range(servers)]
    end = env.event()
    total = {"done": 0, "waited": 0, "clock": 0}

    def job(number):
        draw = delays(GOLDEN * (number + 1) & MASK)
        server = number % servers
        while True:
            with ring[server].request() as turn:
                arrived = env.now
                yield turn
                waited = env.now - arrived
                yield env.timeout(next(draw))
            if total["done"] < services:
                total["done"] += 1
                total["waited"] += waited
                total["clock"] = env.now
                if total["done"] == services:
                    end.succeed()
            server = (server + 1) % servers

    for number in range(jobs):
        env.process(job(number))
    started = time.process_time()
    env.run(until=end)
    return total["done"], total["clock"], total["waited"], time.process_time() - started


MODELS = {
    "hold-16": lambda: hold(16, EVENTS),
    "hold-256": lambda: hold(256, EVENTS),
    "hold-4096": lambda: hold(4096, EVENTS),
    "tandem-8-64": lambda: tandem(8, 64, EVENTS),
}


def lines():
    """Yields the name of each model, its results, and the shortest of its processor times."""
    for name, run in MODELS.items():
        runs = [run() for _ in range(REPEATS)]
        if len({ended[:3] for ended in runs}) != 1:
            sys.exit(f"{name}: repeats differ: {runs}")
        events, clock, waited, _ = runs[0]
        yield name, (events, clock, waited), min(ended[3] for ended in runs)


def beside():
    """Prints the rates of SimPy and of the kernel, and their ratio."""
    command = ["cargo", "run", "--quiet", "--release", "-p", "hearth-sim", "--example", "event_rate", "--", "--twin"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ours = {}
    for line in output.splitlines():
        name, events, clock, waited, seconds = line.split()
        ours[name] = ((int(events), int(clock), int(waited)), float(seconds))
    print("| model | events | SimPy, million events/s | kernel, million events/s | ratio |")
    print("|---|---|---|---|---|")
    for name, numbers, seconds in lines():
        same, own = ours[name]
        if same != numbers:
            sys.exit(f"{name}: SimPy has {numbers}, the kernel has {same}: the models differ")
        slow, fast = numbers[0] / seconds / 1e6, numbers[0] / own / 1e6
        print(f"| {name} | {numbers[0]} | {slow:.3f} | {fast:.1f} | {fast / slow:.0f} |")
    print("\nBoth have the same events, time of the last event, and time waited.")


def main():
    """Parses the arguments and prints the requested lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", action="store_true", help="also run the Rust example and print the ratio")
    if parser.parse_args().beside:
        beside()
        return
    for name, numbers, seconds in lines():
        print(name, *numbers, f"{seconds:.6f}")


if __name__ == "__main__":
    main()
