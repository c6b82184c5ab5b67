"""Search-R1's retrieval server on this machine's CPU; run by its own interpreter: SOURCES PORT ARGUMENT...

It listens on all addresses at port 8000, moves everything to a GPU and computes in float16. Here it listens on
127.0.0.1, its ``.cuda()`` calls do nothing, and it computes in float32, which a CPU does faster.
"""

import runpy
import sys
from pathlib import Path

import torch
import uvicorn

SOURCES, PORT, *ARGUMENTS = sys.argv[1:]
serve = uvicorn.run
uvicorn.run = lambda app, **_: serve(app, host="127.0.0.1", port=int(PORT), log_level="warning")
torch.Tensor.cuda = torch.nn.Module.cuda = torch.nn.Module.half = lambda self, *_, **__: self
script = Path(SOURCES, "search_r1", "search", "retrieval_server.py")
sys.argv = [str(script), *ARGUMENTS]
runpy.run_path(str(script), run_name="__main__")
