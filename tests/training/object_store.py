"""An S3 server on this machine, over HTTP and with signatures, whose buckets are folders."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "checkpoints"


@contextmanager
def serve_s3(folder: Path, port: int | None = None) -> Iterator[dict[str, str]]:
    """A server of the buckets in ``folder``; yields the environment variables of its clients."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    keys = {"NANIO_ACCESS_KEY": "tester", "NANIO_SECRET_KEY": "a-secret-of-a-test"}
    command = [sys.executable, "-m", "nanio", "serve", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, "--data-dir", str(folder), "--log-level", "error"], env={**os.environ, **keys})
    try:
        for _ in range(200):
            assert server.poll() is None, "the S3 server ended"
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": keys["NANIO_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": keys["NANIO_SECRET_KEY"],
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()
