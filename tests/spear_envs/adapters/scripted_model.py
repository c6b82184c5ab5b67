"""A model server of OpenAI's form that says what it is told to; standard library only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedModel:
    """Says ``responses`` one after the other, then refuses; keeps the last message of each request in ``shown``.

    With ``splits`` it puts thoughts into ``reasoning_content``, as servers with a reasoning parser do.
    """

    def __init__(self) -> None:
        self.responses: list[str] = []
        self.shown: list[str] = []
        self.url = ""
        self.splits = False

    def begin(self, responses: list[str]) -> None:
        self.responses, self.shown = list(responses), []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        messages = body.get("messages") or body["input"]
        content = messages[-1]["content"]
        self.shown.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
        if not self.responses:
            lines = {"message": "this is longer than the context", "code": "context_length_exceeded", "type": "x"}
            return 400, {"error": lines}
        text = self.responses.pop(0)
        if path.endswith("/responses"):
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
            rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
            return 200, {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": [item], **rest}
        message = {"role": "assistant", "content": text}
        if self.splits and "</think>" in text:
            thought, _, rest = text.partition("</think>")
            message |= {"reasoning_content": thought.removeprefix("<think>"), "content": rest}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
        return 200, {**about, "choices": [choice], "usage": usage}


def write_stream(answer: dict[str, Any]) -> str:
    """A chat completion as one event."""
    choices = [choice | {"delta": choice.pop("message")} for choice in answer["choices"]]
    event = answer | {"object": "chat.completion.chunk", "choices": choices}
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"


@contextmanager
def run_model() -> Iterator[ScriptedModel]:
    """Serve one on a free port of this machine."""
    model = ScriptedModel()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = model.answer(self.path, body)
            streams = status == 200 and body.get("stream")
            data = (write_stream(answer) if streams else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    model.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
