#!/usr/bin/env python3
"""Checks that a served ring plans again when a device computes slower or has less memory, and back afterwards.

    python3 docs/studies/serving/adaptation.py target/release/hearth MODEL.gguf -o out/adaptation

Starts two workers in control groups of their own and a head on loopback. One client asks for texts, one after the
other. Meanwhile the quota of one worker's CPU is cut, then the memory of the other worker; both are given back. Prints
for each phase the plans, and the time per token that the last plan predicts beside the measured one. Needs root, control
groups of version 1 (`cpu` and `memory`), and Python.
"""

import argparse
import http.client
import json
import pathlib
import re
import statistics
import subprocess
import threading
import time

GROUPS = pathlib.Path("/sys/fs/cgroup")
MIB = 1 << 20

parser = argparse.ArgumentParser()
parser.add_argument("hearth")
parser.add_argument("model")
parser.add_argument("--memory", type=int, default=400, help="memory of each device in MiB")
parser.add_argument("--squeezed", type=int, default=120, help="memory of the squeezed worker in MiB")
parser.add_argument("--quota", type=float, default=0.3, help="cores that the slowed worker has")
parser.add_argument("--seconds", type=float, default=60, help="length of a phase")
parser.add_argument("-o", "--output", default="out/adaptation")
arguments = parser.parse_args()
output = pathlib.Path(arguments.output)
output.mkdir(parents=True, exist_ok=True)
started = time.monotonic()


def group(controller, name):
    return GROUPS / controller / f"hearth-adaptation-{name}"


def limit_memory(name, mib):
    (group("memory", name) / "memory.limit_in_bytes").write_text(str(mib * MIB))


def limit_cpu(name, cores):
    quota = -1 if cores is None else int(cores * 10_000)
    (group("cpu", name) / "cpu.cfs_quota_us").write_text(str(quota))


def start(name, *command):
    log = open(output / f"{name}.log", "w")
    folders = []
    if name != "head":
        for controller in ("memory", "cpu"):
            group(controller, name).mkdir(exist_ok=True)
            folders.append(group(controller, name))
        (group("cpu", name) / "cpu.cfs_period_us").write_text("10000")

    def join():
        for folder in folders:
            (folder / "cgroup.procs").write_text("0")

    process = subprocess.Popen(
        [arguments.hearth, *command], stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1, preexec_fn=join
    )
    for line in process.stdout:
        found = re.search(r"(127\.0\.0\.1:\d+)", line)
        if found:
            threading.Thread(target=lambda: [log.write(more) for more in process.stdout], daemon=True).start()
            return process, found.group(1)
    raise SystemExit(f"{name} did not start: see {output}/{name}.log")


def scenario(addresses):
    devices = "".join(
        f"  - {{name: {name}, profile: this.yaml, values: {{memory.available: {arguments.memory} MiB}}"
        + (f", address: '{addresses[name]}'" if name in addresses else "")
        + "}\n"
        for name in ("head", "left", "right")
    )
    return (
        "schema: scenario/1\nname: adaptation\nseed: 1\n"
        f"model:\n  file: {pathlib.Path(arguments.model).resolve()}\ncontext: 512\n"
        f"workload: {{prompt: 16, generate: 64}}\ndevices:\n{devices}"
        'links:\n  default:\n    latency: {value: 50 us, source: "assumed: loopback"}\n'
        '    bandwidth: {value: 2 GB/s, source: "assumed: loopback"}\n'
    )


def hearth(*command):
    subprocess.run([arguments.hearth, *command], check=True, stdout=subprocess.DEVNULL)


profile = output / "this.yaml"
if not profile.exists():
    hearth("profile", "--threads", "1", "--model", arguments.model, "-o", str(profile))
processes, addresses = {}, {}
for name in ("left", "right"):
    processes[name], addresses[name] = start(
        name, "worker", "--listen", "127.0.0.1:0", "--model", arguments.model, "--threads", "1"
    )
    limit_memory(name, arguments.memory)
(output / "home.yaml").write_text(scenario(addresses))
hearth("plan", str(output / "home.yaml"), "-o", str(output / "plan.yaml"))
processes["head"], address = start(
    "head", "serve", str(output / "plan.yaml"), "--model", arguments.model, "--listen", "127.0.0.1:0",
    "--scenario", str(output / "home.yaml"), "--threads", "1",
)


def get(path):
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


gaps, texts, over = [], set(), threading.Event()


def client():
    while not over.is_set():
        connection = http.client.HTTPConnection(address, timeout=600)
        body = {"prompt": "Sing unto the Lord a new song, and", "max_tokens": 64, "temperature": 0, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        last, text = None, ""
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                text += piece["choices"][0]["text"] if piece["choices"] else ""
                now = time.monotonic()
                if last is not None:
                    gaps.append((now, now - last))
                last = now
        texts.add(text)
        connection.close()


def describe(ring):
    return ", ".join(f"{device['name']} {device['layers']}" for device in ring["devices"])


thread = threading.Thread(target=client)
thread.start()
def busiest():
    """Returns the worker with the most layers."""
    workers = [device for device in json.loads(get("/ring"))["devices"] if device["name"] != "head"]
    return max(workers, key=lambda device: device["layers"])["name"]


def squeeze():
    name = busiest()
    limit_memory(name, arguments.squeezed)
    return f"{name} has {arguments.squeezed} MiB"


def slow():
    name = busiest()
    limit_cpu(name, arguments.quota)
    return f"{name} has {arguments.quota} cores"


def restore():
    for name in ("left", "right"):
        limit_cpu(name, None)
        limit_memory(name, arguments.memory)
    return "as before"


phases = [restore, squeeze, restore, slow, restore]
try:
    for change in phases:
        since = time.monotonic()
        what = change()
        seen = []
        while time.monotonic() < since + arguments.seconds:
            time.sleep(1)
            ring = json.loads(get("/ring"))
            (output / "ring.json").write_text(json.dumps(ring, indent=1))
            now = describe(ring)
            if not seen or seen[-1][1] != now:
                seen.append((time.monotonic() - since, now))
        at = seen[-1][0] + since if len(seen) > 1 else since
        half = [gap for when, gap in gaps if since <= when < min(at, since + arguments.seconds)]
        rest = [gap for when, gap in gaps if when >= max(at + 5, since + arguments.seconds / 2)]
        print(f"{what}:")
        for when, windows in seen:
            print(f"  {when:5.1f} s  {windows}")
        before = f"{statistics.median(half) * 1000:.1f}" if half and len(seen) > 1 else "-"
        print(f"  ms per token: before the change {before}, in the end {statistics.median(rest) * 1000:.1f} "
              f"(mean {statistics.mean(rest) * 1000:.1f}), predicted {1000 * (ring.get('predicted_tpot_s') or 0):.1f}")
finally:
    over.set()
    thread.join()
    (output / "metrics.txt").write_text(get("/metrics"))
    for process in reversed(processes.values()):
        process.terminate()
        process.wait()
    for name in ("left", "right"):
        for controller in ("memory", "cpu"):
            group(controller, name).rmdir()
print(f"different texts: {len(texts)}")
