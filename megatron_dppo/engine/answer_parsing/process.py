"""An AnswerParser in a process beside the trainer's, which maps what it parsed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.engine.answer_parsing.child import ERRORS
from megatron_dppo.engine.answer_parsing.here import Parsed, ParsesHere
from megatron_dppo.engine.answer_parsing.wire import (
    read_frame,
    request_to_json,
    trajectories_from_wire,
    write_frame,
)
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.recordings.notice import Notice
from megatron_dppo.engine.requests import GenerationRequest
from megatron_dppo.system.processes import describe_exit, kill_families, start_process
from megatron_dppo.system.scratch import mapped

_MODULE = "megatron_dppo.engine.answer_parsing.child"


class ParserLostError(EngineError):
    """The process that parses answers ended; its output, in the rank's own, says why."""

    attempts = 1


class ParsingProcess:
    """Started by the first answer; ``close`` it. It ends by itself when this process is gone.

    Calls take turns. The caller's event loop goes on meanwhile: another thread waits for the pipe.

    Args:
        smallest: bytes of the smallest answer that it is given; others are parsed here, in less time than
            handing them over takes.
    """

    def __init__(self, smallest: int = 32 * 1024) -> None:
        self._smallest = smallest
        self._here = ParsesHere()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def parse(
        self,
        payload: bytes,
        requests: Sequence[GenerationRequest],
        version: int | None,
        downloaded: Mapping[str, bytes],
    ) -> Parsed:
        """See AnswerParser. Raises ParserLostError too."""
        if len(payload) + sum(map(len, downloaded.values())) < self._smallest:
            return await self._here.parse(payload, requests, version, downloaded)
        told = {
            "requests": [request_to_json(request) for request in requests],
            "version": version,
            "payload": len(payload),
            "downloaded": [[name, len(content)] for name, content in downloaded.items()],
        }
        return await asyncio.to_thread(self._ask, told, b"".join([payload, *downloaded.values()]))

    def close(self) -> None:
        """End the process; what is being parsed is lost. Harmless twice."""
        self._closed = True
        if self._process is not None:
            kill_families([self._process])

    def _ask(self, told: Mapping[str, Any], content: bytes) -> Parsed:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                write_frame(process.stdin, told, content)
                frame = read_frame(process.stdout)
            except (OSError, EOFError, ValueError):
                frame = None
        if frame is None:
            code = process.wait()
            raise ParserLostError(f"the process that parses answers {describe_exit(code)}")
        return _parsed(*frame)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise ParserLostError("the process that parses answers was closed")
        if self._process is None:
            self._process = start_process(
                [sys.executable, "-m", _MODULE],
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                output=subprocess.PIPE,
                errors=2,
                dies_with_thread=False,  # it ends with its standard input
            )
        return self._process


def _parsed(told: Mapping[str, Any], content: bytes) -> Parsed:
    """What a reply says; raises the error that it tells."""
    if "error" in told:
        name, message = told["error"]
        raise ERRORS[name](message)
    if told["path"] is None:
        buffer = np.frombuffer(content, np.uint8)
    else:
        try:
            buffer = mapped(told["path"], told["size"])
        finally:
            Path(told["path"]).unlink(missing_ok=True)
    notices = [Notice(**{**m, "shape": tuple(m["shape"])}) for m in told["missing"]]
    return Parsed(trajectories_from_wire(told["rows"], buffer), notices, frozenset(told["ways"]))
