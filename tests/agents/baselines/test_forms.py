"""The forms of the baselines, and the trials of Reflexion."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_agents.engines.base import ChatByteTokenizer, ContextExceededError, EngineFault, EngineFaultKind, Sampling
from spear_agents.engines.scripted import Policy, ScriptedEngine
from spear_agents.evaluation.baselines import (
    DIRECT,
    STEPWISE,
    Method,
    Reflexion,
    make_form,
    read_direct,
    read_stepwise,
    wrap_reader,
)
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout, StopReason, Trajectory
from spear_envs.code.grammar import CodeParser
from spear_envs.code.prompts import make_templates
from spear_envs.core.parsing import PeerParser, PlainParser, ResponseFormat, ResponseParser, TagParser
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptContext, PromptTemplate, RunningTemplate
from spear_envs.search.grammar import SearchParser
from tests.agents.corridor import CorridorEnv

PARSER = TagParser()
CONTEXT = PromptContext("walk", "P_", ["go", "back"], [("seen", "done")], 2, 6)


def play(method: Method, policy: Policy, template: Any = None) -> Trajectory:
    env = CorridorEnv()
    words = make_form(method, template or DefaultTemplate(), env.parser)
    layout = Layout.PER_TURN if method is Method.IO else Layout.CONVERSATION
    codec = ChatByteTokenizer()
    return asyncio.run(
        play_episode(
            wrap_reader(method, env),
            ScriptedEngine(policy, codec),
            PromptBuilder(codec, words, layout),
            task_id="corridor/test/000",
            sampling=Sampling(),
            seed=0,
            env_id="corridor",
        )
    )


@pytest.mark.parametrize(
    "text",
    [
        "go", " go\n", "Action: go", "**Action:** go", "'go'", "<action>go</action>",
        "<think>hm</think><action>go</action>", "go\nbecause it is near", "<action>go",
    ],
)  # fmt: skip
def test_an_action_alone_is_read(text: str) -> None:
    assert PARSER.parse(read_direct(text, PARSER)).action == "go"


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("Thought: it is near\nAction: go", "it is near"),
        ("Thought 1: it is near\nAction 1: go\nObservation 1: P\nThought 2: x\nAction 2: back", "it is near"),
        ("it is near\n\nAction: `go`", "it is near"),
        ("**Thought:** it is near\n**Action:** go\n\nObservation: won", "it is near"),
        ("Thought: a <think>b</think>\nAction: <action>go</action>", "a b"),
        ("<think>own form</think><action>go</action>", "own form"),
        ("Action: go", ""),
    ],
)
def test_the_first_thought_and_action_are_read(text: str, thought: str) -> None:
    parsed = PARSER.parse(read_stepwise(text, PARSER))
    assert (parsed.action, parsed.think) == ("go", thought)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I give up",
        "Thought: never an action",
        "Action:",
        "<think>never closed",
        "<think>Shall I?\nAction: back\nNo",
    ],
)
def test_what_cannot_be_read_goes_to_the_environment_as_it_is(text: str) -> None:
    assert read_stepwise(text, PARSER) == text
    assert "<think>" not in text or read_direct(text, PARSER) == text


REHEARSED = "The form is\nThought: so\nAction: back\n\nback is no good"


@pytest.mark.parametrize("native", [f"{REHEARSED}\n</think>\n\n", f"<think>\n{REHEARSED}\n</think>\n\n"])
@pytest.mark.parametrize(
    ("parser", "action"),
    [
        (PARSER, "go"),
        (PlainParser(), "go"),
        (PeerParser(), "go"),
        (SearchParser(), "<search>go</search>"),
        (SearchParser(ResponseFormat.PLAIN), "<answer>go</answer>"),
        (CodeParser(), "\\boxed{4}"),
        (CodeParser(ResponseFormat.PLAIN), "```python\nprint(4)\n```"),
    ],
)
def test_no_action_is_read_in_a_native_thought(native: str, parser: ResponseParser, action: str) -> None:
    for read, text in ((read_direct, action), (read_stepwise, f"Thought: near\nAction: {action}")):
        parsed = parser.parse(read(native + text, parser))
        assert (parsed.action, parsed.format_ok) == (action, True)
        assert isinstance(parser, PeerParser) or REHEARSED in (parsed.native, parsed.think)


@pytest.mark.parametrize("parser", [PlainParser(), CodeParser(ResponseFormat.PLAIN)])
def test_the_form_is_read_for_environments_that_take_the_bare_action(parser: ResponseParser) -> None:
    wanted = parser.parse("go").action
    for text in ("go", "Action: go", "go\nbecause it is near"):
        assert parser.parse(read_direct(text, parser)).action == wanted
    assert parser.parse(read_stepwise("Thought: it is near\nAction: go", parser)).action == wanted
    code = "I compute.\n```python\nprint(4)\n```"
    assert isinstance(parser, PlainParser) or read_direct(code, parser) == code


@given(
    st.tuples(st.sampled_from(["", "Thought: ", "Action: ", "Thought: a\nAction:"]), st.text(max_size=60)).map("".join)
)
def test_reading_never_fails(text: str) -> None:
    for read in (read_direct, read_stepwise):
        PARSER.parse(read(text, PARSER))


def test_the_form_takes_the_place_of_the_environments_own() -> None:
    for method, form in ((Method.IO, DIRECT), (Method.REACT, STEPWISE)):
        template = make_form(method, DefaultTemplate("the rules"), PARSER)
        text = template.render(CONTEXT)
        assert form in text and PARSER.hint not in text and "Think about" not in text
        assert text.startswith("the rules") and "'go', 'back'" in text
        assert PARSER.hint not in template.follow_up(CONTEXT)
        assert not isinstance(template, RunningTemplate)


@pytest.mark.parametrize(
    ("parser", "template"),
    [
        (PARSER, DefaultTemplate()),
        (PARSER, CompactTemplate()),
        (CodeParser(), make_templates(CodeParser(), 30.0)["default"]),
        (CodeParser(), make_templates(CodeParser(), 30.0)["tools"]),
    ],
)
def test_an_answer_to_a_malformed_response_keeps_its_reason(parser: ResponseParser, template: PromptTemplate) -> None:
    message = f"Your response could not be read: it is cut off. {parser.hint}"
    context = PromptContext("walk", message, None, [(message, "none")], 3, 6)
    for method, form in ((Method.REACT, "Thought: and Action:"), (Method.IO, DIRECT)):
        text = make_form(method, template, parser).follow_up(context)
        assert text.count("could not be read: it is cut off.") == 1 and text.count(form) == 1
        assert parser.hint not in text


@pytest.mark.parametrize("name", ["ALFWorld", "WebShop", "Sokoban", "SearchR1", "CodeInterpreter"])
def test_every_environment_reads_its_experts_actions_in_another_form(name: str) -> None:
    keywords = {"modality": "text"} if name == "Sokoban" else {}
    env: Any = gym.make(
        f"spear_envs:spear/{name}-{'v1' if name == 'Sokoban' else 'v0'}",
        split=None if name == "WebShop" else "train",
        **keywords,
    ).unwrapped
    try:
        env.reset(seed=0)
        words = make_form(Method.REACT, env.templates["default"], env.parser)
        action = env.expert_plan()[0]
        *_, info = wrap_reader(Method.REACT, env).step(words.respond(action, "a thought"))
        assert info["format_ok"], (action, info["action"])
    finally:
        env.close()


def test_react_plays_in_one_conversation_that_keeps_its_thoughts() -> None:
    prompts: list[str] = []

    def think(prompt: str, dice: random.Random) -> str:
        prompts.append(prompt)
        return f"Thought: step {len(prompts)}\nAction: go"

    found = play(Method.REACT, think)
    assert found.won and [turn.action for turn in found.turns] == ["go", "go"]
    assert "Thought: step 1" in prompts[1] and "Observation: This is step 2" in prompts[1]
    assert found.turns[0].response == "Thought: step 1\nAction: go"


TASK = "corridor/test/000"
ASKED = "You tried to solve a task and failed."


class Learner:
    """Walks the wrong way until its notes tell it where to go."""

    def __init__(self, notes: Sequence[str] = ("look around first", "walk on with go")) -> None:
        self.notes = list(notes)
        self.prompts: list[str] = []
        self.asked: list[str] = []

    def __call__(self, prompt: str, dice: random.Random) -> str:
        if ASKED in prompt:
            self.asked.append(prompt)
            return self.notes[len(self.asked) - 1]
        self.prompts.append(prompt)
        return "Thought: so\nAction: " + ("go" if "walk on with go" in prompt else "fail")


def play_reflexion(
    policy: Any,
    trials: int = 3,
    earlier: Mapping[tuple[str, int], Sequence[Trajectory]] | None = None,
    failed: list[Trajectory] | None = None,
    **options: Any,
) -> Trajectory:
    env = CorridorEnv()
    codec = ChatByteTokenizer()
    words = make_form(Method.REFLEXION, DefaultTemplate(), env.parser)
    kept = [] if failed is None else failed
    return asyncio.run(
        Reflexion(trials, earlier=earlier or {}, on_trial=kept.append)(
            wrap_reader(Method.REFLEXION, env),
            ScriptedEngine(policy, codec),
            PromptBuilder(codec, words, Layout.CONVERSATION, **options),
            task_id=TASK,
            sampling=Sampling(),
            seed=4,
            env_id="corridor",
        )
    )


def test_notes_of_failed_trials_stand_in_the_next_ones() -> None:
    learner, failed = Learner(), []  # type: ignore[var-annotated]
    last = play_reflexion(learner, failed=failed)
    assert last.won and last.trial == 3
    assert last.memory == ("look around first", "walk on with go") and last.reflection is None
    assert [(t.trial, t.memory, t.reflection) for t in failed] == [
        (1, (), "look around first"),
        (2, ("look around first",), "walk on with go"),
    ]
    assert "1. look around first\n2. walk on with go" in learner.prompts[2]
    assert "Earlier trials" not in learner.prompts[0]
    assert "Action: fail" in learner.asked[0] and "ended without success" in learner.asked[0]
    assert "look around first" in learner.asked[1]
    assert all(Trajectory.from_json(t.to_json()) == t for t in (*failed, last))


def test_a_won_trial_ends_it_and_the_last_one_is_not_reflected_on() -> None:
    first = play_reflexion(Learner(notes=()), trials=1)
    assert not first.won and first.trial == 1
    learner = Learner(["walk on with go"])
    assert play_reflexion(learner).trial == 2
    assert len(learner.asked) == 1


def test_an_interrupted_job_goes_on_behind_its_trials() -> None:
    whole: list[Trajectory] = []
    last = play_reflexion(Learner(), failed=whole)
    resumed = Learner()
    resumed.asked = ["already asked"]
    again: list[Trajectory] = []
    found = play_reflexion(resumed, earlier={(TASK, 4): whole[:1]}, failed=again)
    assert found == last and again == whole[1:]


def test_only_the_latest_notes_are_remembered() -> None:
    failed: list[Trajectory] = []
    play_reflexion(Learner([f"note {i}" for i in range(6)]), trials=6, failed=failed)
    assert failed[-1].memory == ("note 1", "note 2", "note 3")


def test_a_note_marks_no_place_of_a_picture() -> None:
    learner, failed = Learner(["it showed <image>", "walk on with go"]), []  # type: ignore[var-annotated]
    last = play_reflexion(learner, failed=failed)
    assert last.won and last.memory[0] == "it showed <image>", "the record has what was written"
    assert "1. it showed < image>" in learner.prompts[1]
    assert "<image>" not in "".join((*learner.prompts, *learner.asked))


def test_a_note_has_no_native_thought() -> None:
    learner = Learner(["<think>\nwalk on with go?\n</think>\n\nlook", "I see.\n</think>\n\nwalk on with go"])
    assert play_reflexion(learner).memory == ("look", "walk on with go")


def test_a_fault_while_reflecting_is_a_fault_of_the_episode() -> None:
    class Broken(Learner):
        def __call__(self, prompt: str, dice: random.Random) -> str:
            if ASKED in prompt:
                raise EngineFault(EngineFaultKind.TIMEOUT, "gone")
            return super().__call__(prompt, dice)

    failed: list[Trajectory] = []
    found = play_reflexion(Broken(), failed=failed)
    assert (found.stop, found.fault, failed) == (StopReason.FAULT, "engine_timeout", [])


def test_an_account_that_is_too_long_is_cut_down_to_its_end() -> None:
    lengths: list[int] = []

    class Narrow(Learner):
        def __call__(self, prompt: str, dice: random.Random) -> str:
            if ASKED in prompt:
                lengths.append(len(prompt))
                if len(lengths) < 3:
                    raise ContextExceededError("too long")
            return super().__call__(prompt, dice)

    assert play_reflexion(Narrow(["walk on with go"])).won
    assert lengths == sorted(lengths, reverse=True)
    short = play_reflexion(Learner(), max_prompt_tokens=300)  # no account fits: the trials go on without notes
    assert short.memory == () and not short.won
