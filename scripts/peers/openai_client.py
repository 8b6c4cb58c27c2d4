#!/usr/bin/env python3
"""Checks `hearth serve` with OpenAI's own Python client.

    python3 -m venv client && client/bin/pip install openai
    client/bin/python scripts/peers/openai_client.py http://127.0.0.1:8080/v1 [TOKEN] [--kill PID]

Checks chat, streaming, cancellation, stop strings, errors, and eight requests at once. With --kill it kills a worker
during these eight. Greedy answers must be the same each time. Prints a line for each check, and exits with 1 if one
fails.
"""

import argparse
import os
import signal
import sys
import threading
import time
import urllib.request

import openai

parser = argparse.ArgumentParser()
parser.add_argument("base")
parser.add_argument("token", nargs="?", default="none")
parser.add_argument("--kill", type=int, help="process to kill during the eight requests")
arguments = parser.parse_args()
client = openai.OpenAI(base_url=arguments.base, api_key=arguments.token, timeout=120, max_retries=0)
failed = 0


def check(what, holds, said=""):
    global failed
    failed += not holds
    print(f"{'ok' if holds else 'FAILED'}: {what}{': ' + str(said) if said else ''}", flush=True)


def metric(name):
    request = urllib.request.Request(arguments.base.removesuffix("/v1") + "/metrics")
    request.add_header("Authorization", f"Bearer {arguments.token}")
    for line in urllib.request.urlopen(request).read().decode().splitlines():
        if line.startswith(f"hearth_{name} "):
            return float(line.split()[-1])
    return None


model = client.models.list().data[0].id
check("models", client.models.retrieve(model).id == model, model)

question = [{"role": "user", "content": "Who art thou?"}]
how = {"model": model, "temperature": 0}
answer = client.chat.completions.create(messages=question, max_tokens=24, **how)
text = answer.choices[0].message.content
check("chat", answer.choices[0].finish_reason in ("stop", "length") and answer.usage.completion_tokens <= 24, repr(text))

turns = question + [{"role": "assistant", "content": text}, {"role": "user", "content": "And whence?"}]
second = client.chat.completions.create(messages=turns, max_tokens=8, **how)
check("the next turn", second.usage.prompt_tokens > answer.usage.prompt_tokens, f"{second.usage.prompt_tokens} tokens")

stream = client.chat.completions.create(
    messages=question, max_tokens=24, stream=True, stream_options={"include_usage": True}, **how
)
pieces = list(stream)
streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
check("stream", streamed == text and pieces[-1].usage.completion_tokens > 0, f"{len(pieces)} pieces")

word = text.split()[2]
stopped = client.chat.completions.create(messages=question, max_tokens=24, stop=[word], **how)
check(
    "stop string",
    stopped.choices[0].message.content == text.split(word)[0] and stopped.choices[0].finish_reason == "stop",
    repr(word),
)

completion = client.completions.create(prompt=["In the beginning", "Blessed are"], max_tokens=12, **how)
check("completions of two prompts", len(completion.choices) == 2, repr(completion.choices[0].text))

options = {"n": 2, "presence_penalty": 1.5, "logit_bias": {"5": 1}, "extra_body": {"min_p": 0.1, "repeat_penalty": 1.1}}
several = client.chat.completions.create(messages=question, max_tokens=8, **how, **options)
check("two choices with penalties", len(several.choices) == 2, repr(several.choices[1].message.content))

before = metric("requests_cancelled_total")
stream = client.chat.completions.create(messages=question, max_tokens=200, stream=True, **how)
next(iter(stream))
next(iter(stream))
stream.close()
for _ in range(200):
    if metric("requests_active") == 0:
        break
    time.sleep(0.05)
check("cancel", metric("requests_active") == 0 and metric("requests_cancelled_total") == before + 1)

for what, error, request in [
    ("unknown model", openai.NotFoundError, {"model": "gpt-none", "messages": question}),
    ("too long", openai.BadRequestError, {"model": model, "messages": question, "max_tokens": 10**6}),
    ("unsupported option", openai.BadRequestError, {"model": model, "messages": question, "logprobs": True}),
]:
    try:
        client.chat.completions.create(**request)
        check(what, False, "the request was accepted")
    except error as refused:
        check(what, True, refused.body["message"])

answers, begun = [None] * 8, time.time()
prompts = ["Who art thou?", "What is thy name?", "Whither goest thou?", "Why weepest thou?"]


def ask(number):
    messages = [{"role": "user", "content": prompts[number % 4]}]
    got = client.chat.completions.create(messages=messages, max_tokens=48, **how)
    answers[number] = got.choices[0].message.content


def eight():
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    return threads


for thread in eight():
    thread.join()
once = list(answers)
check("eight at once", None not in once and once[:4] == once[4:], f"{time.time() - begun:.2f} s")
if arguments.kill:
    answers, begun = [None] * 8, time.time()
    threads = eight()
    time.sleep(0.2)
    os.kill(arguments.kill, signal.SIGKILL)
    for thread in threads:
        thread.join()
    check("eight at once while a worker is killed", answers == once, f"{time.time() - begun:.2f} s")
sys.exit(1 if failed else 0)
