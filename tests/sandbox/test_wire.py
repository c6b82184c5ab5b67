"""Requests and replies as SandboxFusion writes them, and everything that is none."""

import base64
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_sandbox.protocol import FaultKind, Isolation, KillReason, RunStatus, SandboxFault
from spear_sandbox.service.wire import (
    BadReplyError,
    BadRequestError,
    RunRequest,
    read_reply,
    read_request,
    write_error,
    write_reply,
    write_request,
)
from tests.sandbox.service import make_outcome

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=4,
)
FIELDS = ("code", "language", "run_timeout", "compile_timeout", "memory_limit_MB", "stdin", "files", "fetch_files")
LINES = base64.encodebytes(b"q" * 80).decode()
"""Base64 as MIME encoders write it, with line breaks."""
CRLF = LINES.replace("\n", "\r\n")


def read(**fields: Any) -> RunRequest:
    return read_request(json.dumps({"code": "", **fields}).encode())


class TestRequests:
    def test_defaults_are_those_of_sandboxfusion(self) -> None:
        assert read_request(b'{"code": "1"}') == RunRequest("1", "python", 10.0, 10.0, None, None, {}, ())

    def test_all_fields(self) -> None:
        asked = read(
            code="\ud800\0é",
            language="R",
            run_timeout=3,
            compile_timeout=0,
            memory_limit_MB=256.0,
            stdin="a\n",
            files={"a/b.txt": base64.b64encode(b"\0\xff").decode(), "none": None, "lines": LINES, "crlf": CRLF},
            fetch_files=["x", "a/b.txt", "x"],
            of_another_version=[1],
        )
        files = {"a/b.txt": b"\0\xff", "lines": b"q" * 80, "crlf": b"q" * 80}
        assert asked == RunRequest("\ud800\0é", "R", 3.0, 0.0, 256, "a\n", files, ("x", "a/b.txt"))

    @pytest.mark.parametrize(("given", "taken"), [(10**400, 1e9), (1e300, 1e9), (1e-9, 1e-9)])
    def test_odd_but_true_times(self, given: float, taken: float) -> None:
        assert read(run_timeout=given).run_timeout == taken
        assert read(memory_limit_MB=10**400).memory_mb == 10**9

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(
                (name, value)
                for name in ("run_timeout", "compile_timeout")
                for value in (-1, -1e-300, "10", None, True)
            ),
            *((name, float(value)) for name in ("run_timeout", "compile_timeout") for value in ("nan", "inf", "-inf")),
            ("run_timeout", 0),
            *(("memory_limit_MB", value) for value in (0, -2, -(10**400), 1.5, float("nan"), float("inf"), "1", True)),
            ("code", None),
            ("code", 3),
            ("code", ["print()"]),
            ("language", None),
            ("stdin", 4),
            ("files", []),
            ("files", None),
            ("files", {"a": 3}),
            ("files", {"a": "no base64!"}),
            ("files", {"a": "é"}),
            ("files", {"a": "YQ==", "a/b": "YQ=="}),
            ("files", {"main.py/x": "YQ=="}),
            ("files", {str(i): "" for i in range(257)}),
            ("fetch_files", "a"),
            ("fetch_files", [1]),
            ("fetch_files", {"a": 1}),
            ("fetch_files", ["a"] * 257),
        ],
    )
    def test_what_no_field_can_be(self, field: str, value: Any) -> None:
        with pytest.raises(BadRequestError) as caught:
            read(**{field: value})
        sentence = str(caught.value)
        assert sentence.endswith(".") and len(sentence) < 200
        assert field in sentence or field == "files"

    NAMES = ("/etc/passwd", "..", "../x", "a/../../x", "a/..", "", ".", "./", "a/", "a\0b", "a" * 256, "a/" * 600 + "b")

    @pytest.mark.parametrize("name", [*NAMES, "\ud800"])
    def test_names_that_leave_the_folder_or_name_nothing(self, name: str) -> None:
        for fields in ({"files": {name: "YQ=="}}, {"files": {name: None}}, {"fetch_files": [name]}):
            with pytest.raises(BadRequestError, match="name"):
                read(**fields)

    @pytest.mark.parametrize("name", ["a", "./a", "a//b", "..a", "a..", "…/ü", "a b\n", "-rf", "~"])
    def test_names_that_stay(self, name: str) -> None:
        assert read(files={name: "YQ=="}, fetch_files=[name]).files == {name: b"a"}

    @pytest.mark.parametrize(
        "body",
        [b"", b"null", b"[]", b'{"language": "python"}', b'{"code": "\xff"}', b"[" * 100_000,
         b'{"code": ' + b"9" * 5000 + b"}", b'{"code": "a"} {"code": "b"}'],
    )  # fmt: skip
    def test_bodies_that_are_none(self, body: bytes) -> None:
        with pytest.raises(BadRequestError) as caught:
            read_request(body)
        assert str(caught.value).endswith(".")

    @given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.text())
    def test_any_json_is_read_or_refused(self, content: dict[str, Any], code: str) -> None:
        for body in (content, {**content, "code": code}):
            try:
                asked = read_request(json.dumps(body).encode())
            except BadRequestError as error:
                assert str(error)
            else:
                assert asked.run_timeout > 0 and asked.compile_timeout >= 0

    @given(
        code=st.text(st.characters(exclude_categories=())),
        stdin=st.none() | st.text(),
        files=st.dictionaries(st.text("abc.ü", min_size=1).filter(lambda name: name.strip(".")), st.binary()),
        run_timeout=st.floats(1e-6, 1e6),
        memory_mb=st.none() | st.integers(1, 10**6),
    )
    def test_what_our_client_writes_our_server_reads(self, **fields: Any) -> None:
        asked = RunRequest(fetch_files=tuple(fields["files"]), **fields)
        assert read_request(write_request(asked)) == asked


class TestReplies:
    @pytest.mark.parametrize(
        ("fields", "status", "code"),
        [
            ({}, "Success", 0),
            ({"return_code": 1}, "Failed", 1),
            ({"return_code": -11}, "Failed", -11),
            ({"return_code": -9, "reason": "memory_limit"}, "Failed", -9),
            ({"status": "TimeLimitExceeded", "return_code": None, "reason": "timeout"}, "Failed", None),
        ],
    )
    def test_how_a_run_ended(self, fields: dict[str, Any], status: str, code: int | None) -> None:
        outcome = make_outcome(stdout="x", stdout_bytes=1, **fields)
        body = b"".join(write_reply(outcome, 0.0))
        reply = json.loads(body)
        assert (reply["status"], reply["run_result"]["return_code"], reply["message"]) == (status, code, "")
        assert read_reply(body) == outcome

    def test_a_fault_is_a_fault_at_the_other_end(self) -> None:
        body = b"".join(write_error("half \ud800 a reason", Isolation.BWRAP))
        assert json.loads(body)["run_result"]["status"] == "Error"
        with pytest.raises(SandboxFault, match="a reason") as caught:
            read_reply(body)
        assert caught.value.kind is FaultKind.UNAVAILABLE

    def test_a_real_sandboxfusion_says_less(self) -> None:
        """As its ``RunCodeResponse`` is: no block of ours, times and codes that may be null."""
        run = {"status": "Finished", "execution_time": 0.016, "return_code": 0, "stdout": "2é\n", "stderr": ""}
        reply = {"status": "Success", "message": "", "compile_result": None, "run_result": run}
        outcome = read_reply(json.dumps({**reply, "executor_pod_name": None, "files": {"a": "YQ=="}}).encode())
        assert (outcome.stdout, outcome.stdout_bytes, outcome.files, outcome.level) == ("2é\n", 4, {"a": b"a"}, None)
        late = {
            "status": "TimeLimitExceeded",
            "execution_time": None,
            "return_code": None,
            "stdout": None,
            "stderr": None,
        }
        outcome = read_reply(json.dumps({**reply, "status": "Failed", "run_result": late}).encode())
        assert (outcome.status, outcome.reason, outcome.stdout) == (RunStatus.TIME_LIMIT, KillReason.TIMEOUT, "")
        error = {**late, "status": "Error", "stderr": "Traceback"}
        for body in ({**reply, "status": "SandboxError", "message": "m"}, {**reply, "run_result": error}):
            with pytest.raises(SandboxFault):
                read_reply(json.dumps(body).encode())

    @pytest.mark.parametrize(
        "change",
        [
            {"status": "Fine"},
            {"run_result": None},
            {"run_result": {"status": "Finished", "return_code": None}},
            {"run_result": {"status": "Finished", "return_code": True}},
            {"run_result": {"status": "Odd", "return_code": 0}},
            {"run_result": {"status": "Finished", "return_code": 0, "stdout": 3}},
            {"sandbox": {"level": "magic"}},
            {"sandbox": {"cpu_s": "much"}},
            {"sandbox": {"cpu_s": 10**400}},
            {"sandbox": {"peak_rss_kb": math.inf}},
            {"sandbox": 3},
            {"files": {"a": "?"}},
            {"files": {"a": 3}},
            {"files": [1]},
        ],
    )
    def test_answers_that_are_none(self, change: dict[str, Any]) -> None:
        reply = json.loads(b"".join(write_reply(make_outcome(), 0.0)))
        with pytest.raises(BadReplyError):
            read_reply(json.dumps({**reply, **change}).encode())

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"[" * 100_000])
    def test_bodies_that_are_none(self, body: bytes) -> None:
        with pytest.raises(BadReplyError):
            read_reply(body)

    @given(JSON, JSON, JSON)
    def test_any_answer_is_read_or_refused(self, run: Any, block: Any, files: Any) -> None:
        for status in ("Success", "Failed", "SandboxError"):
            body = json.dumps({"status": status, "run_result": run, "sandbox": block, "files": files})
            with pytest.raises((BadReplyError, SandboxFault)):
                read_reply(body.encode())
