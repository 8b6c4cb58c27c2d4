#!/usr/bin/env python3
"""Checks that a served ring gives correct answers and leaks no resources during an hour of mixed requests.

    python3 docs/studies/serving/load.py target/release/hearth MODEL.gguf --minutes 60 -o out/load

Starts two workers and a head on loopback and clients that each send one request after the other: chats with and
without streaming, completions, conversations of several turns, cancelled answers, and invalid requests. With --kill, a
worker is killed every minute, and starts again 15 seconds later. Each minute
it writes a line with the requests, their latencies, and the memory, open files and threads of each process. Exits
with 1 if an answer was wrong or a process grew. Needs only Python.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import threading
import time

# Maximum growth of a process after its first ten minutes.
GROWTH = 1.05

parser = argparse.ArgumentParser()
parser.add_argument("hearth")
parser.add_argument("model")
parser.add_argument("--minutes", type=float, default=60)
parser.add_argument("--clients", type=int, default=4, help="concurrent clients")
parser.add_argument("--slots", type=int, default=4, help="concurrent requests of the server")
parser.add_argument("--windows", default="3, 3, 2", help="layers of head, left and right")
parser.add_argument("--kill", action="store_true", help="kill a worker every minute, and start it again 15 s later")
parser.add_argument("--pause", type=float, default=0.05, help="seconds between a client's requests")
parser.add_argument("-o", "--output", default="out/load")
arguments = parser.parse_args()
output = pathlib.Path(arguments.output)
output.mkdir(parents=True, exist_ok=True)


def start(name, *command):
    log = open(output / f"{name}.log", "a")
    process = subprocess.Popen(
        [arguments.hearth, *command], stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
    )
    for line in process.stdout:
        log.write(line)
        found = re.search(r"(127\.0\.0\.1:\d+)", line)
        if found:
            threading.Thread(target=lambda: [log.write(more) for more in process.stdout], daemon=True).start()
            return process, found.group(1)
    raise SystemExit(f"{name} did not start: see {output}/{name}.log")


def scenario():
    devices = "".join(f"  - {{name: {name}, profile: d3}}\n" for name in ("head", "left", "right"))
    return (
        "# A ring of three processes.\nschema: scenario/1\nname: load\nseed: 1\n"
        f"model:\n  file: {pathlib.Path(arguments.model).resolve()}\ncontext: 2048\n"
        "workload:\n  prompt: 16\n  generate: 16\n  sequences: 4\n"
        f"devices:\n{devices}"
        'links:\n  default:\n    latency: {value: 50 us, source: "assumed: loopback"}\n'
        '    bandwidth: {value: 2 GB/s, source: "assumed: loopback"}\n'
        f"planner: {{strategy: manual, windows: [{arguments.windows}]}}\n"
    )


(output / "load.yaml").write_text(scenario())
subprocess.run(
    [arguments.hearth, "plan", str(output / "load.yaml"), "-o", str(output / "plan.yaml")],
    check=True,
    stdout=subprocess.DEVNULL,
)
processes = {}
addresses = {}
for name in ("left", "right"):
    processes[name], addresses[name] = start(name, "worker", "--listen", "127.0.0.1:0", "--model", arguments.model)
plan = (output / "plan.yaml").read_text()
for name, address in addresses.items():
    plan = plan.replace(f"- name: {name}\n", f"- name: {name}\n  address: {address}\n")
(output / "plan.yaml").write_text(plan)
processes["head"], address = start(
    "head", "serve", str(output / "plan.yaml"), "--model", arguments.model, "--listen", "127.0.0.1:0", "--sequences", str(arguments.slots)
)

QUESTIONS = ["Who art thou?", "What is man?", "Whence cometh my help?", "Sing unto the Lord.", "Why do the heathen rage?"]
lock = threading.Lock()
seconds = {}  # kind of request: latencies since the last line
counts = {}
wrong = []
known = {}  # the first answer to each question; greedy answers are always the same
over = threading.Event()


def done(what, since):
    with lock:
        seconds.setdefault(what, []).append(time.monotonic() - since)
        counts[what] = counts.get(what, 0) + 1


def ask(path, body):
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def same(question, text):
    with lock:
        if known.setdefault(question, text) != text:
            wrong.append(f"{question!r}: {text!r} and not {known[question]!r}")


def chat(chance):
    question = chance.choice(QUESTIONS)
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    if chance.random() < 0.5:
        connection, answer = ask("/v1/chat/completions", body)
        same(question, json.load(answer)["choices"][0]["message"]["content"])
    else:
        connection, answer = ask("/v1/chat/completions", {**body, "stream": True})
        pieces = (line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {"))
        choices = [choice for piece in pieces for choice in json.loads(piece)["choices"]]
        same(question, "".join(choice["delta"].get("content") or "" for choice in choices))
    connection.close()


def conversation(chance):
    messages = []
    for _ in range(3):
        messages.append({"role": "user", "content": chance.choice(QUESTIONS)})
        connection, answer = ask("/v1/chat/completions", {"messages": messages, "max_tokens": 16})
        said = json.load(answer)
        connection.close()
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})


def completion(chance):
    body = {"prompt": chance.choice(QUESTIONS), "max_tokens": chance.randint(1, 48), "seed": chance.randint(0, 9)}
    connection, answer = ask("/v1/completions", {**body, "temperature": 0.8})
    said = json.load(answer)["choices"][0]
    if said["finish_reason"] not in ("stop", "length"):
        wrong.append(f"an answer ended by {said['finish_reason']}")
    connection.close()


def cancel(chance):
    body = {"messages": [{"role": "user", "content": chance.choice(QUESTIONS)}], "max_tokens": 200, "stream": True}
    connection, answer = ask("/v1/chat/completions", body)
    answer.fp.readline()
    connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def mistake(chance):
    path, body = chance.choice(
        [
            ("/v1/chat/completions", {"messages": "?"}),
            ("/v1/completions", {"prompt": "x" * 100_000}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}),
            ("/v1/nothing", {}),
        ]
    )
    connection, answer = ask(path, body)
    text = answer.read()
    if not 400 <= answer.status < 500 or b"error" not in text:
        wrong.append(f"{path} with a mistake: {answer.status} {text[:100]!r}")
    connection.close()


def client(number):
    chance = random.Random(number)
    while not over.is_set():
        what = chance.choices([chat, conversation, completion, cancel, mistake], [4, 1, 3, 1, 1])[0]
        since = time.monotonic()
        try:
            what(chance)
            done(what.__name__, since)
        except Exception as error:  # every exception is a failure of the check
            wrong.append(f"{what.__name__}: {error!r}")
        over.wait(arguments.pause)


def state(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    number = lambda key: int(re.search(rf"^{key}:\s+(\d+)", status, re.M).group(1))
    return number("RssAnon") / 1024, len(os.listdir(f"/proc/{process.pid}/fd")), number("Threads")


clients = [threading.Thread(target=client, args=(number,)) for number in range(arguments.clients)]
for one in clients:
    one.start()
head = ["minute", "requests", "chat_p50_ms", "chat_p95_ms", "completion_p50_ms"]
head += [f"{name}_{what}" for name in processes for what in ("anonymous_mib", "files", "threads")]
table = [head]
print(*head, sep=",", flush=True)
begin = time.monotonic()
minute = 0


def wait_until(at):
    time.sleep(max(0, begin + at - time.monotonic()))


while minute < arguments.minutes and all(process.poll() is None for process in processes.values()):
    minute += 1
    if arguments.kill:
        name = ("left", "right")[minute % 2]
        wait_until(60 * minute - 50)
        processes[name].kill()
        processes[name].wait()
        wait_until(60 * minute - 35)
        command = ("worker", "--listen", addresses[name], "--model", arguments.model)
        processes[name], addresses[name] = start(name, *command)
    wait_until(60 * minute)
    with lock:
        mine, seconds = seconds, {}
    chats = sorted(mine.get("chat", [0]))
    numbers = [1e3 * statistics.median(chats), 1e3 * chats[int(0.95 * (len(chats) - 1))]]
    numbers.append(1e3 * statistics.median(mine.get("completion", [0])))
    row = [minute, sum(len(all_) for all_ in mine.values()), *(round(one, 1) for one in numbers)]
    for process in processes.values():
        memory, files, threads = state(process)
        row += [round(memory, 1), files, threads]
    table.append(row)
    print(*row, sep=",", flush=True)
over.set()
for one in clients:
    one.join()
for name, process in processes.items():
    if process.poll() is not None:
        wrong.append(f"{name} ended with {process.returncode}")
    process.terminate()
(output / "load.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in table))

rows = table[1:]
# Medians of ten minutes, because the allocator of the head keeps more or less after each answer.
warm = rows[min(9, len(rows) // 2) :]
early, late = ([statistics.median(column) for column in zip(*part)] for part in (warm[:10], warm[-10:]))
for at, column in enumerate(head):
    # A worker that has just started is smaller.
    is_young = arguments.kill and not column.startswith("head")
    if column.endswith(("mib", "files", "threads")) and not is_young and late[at] > GROWTH * early[at] + 2:
        wrong.append(f"{column} grew from {early[at]} to {late[at]}")
print(f"requests: {sum(counts.values())} ({', '.join(f'{value} {key}' for key, value in sorted(counts.items()))})")
print(f"wrong: {len(wrong)}", *wrong[:10], sep="\n  ")
raise SystemExit(bool(wrong))
