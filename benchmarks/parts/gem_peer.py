"""GEM's side of ``sokoban.py`` and ``sandbox.py``: run by the Python of ``.venv-peers``; it imports nothing of ours.

``sokoban STEPS`` prints steps a CPU second and milliseconds of a reset as JSON. ``python`` runs the programs that it
reads, a JSON string a line, with GEM's tool and prints what the tool shows as a JSON string.
"""

import json
import random
import sys
import time


def play_sokoban(steps: int) -> dict[str, float]:
    """Random moves in rooms of 6 x 6 with one box, 15 turns; what our environment's default is."""
    from gem.envs.game_env.sokoban.sokoban import SokobanEnv

    chance = random.Random(0)
    env = SokobanEnv(dim_room=(6, 6), num_boxes=1, max_turns=15)
    moves = [f"\\boxed{{{chance.choice(('up', 'down', 'left', 'right'))}}}" for _ in range(steps)]
    spent = 0.0
    resets: list[float] = []
    done = True
    for move in moves:
        if done:
            start = time.process_time()
            env.reset(seed=len(resets))
            resets.append(time.process_time() - start)
        start = time.process_time()
        _, _, terminated, truncated, _ = env.step(move)
        spent += time.process_time() - start
        done = terminated or truncated
    return {"steps_per_second": steps / spent, "reset_ms": 1e3 * sum(resets) / len(resets), "episodes": len(resets)}


def serve_python() -> None:
    """One program after the other, unisolated: the tool's default."""
    from gem.tools.python_code_tool import PythonCodeTool

    tool = PythonCodeTool(timeout=60)
    for line in sys.stdin:
        code = json.loads(line)
        _, _, shown, _ = tool.execute_action(f"<python>{code}</python>")
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "sokoban":
        sys.stdout.write(json.dumps(play_sokoban(int(sys.argv[2]))) + "\n")
    else:
        serve_python()
