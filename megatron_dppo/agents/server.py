"""The HTTP server of an agent's session. It answers OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from megatron_dppo.agents.conversation import MODEL, Conversation, RefusedCallError
from megatron_dppo.system.network import url_host

_MAX_BODY_BYTES = 1 << 20
_KEEP_ALIVE_S = 15.0
"""Seconds between two comments on a stream that has no answer yet."""


async def serve(conversation: Conversation, key: str, host: str) -> tuple[web.AppRunner, str]:
    """Start the session's server on a free port of ``host``. Return the server and the base URL of its API.

    Clients must send ``key``.
    """

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        refusal: RefusedCallError
        try:
            authorization = request.headers.get("Authorization", "")
            sent_bytes = authorization.encode(errors="surrogateescape")
            if not hmac.compare_digest(sent_bytes, f"Bearer {key}".encode()):
                raise RefusedCallError(401, "the key is not this session's")
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = RefusedCallError(
                413, f"the body has more than the {_MAX_BODY_BYTES} bytes that a call may have"
            )
        except RefusedCallError as error:
            refusal = error
        conversation.refusal = str(refusal)
        answer = {"message": str(refusal), "type": "invalid_request_error", "code": None}
        # Without this header, OpenAI's clients repeat a call that ended with 409.
        headers = {"x-should-retry": "false"}
        return web.json_response({"error": answer}, status=refusal.status, headers=headers)

    async def models(_: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model]})

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        # An unknown charset is a LookupError; deeply nested brackets are a RecursionError.
        except (ValueError, LookupError, RecursionError) as error:
            raise RefusedCallError(400, f"the body is no JSON: {error}") from error
        with conversation.completion_of(body) as completion:
            if body.get("stream"):
                return await _stream(request, body, completion)
            # If the client disconnects, this handler is cancelled. The shield keeps the future: if the client sends the
            # call again, the answer is still this turn.
            return web.json_response(await asyncio.shield(completion))

    app = web.Application(middlewares=[check], client_max_size=_MAX_BODY_BYTES)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    return runner, f"http://{url_host(host)}:{runner.addresses[0][1]}/v1"


async def _stream(
    request: web.Request, body: Mapping[str, Any], completion: asyncio.Future[dict[str, Any]]
) -> web.StreamResponse:
    """Send the answer as server-sent events.

    Comments keep the connection alive until the turn is sampled. The turn then follows in one chunk, because its tool
    calls are known only at its end.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while not completion.done():
        await response.write(b": the policy's turn is under way\n\n")
        await asyncio.wait([completion], timeout=_KEEP_ALIVE_S)
    answer = completion.result()
    (choice,) = answer["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        # In a stream, each tool call has a field ``index``: its position among the message's calls.
        message["tool_calls"] = [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]
    message_choice = {"index": 0, "delta": message, "finish_reason": None}
    end_choice = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks: list[dict[str, Any]] = [
        {"choices": [message_choice], "usage": None},
        {"choices": [end_choice], "usage": None},
    ]
    stream_options = body.get("stream_options") or {}
    if stream_options.get("include_usage"):
        chunks.append({"choices": [], "usage": answer["usage"]})
    for fields in chunks:
        chunk = {**answer, "object": "chat.completion.chunk", **fields}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
