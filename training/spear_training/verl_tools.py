"""Tools for verl's own ``tool_agent_loop`` (``tool_config_path``): our sandbox and our retriever.

They answer in the same words as our environments. Our trainer is not needed.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from spear_envs.code.feedback import (
    EMPTY_CODE,
    OBSERVATION_CHARS,
    TOOL_FAILED,
    Feedback,
    render_feedback,
    truncate_middle,
)
from spear_envs.code.opening import open_limits, open_runner, run_program
from spear_envs.code.prompts import TOOLS as CODE_TOOLS
from spear_envs.code.snippets import Prelude, make_program, strip_fences
from spear_envs.core.errors import SpearError, choose_member, suggest_name
from spear_envs.core.faults import EnvFault
from spear_envs.core.tools import CallError, Tool
from spear_envs.search.env import MAX_QUERY
from spear_envs.search.grammar import mend_text, render_information
from spear_envs.search.opening import open_searcher
from spear_envs.search.prompts import TOOLS as SEARCH_TOOLS

logger = logging.getLogger(__name__)

CALLS, FAULTS = "tool_calls", "tool_faults"
"""Counts in an episode's ``extra_fields``: completed calls, and those with a service fault.

Reward functions of verl get them as ``tool_extra_fields`` and decide about episodes with faults.
"""

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class CodeSettings:
    """Keys of the tool's ``config``, besides verl's ``type: native``."""

    sandbox: str | None = None
    """Address of a sandbox service; None for a sandbox in each agent-loop worker."""
    feedback: str = Feedback.SPEAR.value
    prelude: str = Prelude.RETOOL.value
    time_limit: float = 30.0
    """Seconds of a run."""
    memory_mb: int = 1_024
    observation_chars: int = OBSERVATION_CHARS
    """Longer output is cut in its middle; verl's ``max_tool_response_length`` cuts again (256 by default)."""
    max_calls: int = 128
    """Maximum concurrent runs of a worker."""


@dataclass(frozen=True)
class SearchSettings:
    """Keys of the tool's ``config``, besides verl's ``type: native``."""

    retriever: str = "bm25"
    """Address of a retrieval service, or the kind of retriever in each agent-loop worker."""
    corpus: str | None = None
    """JSON lines to search in the worker; by default the embedded knowledge base."""
    index: str | None = None
    topk: int = 3
    observation_chars: int = 2_000
    max_calls: int = 128


class _ServiceTool(BaseTool, ABC):
    """A tool with one text argument over a service, called on its own threads.

    verl's loop passes a tool's exceptions to the model and continues training. Invalid settings are therefore detected
    by a first call when the tool is made; later failures are answered in the environments' words and counted.
    """

    def __init__(self, config: Mapping[str, Any], schema: OpenAIFunctionToolSchema | None, tool: Tool, calls: int):
        self._tool = tool
        self._threads = ThreadPoolExecutor(max(1, calls), thread_name_prefix=tool.name)
        try:
            self._work(self._trial)
        except EnvFault as fault:
            raise SpearError(
                f"the tool {tool.name} does not answer: {fault.message} Start its service first."
            ) from None
        super().__init__(dict(config), schema or OpenAIFunctionToolSchema.model_validate(tool.schema()))

    _trial: str
    """A cheap argument for the first call."""

    @abstractmethod
    def _work(self, argument: str) -> str:
        """Answer a call, on a thread.

        Raises:
            EnvFault: the service failed.
            SpearError: the settings are invalid.
        """

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer a call, with reward 0 and whether the service failed in its metrics."""
        try:
            self._tool.check(parameters if isinstance(parameters, dict) else {})
        except CallError as error:
            return ToolResponse(text=str(error)), 0.0, {}
        (argument,) = parameters.values()
        counts = getattr(kwargs.get("agent_data"), "extra_fields", {})
        try:
            told = await asyncio.get_running_loop().run_in_executor(self._threads, self._work, argument)
        except EnvFault as fault:
            logger.warning("%s failed (%s): %s", self.name, fault.kind, fault.message)
            counts[FAULTS] = counts.get(FAULTS, 0) + 1
            return ToolResponse(text=TOOL_FAILED), 0.0, {"fault": fault.kind}
        counts[CALLS] = counts.get(CALLS, 0) + 1
        return ToolResponse(text=told), 0.0, {}


class CodeInterpreterTool(_ServiceTool):
    """``code_interpreter`` of ``spear/CodeInterpreter-v0``: the same programs, limits and words.

    ``config`` is a :class:`CodeSettings`; ``tool_schema`` another description for the model, with the name and argument
    it uses. Raises SpearError for an invalid setting, or if no sandbox answers.
    """

    _trial = "print(1)"

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        settings = _read(CodeSettings, config)
        self._feedback = choose_member(Feedback, settings.feedback, "feedback")
        self._prelude = choose_member(Prelude, settings.prelude, "prelude")
        self._limits = open_limits(settings.time_limit, settings.memory_mb, settings.sandbox)
        self._chars = settings.observation_chars
        self._runner = open_runner(settings.sandbox)
        super().__init__(config, tool_schema, CODE_TOOLS[0], settings.max_calls)

    def _work(self, argument: str) -> str:
        code = strip_fences(argument)
        if not code.strip():
            return EMPTY_CODE
        outcome = run_program(self._runner, make_program(code, self._prelude), self._limits)
        return truncate_middle(render_feedback(outcome, self._feedback, self._limits.wall_s), self._chars)


class SearchTool(_ServiceTool):
    """``search`` of ``spear/SearchR1-v0``: the same passages, in the same words.

    ``config`` is a :class:`SearchSettings`; ``tool_schema`` another description for the model. Raises SpearError for an
    invalid setting, or if no retriever answers.
    """

    _trial = "ready"

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        settings = _read(SearchSettings, config)
        self._topk, self._chars = settings.topk, settings.observation_chars
        self._searcher = open_searcher(settings.retriever, settings.corpus, settings.index)
        super().__init__(config, tool_schema, SEARCH_TOOLS[0], settings.max_calls)

    def _work(self, argument: str) -> str:
        query = mend_text(argument).strip()
        if not query:
            return "The query is empty: say what to search for."
        if len(query) > MAX_QUERY:
            return f"The query has {len(query):,} characters, and at most {MAX_QUERY:,} are searched: ask for less."
        return render_information(self._searcher.search(query, self._topk), self._chars)


def _read(kind: type[Settings], config: Mapping[str, Any]) -> Settings:
    """Read settings from a tool's ``config``. Raises SpearError for an unknown key."""
    values = {key: value for key, value in config.items() if key != "type"}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise SpearError(f"{key!r} is not a setting: choose of {', '.join(names)}.{suggest_name(str(key), names)}")
    return kind(**values)
