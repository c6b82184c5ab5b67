"""A headless Chromium over its debugging pipe, which needs no package and no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Chromium:
    """One page of a browser that reaches this machine only."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1400, 900)) -> None:
        assert PROGRAM is not None
        self._read, write = os.pipe()
        read, self._write = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        command = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", PROGRAM, "--headless", "--no-sandbox"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu", "--hide-scrollbars"]
        command += ["--font-render-hinting=none", "--disable-lcd-text"]  # letters as wide on every machine
        command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--window-size={size[0]},{size[1]}"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([*command, "about:blank"], stdout=quiet, stderr=quiet, pass_fds=(read, write))
        os.close(read)
        os.close(write)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(item["targetId"] for item in targets if item["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(*size)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def open(self, address: str) -> float:
        """Loads a page; seconds until it said that it is ready."""
        self.call("Page.navigate", url="about:blank")
        start = time.perf_counter()
        self.call("Page.navigate", url=address)
        self.wait("document.body && document.body.dataset.ready === 'true'")
        return time.perf_counter() - start

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", result))
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; console: {self.console}"
            time.sleep(0.01)

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type(self, text: str) -> None:
        """Writes into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Changes the size of the page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of what is in sight."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
        if event.get("method") == "Log.entryAdded":
            self.console.append(str(event["params"]["entry"]["text"]))
