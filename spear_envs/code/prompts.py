"""Prompt templates of the code environment: ``default``, ``budget``, ``retool``, and ``compact`` for tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from spear_envs.code.grammar import TOOL_NAME, CodeParser, read_call, write_answer
from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import DefaultTemplate, PromptContext, PromptTemplate, StockTemplate
from spear_envs.core.tools import CallParser, make_tool


@make_tool(r"```python\n(?P<code>.*)\n```")
def code_interpreter(code: Annotated[str, "The code to run."]) -> str:
    """Runs Python code and returns what it prints."""
    # As JSON, which can hold any code; a fence would end at the first fence in it.
    call = json.dumps({"name": TOOL_NAME, "arguments": {"code": code}}).replace("<", "\\u003c")
    return f"<tool_call>\n{call}\n</tool_call>"


@make_tool(r"\\boxed\{(?P<answer>.*)\}")
def answer(answer: Annotated[str, "The answer alone."]) -> str:
    """Answers; this ends the task."""
    return write_answer(answer)


TOOLS = (code_interpreter, answer)
"""The actions as functions."""

_WHEN = """\
Use Python where it helps: for long calculations, for trying many cases, for checking a result. Each piece of code \
runs by itself, in a fresh process that remembers nothing of earlier ones, so define all you need anew and print what \
you want to see. There is no network, and a run may take {time_limit:g} seconds."""

_TOOL_CALL = """\
Solve the mathematics problem below. You have a Python interpreter as a tool and at most {max_turns} turns; each \
response is one turn.

{when}

# Tools

<tools>
{tool}
</tools>

To call the tool, write a JSON object with its name and arguments between <tool_call> and </tool_call>, one call in a \
response:
<tool_call>
{call}
</tool_call>
What it printed comes back in the next message. A response without a call ends the task, so give one only when you \
have the answer, and put the answer into \\boxed{{}}.

Problem: {problem}"""

_RETOOL = """\
Solve the mathematics problem below step by step. You can have Python code run while you think, at most \
{max_turns} times.

{when}

Put the code between <code> and </code>:
<code>
```python
print(6 * 7)
```
</code>
What it printed follows between <interpreter> and </interpreter>; never write these yourself. When you have the \
answer, end with <answer>\\boxed{{your answer}}</answer>.

Problem: {problem}"""


@dataclass(frozen=True)
class ToolCallTemplate(StockTemplate):
    """The problem and the tool in one user message; output comes back as in Qwen's chat templates.

    A follow-up is a user message with the text between ``<tool_response>`` tags, like a ``tool`` message there.

    Args:
        time_limit: seconds that a run may take, for the prompt.
        budget: whether to say how many turns are left.
    """

    name: str = "default"
    parser: ResponseParser = field(default_factory=CodeParser)
    time_limit: float = 30.0
    budget: bool = False
    token_pattern: str | None = None

    def render(self, context: PromptContext) -> str:
        """Return the problem, then the turns of the history, if any."""
        call = json.dumps({"name": TOOL_NAME, "arguments": {"code": "print(6 * 7)"}})
        opening = _TOOL_CALL.format(
            when=_WHEN.format(time_limit=self.time_limit),
            tool=json.dumps(TOOLS[0].schema()),
            call=call,
            max_turns=context.max_turns,
            problem=context.instruction.strip(),
        )
        return opening if context.turn == 1 else _append_history(self, opening, context)

    def follow_up(self, context: PromptContext) -> str:
        """Return the observation, and the turns left."""
        left = context.max_turns - context.turn + 1
        text = f"\n[{left} {'turn' if left == 1 else 'turns'} left]" if self.budget else ""
        return f"<tool_response>\n{context.observation}{text}\n</tool_response>"


@dataclass(frozen=True)
class RetoolTemplate(StockTemplate):
    """ReTool's form: code and output follow one another in one running message of the assistant.

    Args:
        parser: of the environment, which also reads ReTool's tags.
    """

    parser: ResponseParser = field(default_factory=CodeParser)
    time_limit: float = 30.0
    name: str = "retool"
    token_pattern: str | None = None
    stop_strings: tuple[str, ...] = ("</code>", "</answer>")

    def render(self, context: PromptContext) -> str:
        """Return the problem, then the turns of the history."""
        opening = _RETOOL.format(
            when=_WHEN.format(time_limit=self.time_limit),
            max_turns=context.max_turns,
            problem=context.instruction.strip(),
        )
        return opening if context.turn == 1 else _append_history(self, opening, context)

    def follow_up(self, context: PromptContext) -> str:
        """Return the output between the tags of the interpreter."""
        return f"\n<interpreter>\n{context.observation}\n</interpreter>\n"

    def respond(self, action: str, think: str = "") -> str:
        """Return thoughts, then the code in a fence between tags, or the answer between tags."""
        code = read_call(action)
        written = f"<answer>{action}</answer>" if code is None else f"<code>\n```python\n{code}\n```\n</code>"
        return f"{think}\n{written}" if think else written


def _append_history(template: PromptTemplate, opening: str, context: PromptContext) -> str:
    """Write a prompt that shows the last turns and the present observation."""
    parts = [opening]
    first = context.turn - len(context.history)
    if first > 1:
        parts.append(f"({first - 1} earlier turns are not shown.)")
    for turn, (seen, action) in enumerate(context.history, first):
        if turn > 1:
            parts.append(template.follow_up(replace(context, observation=seen, turn=turn)).strip())
        parts.append(action if read_call(action) is None else template.respond(action))
    return "\n\n".join([*parts, template.follow_up(context).strip()])


# A word includes the preceding blank and the following bracket; numbers are split into digits.
_PIECES = (
    r"<code>",
    r"</code>",
    r"\\boxed\{",
    r"\*\*",
    r"==",
    r" ?[A-Za-z]+(?:\.[A-Za-z]+)?\(?",
    r"\d",
    r"\s",
    r"[^\w\s]",
)


@dataclass(frozen=True)
class CompactCodeTemplate(StockTemplate):
    """The bare problem, then the output: short sequences for tiny models with a word-level tokenizer.

    An observation is a line that begins with ``>``; ``#`` ends each prompt. Responses are ``<code>…</code>``
    or a box, and end with the model's own end token.
    """

    parser: ResponseParser = field(default_factory=CodeParser)
    name: str = "compact"
    token_pattern: str | None = "|".join(_PIECES)

    def render(self, context: PromptContext) -> str:
        """Return the problem, then the turns of the history."""
        parts = [context.instruction.strip()]
        if context.turn > 1:
            first = context.turn - len(context.history)
            for turn, (seen, action) in enumerate(context.history, first):
                parts += ["" if turn == 1 else f"\n>{seen}", f"\n#{self.respond(action)}"]
            parts.append(f"\n>{context.observation}")
        return "".join([*parts, "\n#"])

    def follow_up(self, context: PromptContext) -> str:
        """Return the observation, and the turns left."""
        return f"\n>{context.observation}\n#"

    def respond(self, action: str, think: str = "") -> str:
        """Return the code between tags, or the answer in its box."""
        code = read_call(action)
        return action if code is None else f"<code>{code}</code>"


_TOOL_RULES = """\
Solve a mathematics problem. You have a Python interpreter as a tool. {when} Call answer as soon as you are sure."""


def make_templates(parser: ResponseParser, time_limit: float) -> Mapping[str, PromptTemplate]:
    """Make all templates, by name."""
    return MappingProxyType(
        {
            "default": ToolCallTemplate("default", parser, time_limit),
            "budget": ToolCallTemplate("budget", parser, time_limit, budget=True),
            "retool": RetoolTemplate(parser, time_limit),
            "compact": CompactCodeTemplate(parser),
            "tools": DefaultTemplate(
                _TOOL_RULES.format(when=_WHEN.format(time_limit=time_limit)), CallParser(TOOLS, parser), name="tools"
            ),
        }
    )
