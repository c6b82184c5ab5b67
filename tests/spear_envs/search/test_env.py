from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.retriever import FaultKind, RetrieverFault
from spear_envs.search.prompts import INVALID_ACTION, LAST_TURN
from spear_envs.testing import check_spear_env
from tests.spear_envs.search.conftest import Shelf, make, make_asking


def say(action: str) -> str:
    return f"<think>t</think>{action}"


def search(query: str) -> str:
    return say(f"<search>{query}</search>")


def answer(text: str) -> str:
    return say(f"<answer>{text}</answer>")


SMALL = {"dataset": "mini-small", "topk": 1, "reward": "native", "max_turns": 6}


@pytest.mark.parametrize("kwargs", [{"resets": 200}, pytest.param(SMALL, marks=pytest.mark.slow)])
def test_contract(kwargs: dict[str, Any]) -> None:
    check_spear_env("spear/SearchR1-v0", **kwargs)


def test_passages_answer_a_query(tmp_path: Path) -> None:
    shelf = Shelf('"Oslo"\nOslo is a city.', '"Bergen"\nBergen is a city.')
    env = make_asking(tmp_path, ["Oslo"], shelf=shelf)
    observation, reward, terminated, truncated, info = env.step(search(" city "))
    assert observation == (
        '<information>Doc 1(Title: "Oslo") Oslo is a city.\nDoc 2(Title: "Bergen") Bergen is a city.</information>'
    )
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert shelf.queries == ["city"]
    assert (info["action"], info["action_ok"], info["tool_calls"]) == ("<search>city</search>", True, 1)
    assert info["passages"] == ["0", "1"]
    observation, *_, info = env.step(search("nothing like it"))
    assert observation == "<information>No passage was found.</information>"
    assert (info["tool_calls"], info["passages"]) == (2, []), "a search without a hit returned, too"


@pytest.mark.parametrize(
    ("text", "score", "f1"), [("the Oslo!", 1.0, 1.0), ("Oslo Norway", 0.0, 2 / 3), ("Bergen", 0.0, 0.0)]
)
def test_an_answer_ends_the_episode(tmp_path: Path, text: str, score: float, f1: float) -> None:
    env = make_asking(tmp_path, ["Christiania", "Oslo"])
    _, reward, terminated, truncated, info = env.step(answer(text))
    assert terminated and not truncated
    assert (info["won"], info["score"], info["answer"]) == (score == 1.0, score, text)
    assert info["reward_terms"]["f1"] == pytest.approx(f1)
    assert info["reward_terms"]["outcome"] == (1.0 if score else -1.0)
    assert reward == pytest.approx((1.0 if score else -1.0) + 0.1)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(answer(text))


def test_malformed_and_blank_searches_are_no_tool_calls(tmp_path: Path) -> None:
    shelf = Shelf("x")
    env = make_asking(tmp_path, ["x"], shelf=shelf)
    for response in ("", search(" "), "<search>x", search("<answer>x</answer>"), "x" * 600_000):
        *_, info = env.step(response)
        assert not info["action_ok"] and info["tool_calls"] == 0
    assert shelf.queries == [] and info["turn"] == 5


def test_a_query_that_no_service_would_take_is_not_sent(tmp_path: Path) -> None:
    shelf = Shelf("x")
    env = make_asking(tmp_path, ["x"], shelf=shelf)
    observation, *_, info = env.step(search("q" * 100_000))
    assert "100,000 characters" in observation and "8,192" in observation
    assert (info["format_ok"], info["action_ok"], info["tool_calls"]) == (True, False, 0)
    *_, info = env.step(search("a\ud800b"))
    assert shelf.queries == ["a?b"] and info["tool_calls"] == 1


def test_the_last_turn_is_told_and_a_search_there_loses(tmp_path: Path) -> None:
    env = make_asking(tmp_path, ["x"], max_turns=3, shelf=Shelf("x"))
    first, *_ = env.step(search("x"))
    second, *_ = env.step("malformed")
    assert LAST_TURN not in first and second.endswith(LAST_TURN)
    _, reward, terminated, truncated, info = env.step(search("x"))
    assert truncated and not terminated
    assert (info["score"], info["won"], info["answer"]) == (0.0, False, None)
    assert reward == pytest.approx(-1.0)


def test_the_preset_is_search_r1_s(tmp_path: Path) -> None:
    shelf = Shelf("t\n" + "word " * 2_000, "other")
    env = make_asking(tmp_path, ["x"], shelf=shelf, preset="search_r1")
    assert env.max_turns == 5, "four searches, and a response that may answer"
    assert env.templates["default"].name == "search_r1"
    assert 2_490 <= len(env.step(search("t"))[0]) <= 2_500
    assert env.step("no action")[0] == INVALID_ACTION
    assert env.step(search("nothing"))[0] == "<information></information>"
    seen: list[str] = []

    def measure(text: str) -> int:
        seen.append(text)
        return len(text.split(" "))

    env.set_text_measure(measure)
    before_the_last, *_ = env.step(search("word"))
    assert env.turn == 4 and before_the_last.endswith("</information>") and LAST_TURN not in before_the_last
    assert 440 <= len(before_the_last.split(" ")) <= 500
    assert all(text.startswith("\n\n<") and text.endswith(">\n\n") for text in seen)
    *_, truncated, info = env.step(search("other"))
    assert truncated and info["fault"] is None


@pytest.mark.parametrize(
    ("responses", "outcome"),
    [
        ([answer("Oslo")], 1.0),
        (["<answer>Oslo</answer>"], 0.8),
        ([answer("Rome")], 0.2),
        (["<answer>Rome</answer>"], 0.1),
        (["", answer("Oslo")], 0.8),
        ([search("x"), search("x")], 0.0),
        (["", ""], 0.0),
    ],
)
def test_graded_format(tmp_path: Path, responses: list[str], outcome: float) -> None:
    env = make_asking(tmp_path, ["Oslo"], outcome="graded_format", max_turns=2)
    for response in responses:
        *_, info = env.step(response)
    assert env.done and info["reward_terms"]["outcome"] == outcome
    assert info["score"] == float(outcome >= 0.8)


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_retriever_that_dies_is_a_fault(tmp_path: Path, kind: FaultKind) -> None:
    shelf = Shelf("x")
    env = make_asking(tmp_path, ["x"], shelf=shelf)
    env.step(search("x"))
    shelf.fault = RetrieverFault(kind, "it is gone")
    _, reward, terminated, truncated, info = env.step(search("x"))
    assert truncated and not terminated and reward == 0.0
    assert (info["fault"], info["tool_calls"], info["score"]) == (kind.value, 1, 0.0)
    shelf.fault = None
    env.reset(seed=0)
    *_, info = env.step(search("x"))
    assert info["fault"] is None and info["tool_calls"] == 1


def test_an_error_of_ours_is_not_hidden_as_a_fault(tmp_path: Path) -> None:
    shelf = Shelf("x")
    env = make_asking(tmp_path, ["x"], shelf=shelf)
    shelf.fault = SpearError("the service refuses the request")
    with pytest.raises(SpearError, match="refuses"):
        env.step(search("x"))


def test_nobody_answers_at_the_address() -> None:
    pytest.importorskip("httpx", reason="needs the extra 'search'")
    from spear_envs.retrieval.client import RetrieverClient

    assert isinstance(make(retriever="http://127.0.0.1:9", dataset="mini-small").retriever, RetrieverClient)
    env = make(retriever=RetrieverClient(["http://127.0.0.1:9"], tries=1), dataset="mini-small")
    assert env.metadata["blocking"] and "blocking" not in make().metadata
    env.reset(seed=0)
    _, reward, _, truncated, info = env.step(search("x"))
    assert truncated and reward == 0.0 and info["fault"] == "retriever_unavailable"


def test_the_anchor_is_the_task_and_the_passages_read(tmp_path: Path) -> None:
    shelf = Shelf("a b", "b c", "c a")
    env, other = make_asking(tmp_path, ["x"], shelf=shelf), make_asking(tmp_path, ["x"], shelf=shelf)
    start = env.reset(seed=0)[1]["anchor"]
    assert env.step("malformed")[4]["anchor"] == start
    assert env.step(search("nothing"))[4]["anchor"] == start, "no passage was read"
    env.step(search("a"))
    end = env.step(search("b"))[4]["anchor"]
    other.step(search("b"))
    assert other.step(search("a"))[4]["anchor"] == end, "in another order"
    mini = make()
    assert mini.reset(options={"task": mini.tasks[0].id})[1]["anchor"] != start


def test_observations_are_measured_in_the_policy_s_tokens(tmp_path: Path) -> None:
    env = make_asking(tmp_path, ["x"], shelf=Shelf("t\n" + "word " * 2_000), observation_tokens=50)
    assert 1_900 < len(env.step(search("t"))[0]) <= 2_000
    env.set_text_measure(lambda text: len(text.split()))
    observation = env.step(search("t"))[0]
    assert 40 <= len(observation.split()) <= 50 and observation.endswith("</information>")
    env.set_text_measure(None)
    assert len(env.step(search("t"))[0]) > 1_900


def test_a_preset_gives_way_to_keywords() -> None:
    env = make(preset="search_r1", max_turns=7, observation_chars=70)
    env.reset(seed=0)
    assert env.max_turns == 7 and len(env.step(search("historian"))[0]) <= 70


def test_the_expert_ends_with_any_retriever() -> None:
    env = make(retriever=Shelf())
    env.reset(options={"task": "search/mini/train/00002"})
    turns = 0
    while not env.done:
        (action,) = env.expert_plan()
        *_, info = env.step(env.parser.respond(action))
        turns += 1
    assert turns == 4 and info["won"] and env.expert_plan() == []


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dataset": "minni"}, "Did you mean 'mini'"),
        ({"split": "dev"}, "choose one of 'train', 'valid', 'test'"),
        ({"topk": 0}, "topk=0"),
        ({"topk": -1}, "topk=-1"),
        ({"topk": 10**6}, "topk=1000000"),
        ({"topk": True}, "topk=True"),
        ({"topk": "3"}, "topk='3'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"histroy": 2}, "has no keyword 'histroy'"),
        ({"observation_chars": 20}, "observation_chars=20"),
        ({"preset": "search-r1"}, "preset"),
        ({"outcome": "em"}, "exact_match"),
        ({"panel": 0}, "panel=0"),
        ({"panel": 5}, "leave panel out"),
        ({"retriever": "bm52"}, "Did you mean 'bm25'"),
        ({"retriever": []}, "retriever=\\[\\]"),
        ({"retriever": 3}, "retriever=3"),
        ({"dataset": 3}, "dataset=3"),
        ({"corpus": b"x"}, "corpus=b'x'"),
        ({"index": ["x"]}, "index="),
        ({"retriever": ["ftp://x"]}, "address"),
        ({"retriever": "http://127.0.0.1:9", "corpus": "x.jsonl"}, "corpus is for a retriever named by its kind"),
        ({"corpus": "no/such.jsonl"}, "no/such.jsonl"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_keywords_without_a_valid_value_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(SpearError, match=words) as caught:
        make(**kwargs)
    assert "\n" not in str(caught.value)
