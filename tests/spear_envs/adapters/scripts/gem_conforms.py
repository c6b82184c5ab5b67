"""The episodes of ``episodes.py`` through GEM. Runs in ``.venv-peers``; prints how many steps were compared."""

from __future__ import annotations

import sys

import gem

from spear_envs.adapters import gem as adapter
from spear_envs.adapters.conversation import Conversation
from tests.spear_envs.adapters.episodes import SETTINGS, Script, see

steps = 0
for env_id in SETTINGS:
    script = Script(env_id, int(sys.argv[1]))
    name = f"conforms:{env_id.rpartition('/')[2]}"
    adapter.register(name, env_id, **script.keywords)
    played = gem.make(name)
    beside = Conversation(script.make("tags"))
    with script.break_down():
        for episode, seen in script.play("tags"):
            text, info = played.reset(task=episode.task, seed=episode.seed)
            message = beside.reset(task=episode.task, seed=episode.seed)
            assert text == message.text
            assert see(message.observation, 0.0, False, False, info) == seen[0]
            for response, wanted in zip(script.respond(beside.env, episode), seen[1:], strict=True):
                text, *rest = played.step(response)
                message = beside.respond(response)
                assert text == message.text
                assert see(message.observation, *rest) == wanted
                steps += 1
    played.unwrapped.conversation.env.close()
    beside.env.close()
print(steps)
