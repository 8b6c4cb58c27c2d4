#!/usr/bin/env python3
"""Kills workers of hearth and of llama.cpp in the middle of an answer, and measures what a user loses.

    python3 scripts/peers/kills.py MODEL.gguf --hearth target/release/hearth --llama BUILD/bin --kills 100

Each trial starts a server with three workers on this machine, requests one streamed answer, and kills a worker with
SIGKILL after a random number of tokens. llama.cpp's workers are its RPC servers (`ggml-rpc-server`). If the server
ends, a supervisor starts it again at once, with the remaining workers, and the client repeats its request; this is the
most that anybody can do without changing the program.

Columns of the table:

  stream ends      trials in which the client's response ended before its last token
  server ends      trials in which the server process ended
  characters lost  of the answer, because the client did not get them from its response: median, maximum
  recovery time    seconds from the kill to the first token that the client did not have yet: median, maximum. For a
                   server that was started again, this includes loading the model
  wrong            trials whose text differs from the text without a kill

Needs only Python. llama.cpp is built from the source package of llama-cpp-python:

    cmake -B build -DGGML_RPC=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server ggml-rpc-server
"""

import argparse
import http.client
import json
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

WORKERS = 3
PROMPT = "The LORD is my shepherd; I shall not want."
DEADLINE = 120.0

# The profile is that of a phone without a GPU. Its speed does not matter for a plan of equal windows.
SCENARIO = """schema: scenario/1
name: kills
seed: 1
model: {{file: '{model}'}}
context: 512
workload: {{prompt: 16, generate: 4}}
devices:
- {{name: head, profile: d5}}
{workers}links:
  default:
    latency: {{value: 50 us, source: assumed}}
    bandwidth: {{value: 1 GB/s, source: assumed}}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(check, process):
    """Waits until `check` succeeds. An error if the process ends or the deadline passes."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended with status {process.returncode}")
        try:
            if check():
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise RuntimeError(f"{process.args[0]} is not ready after {DEADLINE} s")


def accepts(port):
    socket.create_connection(("127.0.0.1", port), 1).close()
    return True


def is_healthy(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    finally:
        connection.close()


class Ring:
    """A server and its workers."""

    def __init__(self, program, log):
        self.program, self.log = program, log
        self.server, self.workers = None, []
        self.port = free_port()
        self.worker_ports = [free_port() for _ in range(WORKERS)]
        try:
            for port in self.worker_ports:
                self.workers.append(self.start(self.program.worker_command(port)))
                wait_for(lambda port=port: accepts(port), self.workers[-1])
            self.start_server()
        except BaseException:
            self.stop()
            raise

    def start(self, command):
        return subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=self.log)

    def start_server(self):
        alive = [port for port, worker in zip(self.worker_ports, self.workers) if worker.poll() is None]
        self.server = self.start(self.program.server_command(self.port, alive))
        wait_for(lambda: is_healthy(self.port), self.server)

    def kill_worker(self, index):
        self.workers[index].send_signal(signal.SIGKILL)
        self.workers[index].wait()

    def stop(self):
        for process in filter(None, [self.server, *self.workers]):
            if process.poll() is None:
                process.kill()
            process.wait()

    def stream(self, tokens, on_piece):
        """Requests an answer and calls `on_piece` with each piece of text. Returns whether the response was complete."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        request = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                return False
            for line in response:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return True
                if not text.startswith("data: "):
                    continue
                event = json.loads(text[len("data: "):])
                if "choices" not in event:
                    return False
                on_piece(event["choices"][0].get("text", ""))
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        return False


class Hearth:
    name = "hearth"

    def __init__(self, binary, model, folder):
        self.binary, self.model, self.folder = binary, model, folder

    def worker_command(self, port):
        return [self.binary, "worker", "--listen", f"127.0.0.1:{port}", "--model", self.model, "--threads", 1]

    def server_command(self, port, worker_ports):
        plan = self.folder / f"plan-{port}.yaml"
        if not plan.exists():
            self.write_plan(plan, worker_ports)
        return [self.binary, "serve", plan, "--model", self.model, "--listen", f"127.0.0.1:{port}", "--threads", 1]

    def write_plan(self, path, worker_ports):
        workers = "".join(f"- {{name: at-{port}, profile: d5, address: '127.0.0.1:{port}'}}\n" for port in worker_ports)
        scenario_path = path.with_suffix(".scenario.yaml")
        scenario_path.write_text(SCENARIO.format(model=self.model, workers=workers))
        command = [self.binary, "plan", scenario_path, "--strategy", "even", "-o", path]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, folder, model):
        self.folder, self.model = folder, model

    def worker_command(self, port):
        return [self.folder / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-t", 1]

    def server_command(self, port, worker_ports):
        workers = ",".join(f"127.0.0.1:{port}" for port in worker_ports)
        return [self.folder / "llama-server", "-m", self.model, "--rpc", workers, "-ngl", 99, "-t", 1, "-c", 512,
                "-np", 1, "--no-webui", "--host", "127.0.0.1", "--port", port]


def start_ring(program, log):
    """Starts a ring. Another program may take a free port before the ring listens on it, so there are several attempts."""
    for attempt in range(5):
        try:
            return Ring(program, log)
        except RuntimeError as error:
            if attempt == 4:
                log.seek(0)
                sys.exit(f"{error}: {log.read()[-2000:]}")


def expected_pieces(program, log, tokens):
    """Returns the pieces of text of an answer without a kill."""
    ring, pieces = start_ring(program, log), []
    try:
        if not ring.stream(tokens, pieces.append):
            sys.exit(f"{program.name} gives no complete answer without a kill")
    finally:
        ring.stop()
    return pieces


def trial(program, log, tokens, expected_pieces, seed):
    """Kills a worker during an answer. Returns what the client saw, or `None` if the answer ended before the kill."""
    choice = random.Random(seed)
    victim, kill_at = choice.randrange(WORKERS), choice.randrange(1, max(len(expected_pieces) - 10, 2))
    expected = "".join(expected_pieces)
    ring, pieces, arrivals, killed = start_ring(program, log), [], [], []

    def on_piece(text):
        arrivals.append(time.monotonic())
        pieces.append(text)
        if len(pieces) == kill_at:
            ring.kill_worker(victim)
            killed.append(time.monotonic())

    try:
        is_complete = ring.stream(tokens, on_piece)
        if not killed:
            return None
        text = "".join(pieces)
        result = {"stream_ends": not is_complete, "characters_lost": max(len(expected) - len(text), 0)}
        if is_complete:
            # Tokens that had been computed before the kill still arrive, so the longest gap is the recovery.
            after = [killed[0]] + [at for at in arrivals if at > killed[0]]
            result["seconds"] = max((b - a for a, b in zip(after, after[1:])), default=0.0)
            result["server_ends"] = ring.server.poll() is not None
        else:
            # A crashing server may take a moment to end.
            time.sleep(0.2)
            result["server_ends"] = ring.server.poll() is not None
            if result["server_ends"]:
                ring.start_server()
            again, new = [], []

            def on_repeated_piece(text):
                again.append(text)
                if not new and len("".join(again)) > len("".join(pieces)):
                    new.append(time.monotonic())

            if ring.stream(tokens, on_repeated_piece) and new:
                text = "".join(again)
                result["seconds"] = new[0] - killed[0]
            else:
                text = ""
                result["seconds"] = float("inf")
        result["wrong"] = text != expected
        return result
    finally:
        ring.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--hearth", type=pathlib.Path, help="the program hearth")
    parser.add_argument("--llama", type=pathlib.Path, help="the folder with llama-server and ggml-rpc-server")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = []
        if options.hearth:
            programs.append(Hearth(options.hearth.resolve(), options.model.resolve(), pathlib.Path(folder)))
        if options.llama:
            programs.append(LlamaCpp(options.llama.resolve(), options.model.resolve()))
        if not programs:
            parser.error("nothing to measure: give --hearth, --llama or both")
        print(f"{'program':<10} {'kills':>5} {'stream ends':>11} {'server ends':>11} {'characters lost':>15} {'recovery time':>17} {'wrong':>5}")
        for program in programs:
            with open(pathlib.Path(folder) / f"{program.name}.log", "w+") as log:
                expected = expected_pieces(program, log, options.tokens)
                results = [
                    trial(program, log, options.tokens, expected, options.seed + index)
                    for index in range(options.kills)
                ]
            results = [result for result in results if result]
            if not results:
                sys.exit(f"{program.name}: every answer ended before the kill")
            of = lambda key: [result[key] for result in results]
            lost, seconds = of("characters_lost"), of("seconds")
            print(
                f"{program.name:<10} {len(results):>5} {sum(of('stream_ends')):>11} {sum(of('server_ends')):>11} "
                f"{statistics.median(lost):>8.0f} {max(lost):>6} {statistics.median(seconds):>7.3f} s {max(seconds):>6.3f} s "
                f"{sum(of('wrong')):>5}",
                flush=True,
            )


if __name__ == "__main__":
    main()
