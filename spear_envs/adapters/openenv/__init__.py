"""An environment behind OpenEnv's protocol: one WebSocket, one session. ``spear serve`` runs it."""
