"""Our own loop as an agent program: observations go to the model, responses to the environment."""

from __future__ import annotations

from spear_agents.gateway.programs import AgentTask


async def play(task: AgentTask) -> None:
    """Play an episode as one conversation; ``spear eval --agent spear_agents.gateway.loop:play``."""
    import httpx

    messages = [{"role": "system", "content": task.system}] if task.system else []
    messages.append({"role": "user", "content": task.prompt})
    headers = {"Authorization": f"Bearer {task.api_key}"}
    # The address is plain HTTP: reading the system's certificates would take longer than a call.
    async with httpx.AsyncClient(base_url=task.base_url, headers=headers, timeout=None, verify=False) as client:
        while not task.done:
            goes_on = messages[-1]["role"] == "assistant"
            body = {"model": task.model, "messages": messages, "continue_final_message": goes_on}
            reply = await client.post("/chat/completions", json=body | {"stop": list(task.stop_strings)})
            if reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded":
                return
            reply.raise_for_status()
            (choice,) = reply.json()["choices"]
            response = choice["message"]["content"]
            shown = await task.step(response)
            text = messages.pop()["content"] + response if goes_on else response
            if choice["stop_reason"] is None:
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
            else:
                messages += [{"role": "assistant", "content": text + shown}]
