from __future__ import annotations

import pickle

import pytest

from spear_envs.core.errors import SpearError, UnknownTaskError, choose_member, suggest_name
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


def test_suggest_name() -> None:
    assert suggest_name("chek", ["check", "train"]) == " Did you mean 'check'?"
    assert suggest_name("zzz", ["check", "train"]) == ""
