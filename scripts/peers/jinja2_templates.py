#!/usr/bin/env python3
"""Compares the chat templates of hearth with Jinja2 as transformers uses it.

    cargo build --release -p hearth-runtime --example render_chat
    python3 scripts/peers/jinja2_templates.py [--list]

Needs the package jinja2 and the files of scripts/public-models.sh. Renders llama.cpp's collection of chat templates
with conversations with and without a system message, an earlier answer, tools, calls of tools and reasoning, in both
programs, and prints for each conversation how many texts are equal. `--list` prints the other cases. A case that both
refuse counts as equal. Exits with 1 if hearth refuses a case that Jinja2 renders, or if texts differ in more than
MAX_DIFFERENT cases.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

FOLDER = pathlib.Path(os.environ.get("HEARTH_PUBLIC", "target/public")) / "llama.cpp" / "templates"
MODEL = "tests/data/models/psalm-7m-q4_k.gguf"
# Texts of meetkai-functionary-medium-v3.1, in which Jinja2 begins to escape HTML.
MAX_DIFFERENT = 2
BOS, EOS = "<|bos|>", "<|eos|>"

TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Returns the weather in a city, in °C & words.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Name of the <city>"},
                                                    "days": {"type": "integer"}}, "required": ["city"]}}}
CALL = {"id": "call00001", "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}
USER, ANSWER = {"role": "user", "content": " What is it like in Köln? "}, {"role": "assistant", "content": "Cold."}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
AGAIN = {"role": "user", "content": "And in Rome?"}
RESULT = {"role": "tool", "content": "{\"celsius\": 3}", "tool_call_id": "call00001", "name": "get_weather"}
CONVERSATIONS = {
    "user": ([USER], []),
    "system": ([SYSTEM, USER], []),
    "turns": ([SYSTEM, USER, ANSWER, AGAIN], []),
    "tools": ([SYSTEM, USER], [TOOL]),
    "calls": ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], [TOOL]),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "Köln is in the north."}, AGAIN], []),
    "thinking": ([USER, {"role": "assistant", "content": "<think>\nNorth.\n</think>\n\nCold."}, AGAIN], []),
}


class Generation(jinja2.ext.Extension):
    """The tag with which transformers marks what the assistant writes; it has no effect on the text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def environment():
    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def peer(template, messages, tools):
    try:
        return {"text": environment().from_string(template).render(
            messages=messages, tools=tools or None, documents=None, bos_token=BOS, eos_token=EOS,
            add_generation_prompt=True)}
    except Exception as error:  # whatever the template does
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/examples/render_chat")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    templates = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
    cases = [(name, kind) for kind in CONVERSATIONS for name in templates]
    lines = [json.dumps({"template": templates[name], "messages": CONVERSATIONS[kind][0], "tools": CONVERSATIONS[kind][1]})
             for name, kind in cases]
    ran = subprocess.run([options.program, MODEL], input="\n".join(lines) + "\n", capture_output=True, text=True,
                         check=True)
    own = [json.loads(line) for line in ran.stdout.splitlines()]
    equal, unequal = {kind: 0 for kind in CONVERSATIONS}, []
    for (name, kind), ours in zip(cases, own, strict=True):
        theirs = peer(templates[name], *CONVERSATIONS[kind])
        if ours.get("text") == theirs.get("text"):
            equal[kind] += 1
        else:
            unequal.append((name, kind, ours, theirs))
    for kind, count in equal.items():
        print(f"{kind}: {count} of {len(templates)} equal")
    for name, kind, ours, theirs in unequal if options.list else []:
        print(f"\n{name}, {kind}")
        first, second = ours.get("text", ""), theirs.get("text", "")
        at = next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
        for who, rendered, text in (("hearth", ours, first), ("jinja2", theirs, second)):
            print(f"  {who}: {rendered.get('error') or repr(text[max(at - 40, 0):at + 60])}")
    rendered = [case for case in unequal if "text" in case[3]]
    if len(rendered) > MAX_DIFFERENT or any("error" in case[2] for case in rendered):
        sys.exit(1)


if __name__ == "__main__":
    main()
