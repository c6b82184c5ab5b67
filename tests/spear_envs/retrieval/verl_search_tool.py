"""Runs verl's own search tool against a service; a program, since it needs another verl than the one installed.

PYTHONPATH=<unpacked wheel of verl 0.7.1> python verl_search_tool.py URL_OF_RETRIEVE
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

QUERIES = ["amber fox", "black bear"]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches for passages.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "description": "What is searched."}},
            "required": ["query_list"],
        },
    },
}


async def search(url: str) -> dict[str, Any]:
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.tools.search_tool import SearchTool

    config = {"retrieval_service_url": url, "num_workers": 4, "rate_limit": 4, "timeout": 30, "topk": 3}
    tool = SearchTool(config, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    instance, _ = await tool.create()
    response, _, metrics = await tool.execute(instance, {"query_list": QUERIES})
    await tool.release(instance)
    return {"text": response.text, "metrics": metrics}


def main() -> None:
    import ray

    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
    try:
        sys.stdout.write(json.dumps(asyncio.run(search(sys.argv[1]))) + "\n")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
