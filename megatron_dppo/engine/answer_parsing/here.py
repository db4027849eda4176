"""What parsing the answer to a call is, and the form of it that runs in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.protocol import parse_answer, read_answers
from megatron_dppo.engine.recordings.fetching import Way, place, take
from megatron_dppo.engine.recordings.notice import Notice
from megatron_dppo.engine.requests import GenerationRequest


@dataclass(frozen=True)
class Parsed:
    """What became of an answer: ``trajectories`` in the order of the requests; or, where recordings must
    be downloaded first, none and the ``missing`` notices. ``ways``: how recordings came."""

    trajectories: list[Trajectory] = field(default_factory=list)
    missing: list[Notice] = field(default_factory=list)
    ways: frozenset[Way] = frozenset()


class AnswerParser(Protocol):
    """Parses and checks answers. Callable from several tasks of one event loop."""

    async def parse(
        self,
        payload: bytes,
        requests: Sequence[GenerationRequest],
        version: int | None,
        downloaded: Mapping[str, bytes],
    ) -> Parsed:
        """The answer to a call. ``version``: the weights that it must come from. ``downloaded``:
        contents of recordings by id.

        Raises AbortedError, EngineAnswerError, StaleWeightsError.
        """


class ParsesHere:
    """An AnswerParser in this process."""

    async def parse(
        self,
        payload: bytes,
        requests: Sequence[GenerationRequest],
        version: int | None,
        downloaded: Mapping[str, bytes],
    ) -> Parsed:
        """See AnswerParser."""
        return parse(payload, requests, version, downloaded)


def parse(
    payload: bytes,
    requests: Sequence[GenerationRequest],
    version: int | None,
    downloaded: Mapping[str, bytes],
) -> Parsed:
    """As AnswerParser says."""
    answers = read_answers(payload, requests, version)
    missing: list[Notice] = []
    ways: set[Way] = set()
    for answer, request in zip(answers, requests, strict=True):
        found = take(answer, request)
        if isinstance(found, Notice) and found.id not in downloaded:
            missing.append(found)
        elif isinstance(found, Notice):
            place(answer, request, found, downloaded[found.id])
            ways.add("binary HTTP answers")
        elif found is not None:
            ways.add(found)
    if missing:
        return Parsed(missing=missing)
    pairs = zip(answers, requests, strict=True)
    return Parsed([parse_answer(answer, request) for answer, request in pairs], [], frozenset(ways))
