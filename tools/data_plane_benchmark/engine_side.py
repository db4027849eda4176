"""The engine's side of the benchmark: a process that answers ``/generate`` as SGLang does."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from data_plane_benchmark.synthetic import POOL, Response, Size
from megatron_dppo.engine.server.recordings import RecordingStore, recordings_folders


def base64_of(array: Any) -> str:
    """Encode an array as SGLang's detokenizer encodes a tensor."""
    return base64.b64encode(array.tobytes()).decode()


class EngineSide:
    """Answers with the responses of a pool."""

    def __init__(self, size: Size, store: RecordingStore) -> None:
        self._store = store
        self._pool = [Response.draw(size, i) for i in range(POOL)]
        self._metas = [response.plain_meta for response in self._pool]
        self.seconds = 0.0
        self.tokens = 0
        self.bytes = 0

    def answer(self, index: int) -> bytes:
        """Return the body of one answer. The body is encoded for every request, as in a server."""
        began = time.process_time()
        response = self._pool[index % POOL]
        meta = {
            **self._metas[index % POOL],
            "output_top_logprobs_idx_flat_b64": base64_of(response.topk_ids),
            "output_top_logprobs_val_flat_b64": base64_of(response.topk_log_probs),
            "routed_experts": self._routing(response),
        }
        text = "42 " * len(response.ids)
        body = orjson.dumps({"text": text, "output_ids": response.ids.tolist(), "meta_info": meta})
        self.seconds += time.process_time() - began
        self.tokens += len(response.ids)
        self.bytes += len(body)
        return body

    def _routing(self, response: Response) -> str:
        """Store the routing, and return the notice that our changes to the server put into the answer."""
        notice = self._store.put(response.routed)
        self.bytes += notice.size
        return base64.b64encode(notice.encode()).decode()

    async def generate(self, request: web.Request) -> web.Response:
        """POST /generate."""
        index = (await request.json())["input_ids"][0]
        return web.Response(body=self.answer(index), content_type="application/json")

    async def health(self, request: web.Request) -> web.Response:
        """GET /health_generate."""
        return web.Response()

    async def figures(self, request: web.Request) -> web.Response:
        """GET /figures: processor seconds, tokens and bytes of all answers."""
        totals = {"seconds": self.seconds, "tokens": self.tokens, "bytes": self.bytes}
        return web.json_response(totals)


async def serve(size: Size, folders: list[Path]) -> None:
    """Serve until standard input ends."""
    side = EngineSide(size, RecordingStore(folders))
    app = web.Application()
    app.router.add_post("/generate", side.generate)
    app.router.add_get("/health_generate", side.health)
    app.router.add_get("/figures", side.figures)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with recordings_folders() as folders:
        asyncio.run(serve(Size(**json.loads(sys.argv[1])), folders))
