"""The process that parses answers: ``python -m megatron_dppo.engine.answer_parsing.child``.

It answers one frame by one on standard output, until standard input ends. Arrays go to a file in shared
memory whose name it tells; the reader removes the name. An error of parsing is an answer too; any other
ends the process with its traceback. Loads neither torch nor sglang.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_dppo.engine.answer_parsing.here import parse
from megatron_dppo.engine.answer_parsing.wire import (
    buffer_size,
    fill,
    read_frame,
    request_from_json,
    trajectories_to_wire,
    write_frame,
)
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.system.scratch import SharedBuffer

ERRORS = {error.__name__: error for error in (AbortedError, EngineAnswerError, StaleWeightsError)}
"""Errors of parsing by name, as they are told."""


def answer(told: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """The frame that answers a frame. ``content``: the payload, then the downloaded recordings."""
    requests = [request_from_json(request) for request in told["requests"]]
    payload, start, downloaded = content[: told["payload"]], told["payload"], {}
    for name, size in told["downloaded"]:
        downloaded[name] = content[start : start + size]
        start += size
    try:
        parsed = parse(payload, requests, told["version"], downloaded)
    except tuple(ERRORS.values()) as error:
        return {"error": [type(error).__name__, str(error)]}, b""
    rows, arrays = trajectories_to_wire(parsed.trajectories)
    size = buffer_size(arrays)
    reply = {
        "missing": [asdict(notice) for notice in parsed.missing],
        "ways": sorted(parsed.ways),
        "rows": rows,
        "size": size,
    }
    try:
        shared = SharedBuffer(size)
    except OSError:  # no room
        buffer = np.zeros(size, np.uint8)
        fill(buffer, arrays)
        return {**reply, "path": None}, buffer.tobytes()
    fill(shared.array, arrays)
    return {**reply, "path": str(shared.path)}, b""


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    questions = os.fdopen(os.dup(0), "rb", buffering=0)
    while (frame := read_frame(questions)) is not None:
        write_frame(replies, *answer(*frame))


if __name__ == "__main__":
    main()
