#!/usr/bin/env python3
"""Measures how long active answers wait while a long prompt arrives.

    hearth serve 1b.gguf --sequences 8 --context 20000 --listen 127.0.0.1:8399 &
    python3 docs/studies/serving/waiting.py http://127.0.0.1:8399 300

Seven answers of 400 tokens are streamed. After 8 s an eighth request arrives, with a prompt of so many words. Prints
the times between tokens of the seven before and during the prompt, and the time to the first token of the eighth.
"""

import json
import sys
import threading
import time
import urllib.request

base, words = sys.argv[1], int(sys.argv[2])
model = json.load(urllib.request.urlopen(f"{base}/v1/models"))["data"][0]["id"]


def stream(prompt, tokens, times):
    request = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    post = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                times.append(time.time())


def begin(*arguments):
    thread = threading.Thread(target=stream, args=arguments, daemon=True)
    thread.start()
    return thread


answers = [[] for _ in range(7)]
for number, times in enumerate(answers):
    begin(f"word {number} and then", 400, times)
time.sleep(8)
first, arrived = [], time.time()
begin(" ".join(f"w{word % 97}" for word in range(words)), 4, first).join()
ended = time.time()
time.sleep(3)


def report(name, since, until):
    gaps = sorted(
        after - before
        for times in answers
        for before, after in zip(times, times[1:])
        if since <= after < until
    )
    half, most = gaps[len(gaps) // 2], gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)]
    print(f"{name}: {len(gaps)} tokens, median {half * 1e3:.0f} ms, 99 % within {most * 1e3:.0f} ms")


report("before", arrived - 5, arrived)
report("during", arrived, ended + 0.5)
print(f"first token of the long prompt after {first[0] - arrived:.1f} s")
