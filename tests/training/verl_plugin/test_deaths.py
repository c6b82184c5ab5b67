from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from spear_training.verl_plugin.rollout_servers import explain_death

DIED = ActorDiedError()


@pytest.mark.parametrize(
    ("error", "who"),
    [
        (DIED, "worker process"),
        (WorkerCrashedError(), "worker process"),
        (OutOfMemoryError("too much"), "too much memory"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"), "the trainer"),
        (RayTaskError("play", "trace", DIED), "worker process"),
        (RayTaskError("train", "trace", RuntimeError("Connection reset by peer")), "the trainer"),
    ],
)
def test_a_death_is_one_line_that_says_how_to_go_on(error: Exception, who: str) -> None:
    text = explain_death(error)
    assert text is not None and who in text and "\n" not in text
    assert "the same command resumes it" in text


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), RayTaskError("f", "t", ValueError("no")), KeyError()]
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert explain_death(error) is None
