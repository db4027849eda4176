"""Answers of an engine, parsed and checked: in the caller's process, or in a worker whose arrays the caller maps.

The worker (``system/workers.py``) handles one call after the other until its caller ends, and loads neither torch nor
sglang.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.protocol import GenerationRequest, parse_answer, read_answers
from megatron_dppo.engine.server.recordings import Notice, Way, insert, insert_from_memory
from megatron_dppo.system.scratch import SharedBuffer, aligned_offsets, map_buffer
from megatron_dppo.system.secret_variables import without_secrets
from megatron_dppo.system.workers import WorkerLostError, WorkerProcess, connect

_MODULE = "megatron_dppo.engine.answer_parsing"


class ParserLostError(EngineError):
    """The process that parses answers has ended. Its output in the rank's log has the reason."""

    attempts = 1


class ReceivedAnswer(NamedTuple):
    """The answer to a call, with the call.

    Attributes:
        payload: the body of the answer.
        requests: the requests of the call.
        versions: the weight versions that may have sampled the tokens; None: any.
        downloaded: contents of the recordings that were downloaded, by id.
    """

    payload: bytes
    requests: Sequence[GenerationRequest]
    versions: range | None
    downloaded: Mapping[str, bytes]


class Parsed(NamedTuple):
    """The result of parsing an answer.

    Attributes:
        trajectories: one for each request, in order; empty if recordings must be downloaded first.
        missing: the notices of the recordings to download.
        ways: how the recordings arrived.
    """

    trajectories: list[Trajectory]
    missing: list[Notice]
    ways: frozenset[Way]


def parse(received: ReceivedAnswer) -> Parsed:
    """Parse the answer to a call. Raises AbortedError, EngineAnswerError, StaleWeightsError."""
    requests = received.requests
    downloaded = received.downloaded
    answers = read_answers(received.payload, requests, received.versions)
    missing_notices: list[Notice] = []
    ways: set[Way] = set()
    for answer, request in zip(answers, requests, strict=True):
        way_or_notice = insert_from_memory(answer, request)
        if isinstance(way_or_notice, Notice):
            notice = way_or_notice
            if notice.id in downloaded:
                insert(answer, request, notice, downloaded[notice.id])
                ways.add("binary HTTP answers")
            else:
                missing_notices.append(notice)
        elif way_or_notice is not None:
            ways.add(way_or_notice)
    if missing_notices:
        return Parsed([], missing_notices, frozenset())
    pairs = zip(answers, requests, strict=True)
    trajectories = [parse_answer(answer, request) for answer, request in pairs]
    return Parsed(trajectories, [], frozenset(ways))


class AnswerParser:
    """Parses large answers in a worker process. The worker starts with the first large answer; ``close`` ends it.

    The worker parses one answer at a time. A thread waits for its reply, so the caller's event loop is not blocked.

    Args:
        smallest: size in bytes of the smallest answer that the worker parses. This process parses smaller answers,
            because sending them to the worker takes longer. None: this process parses all answers.
    """

    def __init__(self, smallest: int | None = 32 * 1024) -> None:
        self._smallest = smallest
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._is_closed = False

    async def parse(self, received: ReceivedAnswer) -> Parsed:
        """Parse an answer as the function ``parse`` does, in the worker if it is large. Raises ParserLostError too."""
        size = len(received.payload) + sum(map(len, received.downloaded.values()))
        if self._smallest is None or size < self._smallest:
            return parse(received)
        return await asyncio.to_thread(self._ask, received)

    def close(self) -> None:
        """End the worker; an answer that it is parsing is lost. A second call does nothing."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.kill()

    def _ask(self, received: ReceivedAnswer) -> Parsed:
        with self._lock:
            try:
                reply = self._started_worker().ask(pickle.dumps(tuple(received)))
            except WorkerLostError as lost:
                # The message of WorkerLostError may begin with "its process". This error names the process itself.
                ending = str(lost).removeprefix("its process ")
                raise ParserLostError(f"the process that parses answers {ending}") from None
        return parsed_of(reply)

    def _started_worker(self) -> WorkerProcess:
        if self._is_closed:
            raise ParserLostError("the process that parses answers was closed")
        if self._worker is None:
            environment = {**without_secrets(os.environ), "OMP_NUM_THREADS": "1"}
            self._worker = WorkerProcess(_MODULE, b"", environment=environment, output=2)
        return self._worker


def parsed_of(reply: bytes) -> Parsed:
    """Read a worker's reply, and map its arrays. Raises the EngineError in it."""
    content = pickle.loads(reply)
    if isinstance(content, EngineError):
        raise content
    # The pickled fields of ``Parsed`` without the trajectories' arrays; the size in bytes of each array; the path of
    # the file with the arrays, or None; the arrays themselves if the path is None.
    head, sizes, path, arrays = content
    starts, size = aligned_offsets(sizes)
    if path is None:
        buffer = np.frombuffer(arrays, np.uint8)
    else:
        try:
            buffer = map_buffer(path, size)
        finally:
            Path(path).unlink(missing_ok=True)
    views = [buffer[start : start + n] for start, n in zip(starts, sizes, strict=True)]
    return Parsed(*pickle.loads(head, buffers=views))


def answer_to(content: bytes) -> bytes:
    """Parse an answer in the worker; return the reply that ``parsed_of`` reads.

    The trajectories' arrays are in one file in shared memory. The reader maps the file and removes it. If shared memory
    is full, the arrays are part of the reply. The reply is pickled: unpickling it is safe, because the worker runs this
    program.
    """
    arrays: list[pickle.PickleBuffer] = []
    try:
        parsed = parse(ReceivedAnswer(*pickle.loads(content)))
    except EngineError as error:
        return pickle.dumps(error)
    head = pickle.dumps(tuple(parsed), protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    sizes = [view.nbytes for view in views]
    starts, size = aligned_offsets(sizes)
    try:
        shared_buffer = SharedBuffer(size)
        buffer = shared_buffer.array
        path = str(shared_buffer.path)
    except OSError:
        # Shared memory is full. Sending the arrays through the connection takes longer.
        buffer = np.zeros(size, np.uint8)
        path = None
    for start, view in zip(starts, views, strict=True):
        buffer[start : start + view.nbytes] = view
    array_bytes = buffer.tobytes() if path is None else b""
    return pickle.dumps((head, sizes, path, array_bytes))


def main() -> None:
    """Answer the calls of the process that started this worker, until that process ends."""
    connection = connect(sys.argv[1])
    # Call 0 sets a worker up. This worker needs no content for it; the answer says that the worker is ready.
    connection.answer(connection.receive(), b"")
    try:
        while True:
            call = connection.receive()
            connection.answer(call, answer_to(call.content))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
