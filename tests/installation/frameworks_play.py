"""Agents of openai-agents and of LangGraph play an episode each, as programs."""

import json
import sys
from typing import Any

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

sys.path.append(sys.argv[1])  # the checkout, behind what is installed

from tests.agents.gateway.programs import KeepingEngine, Sampling, play_program

CALL = '<tool_call>\n{"name": "act", "arguments": {"action": "go"}}\n</tool_call>'


async def play_openai_agents(task: Any) -> None:
    """Hand the tools over, and run until the environment has ended."""
    await run_openai_agents(task, OpenAIChatCompletionsModel)


async def play_openai_responses(task: Any) -> None:
    """The same with the kind of model that openai-agents takes by itself."""
    await run_openai_agents(task, OpenAIResponsesModel)


async def run_openai_agents(task: Any, kind: Any) -> None:
    """An agent over this kind of model."""
    set_tracing_disabled(True)
    model = kind(task.model, AsyncOpenAI(base_url=task.base_url, api_key=task.api_key))
    tools = [function_tool(function) for function in task.functions]
    await Runner.run(Agent(name="player", instructions="Walk.", tools=tools, model=model), task.prompt, max_turns=9)


async def play_langgraph(task: Any) -> None:
    """The same with a graph, which is watched step by step."""
    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key)
    tools = [StructuredTool.from_function(coroutine=f, name=f.__name__, description=f.__doc__) for f in task.functions]
    async for _ in create_react_agent(model, tools).astream({"messages": [("user", task.prompt)]}):
        if task.done:
            return


def main() -> None:
    """Print what came of each."""
    report = {}
    for program in (play_openai_agents, play_openai_responses, play_langgraph):
        (played,) = play_program(program, KeepingEngine(CALL), sampling=Sampling(max_tokens=400))
        rows = [[turn.action for turn in played.turns], [turn.follows for turn in played.turns], len(played.rows())]
        report[program.__name__] = [played.won, played.fault, *rows]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
