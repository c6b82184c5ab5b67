"""An environment played by a person, with undo and hints, recorded like any other episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spear_agents.engines.base import ByteTokenizer, Sampling
from spear_agents.engines.openai import encode_picture
from spear_agents.engines.scripted import ScriptedEngine
from spear_agents.evaluation.records import EPISODES, open_log
from spear_agents.evaluation.run import choose_template
from spear_agents.play.episode import play_episode
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Layout
from spear_agents.viewer.episodes import describe_response, finite
from spear_envs.core.env import SpearEnv, image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.making import find_splits, make_env
from spear_envs.sokoban.engine import paint_board
from spear_envs.sokoban.env import SokobanEnv
from spear_sandbox.errors import show_text

HISTORY = 2


@dataclass(frozen=True)
class Move:
    """One response of the person, its outcome, and the state and the reward before."""

    response: str
    shown: Mapping[str, Any]
    state: Mapping[str, Any]
    reward: float


class Game:
    """Plays one environment, task after task, recorded in ``out / "episodes.jsonl"``.

    Records are made by :func:`spear_agents.play.episode.play_episode`, which plays the final responses again, without
    those taken back. Only finished episodes are recorded; later games of the same settings are added. ``template``
    writes the responses around actions. ``task`` is the first one, by default the first of the split, and that the last
    of the environment's.

    Raises SpearError for an environment, split, template or task that does not exist, a folder of other games, or one
    in use by another process.
    """

    def __init__(
        self,
        env_id: str,
        out: str | Path,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        split: str | None = None,
        template: str = "default",
        task: str | None = None,
        seed: int = 0,
    ) -> None:
        self.env_id = env_id
        self.out = Path(out)
        self.seed = seed
        self._kwargs = dict(env_kwargs or {})
        self._split = split or find_splits(env_id)[-1]
        self.recorded = 0
        with ExitStack() as stack:  # closes what was opened if anything fails
            self._env = stack.enter_context(closing(make_env(env_id, self._split, self._kwargs)))
            self.core = cast(SpearEnv[Any], self._env.unwrapped)
            self._template = choose_template(self._env, template)
            wanted = {
                "env_id": env_id,
                "engine": "person",
                "env_kwargs": self._kwargs,
                "split": self._split,
                "template": template,
                "layout": Layout.PER_TURN.value,
                "history": HISTORY,
                "fingerprint": self.core.tasks.fingerprint,
            }
            self._prompts = PromptBuilder(ByteTokenizer(), self._template, Layout.PER_TURN, HISTORY)
            identity = json.loads(json.dumps(wanted))
            opened = open_log(self.out / EPISODES, env_id, self.core.tasks.fingerprint, identity=identity)
            self._log = stack.enter_context(opened)
            self.start(self.core.tasks[0].id if task is None else task)
            self._open = stack.pop_all()

    def close(self) -> None:
        """End the game; an unfinished episode is dropped."""
        self._open.close()

    # ---------------------------------------------------------------- moves

    def start(self, task_id: str) -> None:
        """Begin the episode of a task. Raises UnknownTaskError or EnvFault."""
        self.observation, self.info = self._env.reset(seed=self.seed, options={"task": task_id})
        self.moves: list[Move] = []
        self.done = False
        self.reward = 0.0

    def start_next(self) -> None:
        """Begin the next task."""
        tasks = self.core.tasks
        self.start(tasks[(tasks.index_of(self.info["task_id"]) + 1) % len(tasks)].id)

    def restart(self) -> None:
        """Begin the present task again."""
        self.start(self.info["task_id"])

    def act(self, action: str, thought: str = "") -> None:
        """Play an action in plain form; record the episode if this ends it. Raises SpearError if it had ended."""
        if self.done:
            raise SpearError("the episode has ended: begin another")
        response = self._template.respond(action, thought)
        state, before, shown, paid = self.core.get_state(), self.info, self.observation, self.reward
        self.observation, reward, terminated, truncated, self.info = self._env.step(response)
        self.reward += float(reward)
        self.done = terminated or truncated
        info = self.info
        turn = {
            **_show(shown),
            **describe_response(response),
            "action": info["action"],
            "format_ok": info["format_ok"],
            "action_ok": info["action_ok"],
            "anchor": str(before["anchor"]),
            "reward": finite(info["reward_terms"]["native_return"] - before["reward_terms"]["native_return"]),
            "finish": "stop",
        }
        self.moves.append(Move(response, turn, state, paid))
        if self.done and info["fault"] is None:
            self._record()

    def undo(self) -> None:
        """Undo the last response. Raises SpearError if there is none or the episode is recorded."""
        if self.done or not self.moves:
            raise SpearError("the episode has ended and is recorded" if self.done else "there is nothing to take back")
        move = self.moves.pop()
        self.observation, self.info = self.core.set_state(move.state)
        self.reward = move.reward

    def hint(self) -> str | None:
        """Return the expert's action in the present state; None if it has no plan."""
        plan = [] if self.done else self.core.expert_plan()
        return plan[0] if plan else None

    @property
    def actions(self) -> list[str]:
        """Admissible actions; empty if the environment does not list them."""
        return [] if self.done else list(self.info["admissible_actions"] or [])

    @property
    def text(self) -> str:
        """The text of the present observation."""
        return text_of(self.observation)

    def describe(self) -> dict[str, Any]:
        """Return the game for the page."""
        info = self.info
        return {
            "env": self.env_id,
            "task": info["task_id"],
            "subtask": info["subtask"],
            "instruction": info["instruction"],
            "turn": info["turn"],
            "max_turns": self.core.max_turns,
            **_show(self.observation),
            "actions": self.actions,
            "done": self.done,
            "won": info["won"],
            "fault": info["fault"],
            "score": finite(info["score"]),
            "reward": finite(self.reward),
            "reward_terms": {name: finite(value) for name, value in info["reward_terms"].items()},
            "turns": [move.shown for move in self.moves],
            "recorded": self.recorded,
        }

    # ---------------------------------------------------------------- records

    def _record(self) -> None:
        responses = iter([move.response for move in self.moves])
        with closing(make_env(self.env_id, self._split, self._kwargs)) as env:
            played = play_episode(
                env,
                ScriptedEngine(lambda prompt, dice: next(responses, "")),
                self._prompts,
                task_id=self.info["task_id"],
                sampling=Sampling(),
                seed=self.seed,
                env_id=self.env_id,
            )
            trajectory = asyncio.run(played)
        if (trajectory.won, len(trajectory.turns)) != (self.info["won"], len(self.moves)):
            raise SpearError("the episode went differently when played again for the record: it is not recorded")
        self._log.write(trajectory)
        self.recorded += 1


class Stage:
    """A game on its own thread, for a server with many threads."""

    def __init__(self, open_game: Callable[[], Game]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        try:
            self._game = self._thread.submit(open_game).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise

    def perform(self, verb: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the page asks for; return the game after it. Raises LookupError for unknown verbs, or SpearError."""

        def act() -> dict[str, Any]:
            game = self._game
            hint: str | None = None
            if verb == "act":
                game.act(_read_text(content, "action"), _read_text(content, "thought"))
            elif verb == "hint":
                hint = game.hint() or ""
            elif verb != "look":  # an unknown one is a LookupError
                {"undo": game.undo, "restart": game.restart, "next": game.start_next}[verb]()
            return {**game.describe(), "hint": hint}

        return self._thread.submit(act).result()

    def close(self) -> None:
        """End the game."""
        self._thread.submit(self._game.close).result()
        self._thread.shutdown()


def _read_text(content: Mapping[str, Any], key: str) -> str:
    text = content.get(key, "")
    if not isinstance(text, str):
        raise SpearError(f"{key} must be text")
    return text


def _show(observation: Any) -> dict[str, Any]:
    picture = image_of(observation)
    return {"observation": text_of(observation), "image": None if picture is None else encode_picture(picture)}


COMMANDS = {
    "/hint": "what the expert would do",
    "/undo": "take the last action back",
    "/actions": "all actions that may be played",
    "/restart": "begin this task again",
    "/next": "continue with the next task",
    "/quit": "stop; an unfinished episode is not recorded",
    "/help": "this list",
}
_FENCE = "```"

Say = Callable[[str], None]
Ask = Callable[[str], str]


def play_in_terminal(game: Game, say: Say, ask: Ask) -> None:
    """Play until the person quits or the input ends.

    ``say`` shows a text with its colours and a line break; ``ask`` shows a prompt and returns a line, or raises
    EOFError at the end.
    """
    say(f"{show_text(game.env_id)}: type an action (Tab completes), or a command: {', '.join(COMMANDS)}")
    _show_task(game, say)
    while True:
        try:
            line = _read_action(ask)
        except EOFError:
            return
        if line == "/quit":
            return
        try:
            _obey(game, line, say)
        except SpearError as error:
            say(_bold(show_text(str(error))))


def complete(options: Sequence[str], text: str) -> list[str]:
    """Return the completions of a line: the options that start with it, else those that contain it."""
    lowered = text.lower()
    return [x for x in options if x.lower().startswith(lowered)] or [x for x in options if lowered in x.lower()]


def use_readline(game: Game) -> bool:
    """Let Tab complete actions; False where Python was built without readline."""
    try:
        import readline
    except ImportError:
        return False
    found: list[str] = []

    def propose(text: str, number: int) -> str | None:
        nonlocal found
        if number == 0:
            found = complete([*game.actions, *COMMANDS], text)
        return found[number] if number < len(found) else None

    readline.set_completer_delims("")  # actions contain blanks: complete the full line
    readline.set_completer(propose)
    # macOS's Python may use libedit, which has another syntax.
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    return True


def _obey(game: Game, line: str, say: Say) -> None:
    if line == "/hint":
        say(_bold(show_text(game.hint() or ("The episode is over." if game.done else "The expert has no plan."))))
    elif line == "/actions":
        say("\n".join(show_text(action) for action in game.actions) or "This environment does not list them.")
    elif line == "/help":
        say("\n".join(f"{name:10} {what}" for name, what in COMMANDS.items()))
    elif line in ("/restart", "/next"):
        (game.restart if line == "/restart" else game.start_next)()
        _show_task(game, say)
    elif line == "/undo":
        game.undo()
        _show_state(game, say)
    elif line.startswith("/"):
        say(f"There is no command {line}: {', '.join(COMMANDS)}")
    elif f"/{line}" in COMMANDS and line not in game.actions:
        say(f"Commands begin with a slash: /{line}")
    elif line:
        game.act(_expand(game, line))
        _show_state(game, say)


def _expand(game: Game, line: str) -> str:
    """Expand a line to the only admissible action that starts with it; ``l`` to ``left``."""
    if line in game.actions:
        return line
    meant = [action for action in game.actions if action.startswith(line)]
    return meant[0] if len(meant) == 1 else line


def _read_action(ask: Ask) -> str:
    """Return a line, or all lines of a fenced block of code."""
    line = ask("> ")
    if not line.lstrip().startswith(_FENCE):
        return line.strip()
    lines = [line]
    while not (len(lines) > 1 and lines[-1].strip() == _FENCE):
        lines.append(ask(". "))
    return "\n".join(lines)


def _show_task(game: Game, say: Say) -> None:
    task, subtask, text = (show_text(game.info[name]) for name in ("task_id", "subtask", "instruction"))
    say(f"\n{_bold(task)}  ({subtask})\n{text}")
    _show_state(game, say)


def _show_state(game: Game, say: Say) -> None:
    info = game.info
    if isinstance(game.core, SokobanEnv):
        message = game.text.partition("\n\n")[2]
        say(f"\n{paint_board(game.core.board.text())}\n{show_text(message)}".rstrip("\n"))
    else:
        say("\n" + show_text(game.text))
    if not game.done:
        say(f"(turn {info['turn'] + 1} of {game.core.max_turns})")
        return
    terms = ", ".join(f"{show_text(name)} {value:g}" for name, value in info["reward_terms"].items())
    verdict = "won" if info["won"] else f"fault: {info['fault']}" if info["fault"] else "not won"
    say(_bold(f"The end: {verdict}. Score {info['score']:g}, reward {game.reward:g} ({terms})."))
    say("Not recorded. /restart, /next or /quit" if info["fault"] else "Recorded. /next, /restart or /quit")


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"
