"""An environment played by a person in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spear_agents.replay.play import Game
from spear_envs.core.errors import SpearError
from spear_envs.sokoban.env import SokobanEnv
from spear_envs.sokoban.terminal import paint_board
from spear_sandbox.foreign import show_text

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
    """Completions of a line: the options that start with it, else those that contain it."""
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
        say(_bold(show_text(game.hint() or ("The episode is over." if game.done else "Nothing wins any more."))))
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
    """A line, or all lines of a fenced block of code."""
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
