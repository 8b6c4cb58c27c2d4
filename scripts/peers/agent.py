#!/usr/bin/env python3
"""Runs a task with two tools on `hearth serve`, with two agent libraries.

    python3 -m venv client && client/bin/pip install openai-agents 'pydantic-ai-slim[openai]'
    client/bin/python scripts/peers/agent.py http://127.0.0.1:8080/v1 [TOKEN]

The agent must look up the temperature of a city and convert it. So that also a small model finishes, a tool can be called
only once, and a tool must be called while there is one; what the model answers depends on the model. Checks that each
library runs to its end and that both tools got valid arguments. Exits with 1 if not.
"""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

base, token = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
called = []
TASK = "What is the temperature in Rome in degrees Fahrenheit?"


def temperature(city: str) -> float:
    """Returns the temperature of a city in degrees Celsius."""
    called.append(("temperature", city))
    return 20.0


def fahrenheit(celsius: float) -> float:
    """Converts degrees Celsius to degrees Fahrenheit."""
    called.append(("fahrenheit", celsius))
    return celsius * 1.8 + 32


def can_call(tool):
    """Returns whether it is the turn of a tool: temperature, then fahrenheit."""
    return len(called) == [temperature, fahrenheit].index(tool)


class Reading(BaseModel):
    """The temperature of a city."""

    city: str
    fahrenheit: float


async def openai_agents(name):
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model=name, openai_client=AsyncOpenAI(base_url=base, api_key=token))
    tools = [function_tool(tool, is_enabled=lambda context, agent, tool=tool: can_call(tool)) for tool in (temperature, fahrenheit)]
    agent = Agent(
        name="weather", instructions="Use the tools.", tools=tools, model=model, reset_tool_choice=False,
        tool_use_behavior={"stop_at_tool_names": ["fahrenheit"]},
        model_settings=ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=300),
    )
    return (await Runner.run(agent, TASK, max_turns=8)).final_output


async def pydantic_ai(name):
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=base, api_key=token))

    async def only_in_turn(context, definition, tool):
        return definition if can_call(tool) else None

    tools = [Tool(tool, prepare=lambda context, definition, tool=tool: only_in_turn(context, definition, tool))
             for tool in (temperature, fahrenheit)]
    agent = PydanticAgent(
        model, tools=tools, output_type=Reading,
        model_settings={"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False},
    )
    return (await agent.run(TASK)).output


async def main():
    name = (await AsyncOpenAI(base_url=base, api_key=token).models.list()).data[0].id
    failed = False
    for run in (openai_agents, pydantic_ai):
        called.clear()
        try:
            output = await run(name)
            names = [tool for tool, _ in called]
            failed |= names != ["temperature", "fahrenheit"]
            print(f"{'ok' if names == ['temperature', 'fahrenheit'] else 'FAILED'}: {run.__name__}: {called} -> {output!r}")
        except Exception as error:  # whatever the library raises
            failed = True
            print(f"FAILED: {run.__name__}: {called}: {type(error).__name__}: {error}")
    sys.exit(1 if failed else 0)


asyncio.run(main())
