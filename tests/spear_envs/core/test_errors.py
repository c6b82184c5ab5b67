from __future__ import annotations

import pickle
import re

import pytest

from spear_envs.core.errors import SpearError, UnknownTaskError, choose_member, require_whole
from spear_envs.core.faults import EnvFault
from spear_envs.core.parsing import ResponseFormat


def test_unknown_task_reads_as_a_sentence() -> None:
    error = UnknownTaskError("Unknown task 'a': the ids …")
    assert str(error) == "Unknown task 'a': the ids …"
    assert isinstance(error, SpearError) and isinstance(error, KeyError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(UnknownTaskError()) == ""


def test_faults_have_a_kind_and_survive_pickling() -> None:
    fault = pickle.loads(pickle.dumps(EnvFault("retriever_timeout", "no answer in 30 s")))
    assert (fault.kind, fault.message) == ("retriever_timeout", "no answer in 30 s")
    assert str(fault) == "retriever_timeout: no answer in 30 s"
    assert str(EnvFault("down")) == "down"


def test_choose_member() -> None:
    assert choose_member(ResponseFormat, "plain", "response_format") is ResponseFormat.PLAIN
    assert choose_member(ResponseFormat, ResponseFormat.TAGS, "response_format") is ResponseFormat.TAGS
    with pytest.raises(SpearError, match="response_format='xml' is not valid: choose one of 'tags', 'plain'"):
        choose_member(ResponseFormat, "xml", "response_format")


@pytest.mark.parametrize(
    ("value", "most", "limits"),
    [
        (1, None, "of at least 2"),
        (True, None, "of at least 2"),
        (2.0, None, "of at least 2"),
        ("2", None, "of at least 2"),
        (1, 1_000, "from 2 to 1,000"),
        (1_001, 1_000, "from 2 to 1,000"),
    ],
)
def test_what_is_no_whole_number_within_its_limits_is_refused(value: object, most: int | None, limits: str) -> None:
    said = f"topk={value!r} is not valid: give a whole number {limits}."
    with pytest.raises(SpearError, match=f"^{re.escape(said)}$"):
        require_whole("topk", value, 2, most)
