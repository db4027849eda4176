"""Prompts under suspicion: servers were lost while they were asked, again and again.

A server that dies takes every call with it that it has, so nothing says which prompt it died of, or whether of any. A
prompt that two losses have in common is asked alone before anything else (``FleetClient.question_suspects``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.engine.protocol import GenerationRequest
from megatron_dppo.fleet.record import Server

_LOSSES = 2


@dataclass(eq=False)
class Suspect:
    """A prompt, by one ``request`` for it, and the ``servers`` that were lost while they, or the router, had it."""

    request: GenerationRequest
    servers: list[Server] = field(default_factory=list)


class Suspects:
    """The prompts that were in flight at the loss of a server and have had no answer since."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], Suspect] = {}

    def note_loss(self, server: Server, requests: Sequence[GenerationRequest]) -> None:
        """``server`` was lost with these ``requests``; one loss counts once for each prompt."""
        for prompt, request in {tuple(r.prompt_ids): r for r in requests}.items():
            self._by_prompt.setdefault(prompt, Suspect(request)).servers.append(server)

    def clear(self, requests: Sequence[GenerationRequest]) -> None:
        """A server outlived these."""
        for request in requests if self._by_prompt else ():
            self._by_prompt.pop(tuple(request.prompt_ids), None)

    def questionable(self) -> list[Suspect]:
        """Those that two losses have in common, the ones with the most losses first."""
        # A copy: a rank's thread asks, too, while calls end in the loop's.
        found = [s for s in list(self._by_prompt.values()) if len(s.servers) >= _LOSSES]
        return sorted(found, key=lambda s: len(s.servers), reverse=True)
