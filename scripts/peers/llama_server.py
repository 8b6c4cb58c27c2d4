#!/usr/bin/env python3
"""Compares the tokens per second of concurrent completions with those of llama.cpp's server.

    python3 scripts/peers/llama_server.py target/release/hearth llama-server MODEL.gguf [--sequences 1,2,4,8,16]

Starts both servers in turn with as many slots as clients, sends each client's completion at the same time, and prints
the tokens of all clients per second from the last first token to the first last one, as well as over the whole time with
the prompts. Needs only Python.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import threading
import time

WORDS = "river stone garden window winter letter music bridge orange silver travel market candle forest island mirror"

parser = argparse.ArgumentParser()
parser.add_argument("hearth")
parser.add_argument("llama_server")
parser.add_argument("model")
parser.add_argument("--sequences", default="1,2,4,8,16")
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--end", default="", help="number of the token that ends a text; it gets a bias of -100")
arguments = parser.parse_args()


def start(name, count, port):
    context, threads = str(256 * count), str(arguments.threads)
    if name == "hearth":
        command = [arguments.hearth, "serve", arguments.model, "--sequences", str(count), "--context", context]
        command += ["--threads", threads, "--listen", f"127.0.0.1:{port}"]
    else:
        command = [arguments.llama_server, "-m", arguments.model, "-np", str(count), "-c", context, "-t", threads]
        command += ["-tb", threads, "--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(port):
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the server did not start")


def complete(port, number, tokens):
    """Returns the times at which the tokens of a completion arrived."""
    words = WORDS.split()
    prompt = " ".join(words[(number + place * (1 + number % 5)) % len(words)] for place in range(24))
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    if arguments.end:
        body["logit_bias"] = {arguments.end: -100}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    times = []
    for line in connection.getresponse():
        if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
            if choices[0].get("finish_reason") is None:
                times.append(time.monotonic())
    return times


def measure(name, count):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(name, count, port)
    try:
        wait_for(port)
        complete(port, 0, 4)
        times = [[] for _ in range(count)]
        clients = [
            threading.Thread(target=lambda number=number: times[number].extend(complete(port, number, arguments.tokens)))
            for number in range(count)
        ]
        begin = time.monotonic()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        first, last = max(own[0] for own in times), min(own[-1] for own in times)
        between = sum(first < at <= last for own in times for at in own)
        return between / (last - first), sum(map(len, times)) / (max(own[-1] for own in times) - begin)
    finally:
        server.terminate()
        server.wait()


print("| sequences | hearth, with prompts | llama-server, with prompts | ratio |\n| --- | --- | --- | --- |")
for count in map(int, arguments.sequences.split(",")):
    for _ in range(arguments.repeats):
        own, peer = measure("hearth", count), measure("llama-server", count)
        columns = [f"{one:.1f}, {all_:.1f}" for one, all_ in (own, peer)]
        print(f"| {count} | {' | '.join(columns)} | {own[0] / peer[0]:.2f} |", flush=True)
