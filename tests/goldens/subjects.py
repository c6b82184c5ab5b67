"""The behaviour that is kept, seen from outside: command lines, HTTP and files. No private name is used here.

Each function returns plain data; :mod:`tests.goldens.__main__` writes and compares it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.commands import ROOT, run_command

ENVIRONMENTS = {
    "spear/ALFWorld-v0": ("train", "valid_seen", "valid_unseen"),
    "spear/WebShop-v0": ("train", "eval", "test"),
    "spear/Sokoban-v1": ("train", "valid", "test"),
    "spear/SearchR1-v0": ("train", "valid", "test"),
    "spear/CodeInterpreter-v0": ("train", "valid", "test"),
}
"""Environments and their splits."""
TEMPLATES = {
    "spear/ALFWorld-v0": ("default", "unlisted", "verl_agent", "compact"),
    "spear/WebShop-v0": ("default", "verl_agent", "compact", "tools"),
    "spear/Sokoban-v1": ("default", "verl_agent", "compact"),
    "spear/SearchR1-v0": ("default", "search_r1", "verl_agent", "compact", "tools"),
    "spear/CodeInterpreter-v0": ("default", "budget", "retool", "compact", "tools"),
}
"""Prompt templates of each environment."""
CLUSTERS = ("1gpu", "4x8gpu", "8gpu", "cpu", "cpu_vllm")
ALGORITHMS = tuple(
    f"{base}{tail}"
    for base in ("drbot", "drbot_gigpo", "gigpo", "gigpo_nostd", "grpo", "ppo", "rloo")
    for tail in ("", "_sil", "_spear")
)
TRAINED = (
    *("alfworld", "alfworld_qwen2.5_1.5b", "alfworld_qwen2.5_7b", "alfworld_smollm2", "alfworld_tiny"),
    *("code_smollm2", "code_tiny", "demo", "math", "math_32k", "math_qwen2.5_32b_16k", "math_qwen2.5_32b_32k"),
    *("math_qwen3_32b_16k", "math_qwen3_32b_32k", "search", "search_qwen2.5_14b", "search_qwen2.5_7b"),
    *("search_tiny", "sokoban", "sokoban_qwen2.5_vl_3b", "webshop", "webshop_qwen2.5_1.5b", "webshop_qwen2.5_7b"),
    "webshop_tiny",
)
"""Presets of trainings."""
OFFICIAL = tuple(f"official/{name}" for name in TRAINED if not name.endswith(("_tiny", "smollm2")) and name != "demo")
"""Presets with the values of the authors' code."""
PANELS = ("sokoban", "sokoban-tiny", "alfworld", "webshop", "search", "code")
"""Panels that need no download."""

Values = dict[str, Any]


PACKAGES = os.pathsep.join(str(ROOT / room) for room in (".", "sandbox", "agents", "training"))
"""Path of this checkout's packages, whichever are installed."""


def run(*args: str, folder: Path | None = None) -> str:
    """What ``spear ARGS`` prints, or its error."""
    done = subprocess.run(
        [sys.executable, "-m", "spear_envs.cli", *args],
        capture_output=True,
        text=True,
        cwd=folder or ROOT,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": PACKAGES, "PYTHONWARNINGS": "ignore"},
    )
    return done.stdout if done.returncode == 0 else f"error {done.returncode}: {done.stderr.strip()}"


def list_choices() -> Iterator[tuple[str, ...]]:
    """Every preset by itself, on every cluster, and with every algorithm."""
    for preset in (*TRAINED, *OFFICIAL):
        yield (f"preset={preset}",)
        yield from ((f"preset={preset}", f"cluster={cluster}") for cluster in CLUSTERS)
        yield from ((f"preset={preset}", f"algorithm={algorithm}") for algorithm in ALGORITHMS)
    yield from (("preset=alfworld_qwen2.5_7b", f"model={model}") for model in ("tiny", "tiny_vl", "qwen3_32b"))


def flatten(node: Any, prefix: str = "") -> Values:
    """Every leaf of a tree of mappings by its path."""
    if isinstance(node, dict) and node:
        return {key: value for name in node for key, value in flatten(node[name], f"{prefix}{name}.").items()}
    return {prefix[:-1]: node}


def compose(choices: tuple[str, ...]) -> Values:
    """The configuration of a training, flat and resolved: verl's under its own names, ours under ``spear.``."""
    from click.testing import CliRunner
    from omegaconf import OmegaConf

    from spear_training.cli import train

    printed = CliRunner().invoke(train, [*choices, "--print-verl"])
    if printed.exit_code:
        return {"error": type(printed.exception).__name__}
    config = OmegaConf.create(printed.output)
    values = flatten(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
    return {
        key: value.replace(str(Path.cwd()), "") if isinstance(value, str) else value for key, value in values.items()
    }


def observe_configurations(wanted: Callable[[tuple[str, ...]], bool] = lambda _: True) -> Values:
    """Composed configurations: the demo's whole, and what each other one has otherwise."""
    base = compose(("preset=demo",))
    found: Values = {"preset=demo": base}
    for choices in list_choices():
        if choices != ("preset=demo",) and wanted(choices):
            values = compose(choices)
            changed = {key: values[key] for key in values if key not in base or values[key] != base[key]}
            gone = sorted(key for key in base if key not in values)
            found[" ".join(choices)] = changed | ({"(gone)": gone} if gone else {})
    return found


def observe_tasks() -> Values:
    """Fingerprints of the task sets of every split, and the files of panels."""
    import gymnasium as gym

    found: Values = {}
    for name, splits in ENVIRONMENTS.items():
        for split in splits:
            env = gym.make(f"spear_envs:{name}", split=split)
            found[f"{name} {split}"] = env.unwrapped.tasks.fingerprint  # type: ignore[attr-defined]
            env.close()
    with tempfile.TemporaryDirectory() as folder:
        for panel in PANELS:
            run("panel", "export", panel, "--out", f"{folder}/{panel}.json")
            found[f"panel {panel}"] = json.loads(Path(folder, f"{panel}.json").read_text("utf-8"))
    return found


def observe_transcripts() -> Values:
    """One whole episode of the expert for each environment, template, and layout, and the prompts of each method."""
    found: Values = {}
    forms = [
        *((env, template, "per_turn") for env, names in TEMPLATES.items() for template in names),
        *((env, "default", "conversation") for env in TEMPLATES),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, (env, template, layout) in enumerate(forms):
            out = Path(folder, f"{number}.jsonl")
            options = ("--template", template, "--layout", layout, "--seed", "3", "--thoughts")
            printed = run("collect", env, "--tasks", "1", *options, *find_view(env, template), "--out", str(out))
            lines = out.read_text("utf-8").splitlines() if out.exists() else [json.dumps(printed)]
            found[f"{env} {template} {layout}"] = [json.loads(line) for line in lines]
        for env in ENVIRONMENTS:
            for method in ("plain", "io", "react", "reflexion"):
                found[f"{env} {method}"] = record_prompts(
                    env, method, Path(folder, f"{method}.{env.partition('/')[2]}")
                )
    return found


def find_view(env: str, template: str = "default") -> tuple[str, ...]:
    """Keywords with which the prompts of ``env`` are text alone."""
    if "Sokoban" in env:
        return ("--env", "modality=text")
    return ("--env", "observation_mode=text_rich") if "WebShop" in env and template == "compact" else ()


def record_prompts(env: str, method: str, out: Path) -> list[Any]:
    """The requests that a model server gets in an episode of three turns or, with reflexion, in two of them."""
    asked: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": "<think>I look.</think><action>look</action>"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = ("--engine", "openai", "--base-url", f"http://127.0.0.1:{server.server_port}/v1", "--model", "scripted")
    few = ("--tasks", "1", "--env", "max_turns=3", *(("--trials", "2") if method == "reflexion" else ()))
    try:
        printed = run("eval", env, *address, *few, "--method", method, *find_view(env), "--out", str(out))
    finally:
        server.shutdown()
        server.server_close()
    return asked or [printed]


UNSTEADY = re.compile(
    r'("(?:execution_time|cpu_s|wall_s|queue_s|peak_rss_kb|compile_time|uptime_s|version|pid|created|created_at|completed_at|seconds)":\s*)'
    r'(?:[0-9.e+-]+|"[^"]*")'
)


def show(response: httpx.Response) -> list[Any]:
    """Status, type and body of a reply, without what differs from run to run."""
    text = UNSTEADY.sub(r"\1*", response.text)
    text = re.sub(r'("(?:api_key|id|base_url|call_id)":\s*"?)[^",]+', r"\1*", text)
    kept = ("content-type", "retry-after", "allow", "www-authenticate")
    return [response.status_code, {k: response.headers[k] for k in kept if k in response.headers}, text]


Request = tuple[str, str, Any]
PRINT = {"code": "print(6 * 7)", "language": "python"}
SANDBOX: dict[str, Request] = {
    "ping": ("GET", "/v1/ping", None),
    "run": ("POST", "/run_code", PRINT),
    "stdin": ("POST", "/run_code", {"code": "print(input())", "language": "python", "stdin": "hello"}),
    "raises": ("POST", "/run_code", {"code": "1 / 0", "language": "python"}),
    "late": ("POST", "/run_code", {"code": "while True: pass", "language": "python", "run_timeout": 0.5}),
    "files": (
        "POST",
        "/run_code",
        {"code": "open('b.txt', 'w').write(open('a.txt').read())", "language": "python"}
        | {"files": {"a.txt": "aGV5"}, "fetch_files": ["b.txt", "none.txt"]},
    ),
    "language": ("POST", "/run_code", {"code": "x", "language": "cobol"}),
    "no code": ("POST", "/run_code", {"language": "python"}),
    "type": ("POST", "/run_code", {"code": 7, "language": "python"}),
    "timeout": ("POST", "/run_code", PRINT | {"run_timeout": -1}),
    "list": ("POST", "/run_code", [1]),
    "json": ("POST", "/run_code", b"{"),
    "cells": ("POST", "/run_jupyter", {"cells": ["x = 1", "x + 1"], "kernel": "python3"}),
    "no cells": ("POST", "/run_jupyter", {"cells": 7}),
    "no session": ("POST", "/sessions/nobody/run", {"code": "1"}),
    "path": ("GET", "/nothing", None),
    "method": ("GET", "/run_code", None),
}
RETRIEVER: dict[str, Request] = {
    "health": ("GET", "/health", None),
    "one": ("POST", "/retrieve", {"queries": ["Who built the lighthouse?"], "topk": 2}),
    "scores": ("POST", "/retrieve", {"queries": ["river", "mountain"], "topk": 1, "return_scores": True}),
    "blank": ("POST", "/retrieve", {"queries": [""], "topk": 1}),
    "none": ("POST", "/retrieve", {"queries": [], "topk": 1}),
    "no queries": ("POST", "/retrieve", {"topk": 1}),
    "topk": ("POST", "/retrieve", {"queries": ["a"], "topk": 0}),
    "type": ("POST", "/retrieve", {"queries": "a", "topk": "b"}),
    "list": ("POST", "/retrieve", []),
    "json": ("POST", "/retrieve", b"{"),
    "index": ("POST", "/nobody/retrieve", {"queries": ["a"]}),
    "path": ("GET", "/nothing", None),
    "method": ("GET", "/retrieve", None),
}
SERVED: dict[str, Request] = {
    "health": ("GET", "/health", None),
    "metadata": ("GET", "/metadata", None),
    "schema": ("GET", "/schema", None),
    "state": ("GET", "/state", None),
    "reset": ("POST", "/reset", {"seed": 1, "split": "test", "index": 3}),
    "bad split": ("POST", "/reset", {"split": "none"}),
    "step": ("POST", "/step", {}),
    "mcp": ("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
    "list": ("POST", "/reset", b"[1]"),
    "path": ("GET", "/nothing/at/all", None),
}
HELLO = {"role": "user", "content": "hello"}
GATEWAY: dict[str, Request] = {
    "path": ("GET", "/nothing", None),
    "method": ("GET", "/episodes", None),
    "models": ("GET", "/episodes/{key}/v1/models", None),
    "describe": ("GET", "/episodes/{key}", None),
    "chat": ("POST", "/episodes/{key}/v1/chat/completions", {"model": "policy", "messages": [HELLO]}),
    "message": ("POST", "/episodes/{key}/v1/messages", {"model": "policy", "messages": [HELLO], "max_tokens": 9}),
    "response": ("POST", "/episodes/{key}/v1/responses", {"model": "policy", "input": "hello"}),
    "no messages": ("POST", "/episodes/{key}/v1/chat/completions", {"model": "policy"}),
    "no message": ("POST", "/episodes/{key}/v1/messages", {"model": "policy"}),
    "many": ("POST", "/episodes/{key}/v1/chat/completions", {"model": "policy", "messages": [HELLO], "n": 2}),
    "role": ("POST", "/episodes/{key}/v1/chat/completions", {"model": "policy", "messages": [{"role": "x"}]}),
    "json": ("POST", "/episodes/{key}/v1/chat/completions", b"{"),
    "step": ("POST", "/episodes/{key}/step", {"response": "<think></think><action>up</action>"}),
    "tool": ("POST", "/episodes/{key}/step", {"tool": "fly", "arguments": {}}),
    "neither": ("POST", "/episodes/{key}/step", {}),
    "stranger": ("GET", "/episodes/nobody", None),
}


def ask_all(url: str, requests: dict[str, Request], headers: dict[str, str] | None = None, key: str = "") -> Values:
    """The replies to ``requests``, one after the other."""
    found: Values = {}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        for name, (method, path, body) in requests.items():
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            found[name] = show(client.request(method, path.replace("{key}", key), content=content))
    return found


def observe_services() -> Values:
    """A reply of each route and each refusal of the four services."""
    found: Values = {}
    with run_command("sandbox", "--allow-weak-isolation", "none") as sandbox:
        found["sandbox"] = ask_all(sandbox.url, SANDBOX)
    with run_command("retriever") as retriever:
        found["retriever"] = ask_all(retriever.url, RETRIEVER)
    with run_command("serve", "spear/Sokoban-v1") as served:
        found["serve"] = ask_all(served.url, SERVED)
    with tempfile.TemporaryDirectory() as folder:
        out = ("--out", folder)
        options = ("--engine", "random", "--env", "modality=text", "--tasks", "1", "--template", "compact", *out)
        with run_command("gateway", "spear/Sokoban-v1", *options) as gateway:
            begun = httpx.post(f"{gateway.url}/episodes", json={}, timeout=60)
            key, secret = begun.json()["id"], begun.json()["api_key"]
            found["gateway begin"] = show(begun)
            found["gateway without its key"] = ask_all(gateway.url, {"chat": GATEWAY["chat"]}, key=key)
            found["gateway"] = ask_all(gateway.url, GATEWAY, {"Authorization": f"Bearer {secret}"}, key)
    return found


def observe_files() -> Values:
    """The files of an evaluation: their names, keys and, where nothing in them depends on time, values."""
    found: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "eval")
        options = ("--engine", "expert", "--tasks", "2", "--env", "modality=text", "--episodes-per-task", "2")
        run("eval", "spear/Sokoban-v1", *options, "--out", str(out))
        found["evaluation"] = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
        lines = [json.loads(line) for line in (out / "episodes.jsonl").read_text("utf-8").splitlines()]
        for timed in (part for line in lines for part in (line, *line["turns"])):
            timed.pop("seconds", None)
        found["episodes.jsonl"] = lines
        summary = json.loads((out / "summary.json").read_text("utf-8"))
        found["summary.json"] = {
            key: value
            for key, value in flatten(summary).items()
            if "second" not in key and not key.startswith("versions.")  # those of this machine
        }
    return found


SUBJECTS: dict[str, Callable[[], Values]] = {
    "configurations": observe_configurations,
    "tasks": observe_tasks,
    "transcripts": observe_transcripts,
    "services": observe_services,
    "files": observe_files,
}
