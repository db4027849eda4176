"""The part of an EngineSession that begins generations, for tests whose responses are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RecordedStarts:
    """Records the job and the description of each generation; a subclass finishes them.

    A generation has the arguments of ``start``, and the figures of a generation of one second without repetitions.
    """

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.descriptions: list[str] = []

    def start(
        self, job: Any, description: str, on_response: Any, order: int, done: Any = None
    ) -> Any:
        self.jobs.append(job)
        self.descriptions.append(description)
        return SimpleNamespace(
            job=job, description=description, on_response=on_response, order=order,
            done=dict(done or {}), seconds=1.0, redrawn=0, timed_out=0,
        )  # fmt: skip
