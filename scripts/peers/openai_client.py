#!/usr/bin/env python3
"""Checks `hearth serve` with OpenAI's own Python client.

    python3 -m venv client && client/bin/pip install openai
    client/bin/python scripts/peers/openai_client.py http://127.0.0.1:8080/v1 [TOKEN] [--kill PID]

Checks chat, streaming, tools, JSON Schemas, log-probabilities, embeddings (of a server with `--pooling last`),
cancellation, stop strings, errors, and eight requests at once. With --kill it kills a worker during these eight. Greedy
answers must be the same each time. Prints a line for each check, and exits with 1 if one fails.
"""

import argparse
import json
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
parser.add_argument("--schemas", type=int, default=20, help="number of answers by a JSON Schema")
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

def ask(**more):
    return client.chat.completions.create(messages=more.pop("messages", question), **{**how, **more})


seeded = [ask(max_tokens=8, temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
check("seeds", seeded[0] == seeded[1] != seeded[2], repr(seeded[2]))
developer = [{"role": "developer", "content": "Speak as a king."}] + question
check("the role developer", ask(messages=developer, max_tokens=8).choices[0].message.content != text)
parts = [{"role": "user", "content": [{"type": "text", "text": "Who art"}, {"type": "text", "text": " thou?"}]}]
check("text parts", ask(messages=parts, max_tokens=24).choices[0].message.content == text)
check("max_completion_tokens", ask(max_completion_tokens=3).usage.completion_tokens <= 3)
for name, value in [("presence_penalty", 1.9), ("frequency_penalty", 1.9)]:
    check(name, ask(max_tokens=60, **{name: value}).choices[0].message.content != ask(max_tokens=60).choices[0].message.content)
for name, value in [("top_k", 1), ("min_p", 0.9), ("repeat_penalty", 1.5), ("repetition_penalty", 1.5)]:
    check(name, ask(max_tokens=8, temperature=1, extra_body={name: value}).choices[0].message.content is not None)
banned = client.completions.create(prompt="the LORD", max_tokens=1, logprobs=1, **how).choices[0].logprobs
check("logprobs of a completion", len(banned.tokens) == 1 and banned.token_logprobs[0] <= 0, banned.tokens)

logged = ask(max_tokens=6, logprobs=True, top_logprobs=3).choices[0].logprobs.content
check("logprobs", all(len(it.top_logprobs) == 3 and it.top_logprobs[0].token == it.token for it in logged), f"{logged[0].logprob:.3f}")
streamed = [it for piece in ask(max_tokens=6, logprobs=True, top_logprobs=3, stream=True) for choice in piece.choices
            if choice.logprobs for it in choice.logprobs.content]
check("logprobs in a stream", [it.token for it in streamed] == [it.token for it in logged])

schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
formatted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
valid = 0
for seed in range(arguments.schemas):
    person = json.loads(ask(response_format=formatted, temperature=1, seed=seed, max_tokens=100).choices[0].message.content)
    valid += set(person) == {"name", "age"} and len(person["name"]) <= 12 and 0 <= person["age"] <= 99
check("answers by a schema", valid == arguments.schemas, f"{valid} of {arguments.schemas}")
thing = ask(response_format={"type": "json_object"}, max_tokens=100)
check("a JSON object", thing.choices[0].finish_reason == "length" or isinstance(json.loads(thing.choices[0].message.content), dict))
check("plain text", ask(response_format={"type": "text"}, max_tokens=24).choices[0].message.content == text)
answer = ask(extra_body={"grammar": 'start: "yea" | "nay"'}).choices[0].message.content
check("a grammar", answer in ("yea", "nay"), answer)

parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": name, "description": f"Gets the {name}", "parameters": parameters}} for name in ("weather", "time")]
check("tools that are not called", ask(tools=tools, tool_choice="none", max_tokens=24).choices[0].message.content == text)
auto = ask(tools=tools, max_tokens=60).choices[0]
check("tools", auto.finish_reason in ("stop", "length", "tool_calls"), auto.finish_reason)
one = ask(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=100).choices[0]
called = one.message.tool_calls[0]
check("a required tool", one.finish_reason == "tool_calls" and json.loads(called.function.arguments)["city"], called.function)
several = ask(tools=tools, tool_choice="required", max_tokens=200).choices[0].message.tool_calls
check("parallel tools", all(json.loads(it.function.arguments)["city"] for it in several[:-1]), f"{len(several)} calls")
named = {"type": "function", "function": {"name": "time"}}
pieces = [it for piece in ask(tools=tools, tool_choice=named, parallel_tool_calls=False, max_tokens=100, stream=True)
          for choice in piece.choices for it in choice.delta.tool_calls or []]
streamed = "".join(it.function.arguments or "" for it in pieces)
check("a named tool in a stream", pieces[0].function.name == "time" and json.loads(streamed)["city"], streamed)
result = question + [
    {"role": "assistant", "content": None, "tool_calls": [called.model_dump()]},
    {"role": "tool", "tool_call_id": called.id, "content": "Sunny."},
]
check("the result of a tool", ask(messages=result, tools=tools, max_tokens=8).choices[0].message is not None)

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
    ("unknown option", openai.BadRequestError, {"model": model, "messages": question, "extra_body": {"mirostat": 2}}),
    ("wrong type", openai.BadRequestError, {"model": model, "messages": question, "temperature": "hot"}),
    ("too many logprobs", openai.BadRequestError, {"model": model, "messages": question, "logprobs": True, "top_logprobs": 50}),
    ("unsupported schema", openai.BadRequestError, {"model": model, "messages": question, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}}),
    ("unknown tool", openai.BadRequestError, {"model": model, "messages": question, "tool_choice": named}),
    ("functions", openai.BadRequestError, {"model": model, "messages": question, "functions": [{"name": "f"}]}),
    ("an image", openai.BadRequestError, {"model": model, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]}]}),
    ("audio", openai.BadRequestError, {"model": model, "messages": question, "modalities": ["audio"]}),
]:
    try:
        client.chat.completions.create(**request)
        check(what, False, "the request was accepted")
    except error as refused:
        check(what, True, refused.body["message"])

try:
    texts = ["Who art thou?", "And whence?"]
    whole = client.embeddings.create(model=model, input=texts)
    check("embeddings", [it.index for it in whole.data] == [0, 1], f"{len(whole.data[0].embedding)} dimensions")
    # Without a format, the client asks for base64 and decodes it.
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float").data[0].embedding
    check("embeddings as numbers", max(abs(a - b) for a, b in zip(floats, whole.data[0].embedding)) < 1e-7)
    short = client.embeddings.create(model=model, input=texts, dimensions=8).data[1].embedding
    check("dimensions", len(short) == 8 and abs(sum(it * it for it in short) - 1) < 1e-5)
except openai.BadRequestError as refused:
    check("a model without embeddings", refused.body["code"] == "no_embeddings", refused.body["message"])

answers, begun = [None] * 8, time.time()
prompts = ["Who art thou?", "What is thy name?", "Whither goest thou?", "Why weepest thou?"]


def ask_one(number):
    got = ask(messages=[{"role": "user", "content": prompts[number % 4]}], max_tokens=48)
    answers[number] = got.choices[0].message.content


def eight():
    threads = [threading.Thread(target=ask_one, args=(number,)) for number in range(8)]
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
