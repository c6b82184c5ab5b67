"""``python -m benchmarks.peers``: set up servers of other projects for the benchmarks."""

from __future__ import annotations

import shutil
import subprocess
import venv

import click

from benchmarks.peers import PEERS
from spear_envs.core import SpearError
from spear_sandbox.console import echo, run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def peers() -> None:
    """Set up servers of other projects for the benchmarks."""


@peers.command("list")
def list_peers() -> None:
    """List the peers, and which are set up."""
    for peer in PEERS.values():
        echo(f"{peer.name:15} {'ready' if peer.is_here else 'not set up':11} {peer.repository} {peer.commit[:7]}")


@peers.command()
@click.argument("name", type=click.Choice(list(PEERS)))
@click.option("--source", help="Folder or address of its repository; default: the public one.")
def get(name: str, source: str | None) -> None:
    """Fetch a peer's repository, and make its environment.

    \b
      python -m benchmarks.peers get sandbox-fusion
    """
    peer = PEERS[name]
    for program in ("git", *peer.needs):
        if shutil.which(program) is None:
            raise SpearError(f"{name} needs the program '{program}', which is not on the path.")
    shutil.rmtree(peer.folder, ignore_errors=True)
    peer.folder.mkdir(parents=True)
    echo(f"{name}: repository")
    _run("git", "clone", "-q", source or peer.repository, str(peer.sources))
    _run("git", "-C", str(peer.sources), "checkout", "-q", peer.commit)
    echo(f"{name}: environment, some minutes")
    venv.create(peer.folder / "venv", with_pip=True)
    for options, packages in (((), peer.packages), (("--no-deps",), peer.alone)):
        if packages:
            _run(str(peer.python), "-m", "pip", "install", "-q", *options, *packages)
    for folder in peer.folders:
        (peer.folder / folder).mkdir(parents=True, exist_ok=True)
    (peer.folder / "ready").touch()
    echo(f"{name}: {peer.folder}")


def _run(*command: str) -> None:
    if subprocess.run(command, check=False).returncode:
        raise SpearError(f"'{' '.join(command)[:200]}' failed.")


if __name__ == "__main__":
    run_command(peers, "python -m benchmarks.peers", explain=lambda error: f"{error.name} is not installed: make setup")
