"""Which of a server's GPU memory is let go of, as its client knows: SGLang's tags, each in a state of its own.

    resident --release--> released --restore--> resident
        \\                    \\
         a call that failed: unknown, for good

SGLang 0.5.23 checks none of it. Restoring what was not released ends its scheduler (KeyError), and so does a release
while requests run (an assertion); a second release, or weights that are sent into released memory, would on a GPU. So a
call in a wrong order is never sent. A server that was started anew is all resident, and has a new client.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from megatron_dppo.engine.errors import EngineLostError

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
_State = Literal["resident", "released", "unknown"]


class MemoryOrderError(RuntimeError):
    """A call that the server would not survive, or that needs memory which was released: a fault of the caller. Nothing
    was sent."""


class Occupation:
    """Of the server at ``url``. ``released``: the tags whose memory it has let go of."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._states: dict[MemoryTag, _State] = dict.fromkeys(TAGS, "resident")

    @property
    def released(self) -> frozenset[MemoryTag]:
        return frozenset(tag for tag, state in self._states.items() if state == "released")

    def check(self, action: str, *tags: MemoryTag) -> None:
        """Raise MemoryOrderError where one of ``tags`` (none: of all), which ``action`` needs, is not resident, and
        EngineLostError where that is not known."""
        self._expect("resident", action, tags or TAGS)

    @contextmanager
    def releasing(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Around the call that releases ``tags``. Raises as ``check``, before it."""
        self._expect("resident", "release", tags)
        with self._changing("released", tags):
            yield

    @contextmanager
    def restoring(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Around the call that restores ``tags``, all of them released."""
        self._expect("released", "restore", tags)
        with self._changing("resident", tags):
            yield

    @contextmanager
    def _changing(self, state: _State, tags: Collection[MemoryTag]) -> Iterator[None]:
        # Whether a call that fails has been carried out can't be told.
        self._states |= dict.fromkeys(tags, "unknown")
        yield
        self._states |= dict.fromkeys(tags, state)

    def _expect(self, state: _State, action: str, tags: Collection[MemoryTag]) -> None:
        if not tags or not set(tags) <= set(TAGS):
            raise ValueError(f"{action}: got {sorted(tags)}, expected some of {', '.join(TAGS)}")
        found = {tag: self._states[tag] for tag in TAGS if tag in tags}
        if unknown := [tag for tag, actual in found.items() if actual == "unknown"]:
            raise EngineLostError(
                f"{self._url}: can't {action}: a call that released or restored {', '.join(unknown)} failed, and the "
                "server must be started anew"
            )
        if wrong := [f"{tag} is {actual}" for tag, actual in found.items() if actual != state]:
            raise MemoryOrderError(f"{self._url}: can't {action}: {', '.join(wrong)}")
