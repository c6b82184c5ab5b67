"""The environment ``spear/SearchR1-v0``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from spear_envs.core.env import ActionResult, Anchor, CommonKeywords, SpearEnv
from spear_envs.core.errors import choose_member, require_whole
from spear_envs.core.parsing import mend_text
from spear_envs.core.prompts import PromptTemplate
from spear_envs.core.rewards import Criterion
from spear_envs.core.tasks import Task, canonical_json
from spear_envs.retrieval.retriever import RetrieverFault, find_documents
from spear_envs.search.grading import exact_match, f1_score
from spear_envs.search.grammar import (
    NO_PASSAGE,
    PeerSearchParser,
    ResponseKind,
    SearchParser,
    read_action,
    render_information,
    write_action,
)
from spear_envs.search.prompts import (
    INVALID_ACTION,
    LAST_TURN,
    SEARCH_R1,
    TOOLS,
    compress_observation,
    make_templates,
)
from spear_envs.search.retrievers import RetrieverChoice, open_retriever, read_path
from spear_envs.search.tasks import EMBEDDED, MINI, find_splits, list_texts, open_tasks

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_QUERY = 8_192
"""Most characters of a query, as in the retrieval service."""
MAX_TOPK = 100
MAX_TURNS = 32
PRESET_TURNS = 5
PRESET_CHARS = 2_500
"""Characters if tokens cannot be counted: 500 of SmolLM2's tokens of Wikipedia had 1,914 on average, at most 2,366."""


class Outcome(str, Enum):
    """The outcome term of the reward."""

    EXACT_MATCH = "exact_match"
    """+1 for a right answer, else -1."""
    GRADED_FORMAT = "graded_format"
    """Search-R1 v0.3's: right 1, right in bad form 0.8, wrong in good form 0.2, wrong in bad form 0.1, else 0.
    The form is good if that of every response was."""


class Preset(str, Enum):
    """Published settings by name."""

    SEARCH_R1 = "search_r1"
    """Settings of Search-R1's training and evaluation: its prompt (the template of the same name, here the default),
    its sentence after an invalid action, empty tags for a search without a hit, no notice of the last turn, and 5
    turns: its ``max_turns=4`` are searches, after which one more response may answer."""


class SearchR1Env(SpearEnv[str]):
    """Search-R1: a question, a search engine, and an answer graded by exact match; one response is one action.

    Actions are ``<search>query</search>`` and ``<answer>text</answer>``. An answer ends the episode: ``won``, ``score``
    and the native reward are its exact match, and ``reward_terms["f1"]`` its F1, for evaluation only. ``tool_calls``
    counts searches that returned, with or without hits. The prediction is the content of the answer that ended the
    episode; earlier responses are not searched for one. The first observation is the question, later ones are the
    passages; before the last turn they announce it.
    ``info`` has the keys of ``StepInfo``, ``passages`` (ids of those found in this turn), ``answer`` (None until it is
    given) and ``retriever`` (fingerprint of what finds passages, None before the first search).

    Args:
        dataset: ``"mini"`` (embedded), ``"mini-small"`` (the same for word-level models), the name of a benchmark
            fetched by ``spear data get search``, ``"seven"`` for all seven, ``"deepresearcher"`` for its
            evaluation set, or the path of a file of questions.
        split: ``"train"`` (default), ``"valid"`` or ``"test"`` of the embedded questions; other files have
            their own ``splits``.
        panel: number of questions per benchmark, always the same ones; None for all.
        retriever: ``"bm25"`` (default), ``"dense"`` or ``"hybrid"`` in this process, the address of a retrieval service
            or a list of them, a file that names indexes (``.yaml``), or any
            :class:`~spear_envs.retrieval.retriever.Retriever`.
        corpus: JSON lines to search in this process; by default the embedded base.
        index: folder that ``spear index build`` wrote for the corpus.
        topk: passages of a search, 1 to 100.
        preset: ``"search_r1"`` for Search-R1's prompt, sentences and limits, see :class:`Preset`.
        max_turns: responses after which the episode is truncated; by default 32, or the preset's 5.
        observation_chars: most characters of an observation's passages, tags included; by default 2,000, or the
            preset's 2,500.
        observation_tokens: most tokens of them, where the policy's tokenizer is known (see :meth:`set_text_measure`).
            With the preset the blank lines around them count as well, as in Search-R1's ``max_obs_length=500``.
        outcome: ``"exact_match"`` or ``"graded_format"``.
        anchor: ``"state"``, a digest of the task and the passages read, or ``"observation"``, the question or what
            answered the last response, see :class:`~spear_envs.core.env.Anchor`.
        common: keywords of every environment, see :class:`CommonKeywords`. ``"plain"`` takes the
            same tags and asks for no thought.

    Raises:
        SpearError: a keyword has an invalid value, or data is missing.
    """

    metadata: dict[str, Any]  # type: ignore[misc]
    tools = TOOLS
    peer_parser = PeerSearchParser()
    splits: tuple[str, ...] = find_splits(MINI)  # type: ignore[misc]
    templates: Mapping[str, PromptTemplate] = make_templates(SearchParser(), topk=3)  # type: ignore[misc]

    def __init__(
        self,
        dataset: str | os.PathLike[str] = MINI,
        split: str | None = None,
        panel: int | None = None,
        retriever: RetrieverChoice = "bm25",
        corpus: str | os.PathLike[str] | None = None,
        index: str | os.PathLike[str] | None = None,
        topk: int = 3,
        preset: str | None = None,
        max_turns: int | None = None,
        observation_chars: int | None = None,
        observation_tokens: int = 500,
        outcome: str = "exact_match",
        anchor: str = "state",
        **common: Unpack[CommonKeywords],
    ) -> None:
        require_whole("topk", topk, 1, MAX_TOPK)
        self._published = preset is not None and choose_member(Preset, preset, "preset") is Preset.SEARCH_R1
        if observation_chars is None:
            observation_chars = PRESET_CHARS if self._published else 2_000
        require_whole("observation_chars", observation_chars, 64)
        require_whole("observation_tokens", observation_tokens, 16)
        if panel is not None:
            require_whole("panel", panel, 1)
        name = read_path("dataset", dataset)
        self.outcome = choose_member(Outcome, outcome, "outcome")
        self.anchor = choose_member(Anchor, anchor, "anchor")
        self.topk = topk
        self.dataset = name
        self.splits = find_splits(name)
        tasks = open_tasks(name, split, panel)
        self.retriever = open_retriever(
            retriever,
            None if corpus is None else read_path("corpus", corpus),
            None if index is None else read_path("index", index),
            name,
        )
        super().__init__(
            tasks,
            max_turns=(PRESET_TURNS if self._published else MAX_TURNS) if max_turns is None else max_turns,
            parser=SearchParser,
            **common,
        )
        self.templates = make_templates(self.parser, topk, SEARCH_R1 if self._published else "default")
        self._budgets = (observation_chars, observation_tokens)
        self._seen: dict[str, None] = {}
        self._asked: list[str] = []
        self._found: list[str] = []
        self._answer: str | None = None
        self._retriever: str | None = None
        if corpus is not None or retriever != "bm25":  # a search of the embedded base is cheaper than a thread
            self.metadata = {**self.metadata, "blocking": True}

    # ---------------------------------------------------------------- hooks of SpearEnv

    def _start(self, task: Task) -> None:
        self._seen, self._asked, self._found, self._answer, self._retriever = {}, [], [], None, None
        self.episode.extra_terms["f1"] = 0.0
        if self.outcome is Outcome.GRADED_FORMAT:
            self.episode.outcome = 0.0

    def _act(self, action: str) -> ActionResult:
        kind, content = read_action(action)
        if kind is ResponseKind.ANSWER:
            return self._grade(content)
        if kind is ResponseKind.INVALID or not content:
            return self._malformed("There is neither a search nor an answer between its tags.")
        if len(content) > MAX_QUERY:
            self._found = []
            text = f"The query has {len(content):,} characters, and at most {MAX_QUERY:,} are searched: ask for less."
            return ActionResult(False, message=self._warn(text), details=self._details())
        documents = find_documents(self.retriever, mend_text(content), self.topk)
        with suppress(RetrieverFault):  # the search itself succeeded
            self._retriever = self.retriever.fingerprint
        self._asked.append(content)
        self._found = [str(document["id"]) for document in documents]
        self._seen.update(dict.fromkeys(self._found))
        return ActionResult(
            True, message=self._warn(self._render(documents)), tool_calls=1, details=self._details(), action=action
        )

    def _grade(self, answer: str) -> ActionResult:
        golds = self.task.content["golden_answers"]
        score = exact_match(answer, golds)
        self._found, self._answer = [], answer
        graded = None
        if self.outcome is Outcome.GRADED_FORMAT:
            right, wrong = (1.0, 0.2) if self.episode.well_formed else (0.8, 0.1)
            graded = right if score else wrong
        return ActionResult(
            True,
            score,
            won=score == 1.0,
            done=True,
            message="Your answer is right." if score else "Your answer is not right.",
            details=self._details(),
            terms={"f1": f1_score(answer, golds)},
            outcome=graded,
        )

    def _render(self, documents: list[dict[str, Any]]) -> str:
        chars, tokens = self._budgets
        nothing, around = ("", "\n\n") if self._published else (NO_PASSAGE, "")
        measure = self.text_measure
        if measure is None:
            return render_information(documents, chars, nothing=nothing)
        return render_information(documents, tokens, lambda text: measure(around + text + around), nothing=nothing)

    def _malformed(self, problem: str) -> ActionResult:
        self._found = []
        text = INVALID_ACTION if self._published else f"{problem} {self.parser.hint}"
        return ActionResult(False, message=self._warn(text), details=self._details())

    def _warn(self, message: str) -> str:
        """Return the message, with a notice before the last turn unless Search-R1's settings leave it out."""
        return f"{message}\n\n{LAST_TURN}" if self.turn == self.max_turns - 1 and not self._published else message

    def _details(self) -> dict[str, Any]:
        return {"passages": list(self._found), "answer": self._answer, "retriever": self._retriever}

    def criteria(self) -> list[Criterion]:
        """Return the answer, and the answers that are right."""
        golds = " | ".join(self.task.content["golden_answers"])
        return [Criterion("answer", self.episode.won, golds, self._answer or "no answer")]

    def _observe(self, message: str) -> str:
        return message or self._warn(f"Question: {self.task.instruction}")

    def _world(self) -> dict[str, Any]:
        return {
            "seen": list(self._seen),
            "asked": list(self._asked),
            "found": list(self._found),
            "answer": self._answer,
            "retriever": self._retriever,
        }

    def _restore_world(self, state: Mapping[str, Any]) -> None:
        self._seen = dict.fromkeys(state["seen"])
        self._asked, self._found = list(state["asked"]), list(state["found"])
        self._answer, self._retriever = state["answer"], state["retriever"]

    def _anchor(self) -> str:
        if self.anchor is Anchor.OBSERVATION:
            return self._result.message or self.task.instruction
        return hashlib.sha256(canonical_json([self.task.id, sorted(self._seen)]).encode()).hexdigest()[:32]

    def expert_plan(self) -> list[str]:
        """Return the next action: the query of the first gold passage not read yet, else the answer; empty at the end.

        No query is repeated, so that the plan ends with any retriever; on the last turn only the answer is left.
        Questions without known queries are answered at once.
        """
        if self.done:
            return []
        content = self.task.content
        if self.turn < self.max_turns - 1:
            steps = zip(content.get("gold_passages", ()), content.get("oracle_queries", ()), strict=True)
            for passage, query in steps:
                if passage not in self._seen and query not in self._asked:
                    return [write_action(ResponseKind.SEARCH, query)]
        return [write_action(ResponseKind.ANSWER, content["golden_answers"][0])]

    def lexicon(self) -> Iterator[str]:
        """Yield every passage and question of an embedded base in the compact form; nothing for other data."""
        if self.dataset in EMBEDDED:
            passages, questions = list_texts(self.dataset)
            yield from (compress_observation(render_information([passage], 10_000)) for passage in passages)
            yield from (f" {question}" for question in questions)
