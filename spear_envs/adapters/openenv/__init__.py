"""``spear serve``: an environment served by OpenEnv's protocol, with a session for each WebSocket."""
