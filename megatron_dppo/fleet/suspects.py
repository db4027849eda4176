"""Prompts that may kill servers: several servers were lost while they generated from the prompt.

A server that dies loses all its calls, so the loss does not show which prompt killed the server, if any prompt did. A
prompt that was in flight at two losses is requested alone before anything else (``FleetClient.question_suspects``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.engine.protocol import GenerationRequest
from megatron_dppo.fleet.record import Server

_LOSSES = 2
"""Number of losses that make a prompt suspect."""


@dataclass(eq=False)
class Suspect:
    """A prompt that may kill servers.

    ``request`` is one request for the prompt. Each of ``servers`` was lost while the server itself or the router had a
    request for the prompt.
    """

    request: GenerationRequest
    servers: list[Server] = field(default_factory=list)


class Suspects:
    """The prompts that were in flight at the loss of a server and have had no answer since."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], Suspect] = {}

    def note_loss(self, server: Server, requests: Sequence[GenerationRequest]) -> None:
        """Record that ``server`` was lost with these ``requests``; one loss counts once for each prompt."""
        request_of = {tuple(request.prompt_ids): request for request in requests}
        for prompt, request in request_of.items():
            self._by_prompt.setdefault(prompt, Suspect(request)).servers.append(server)

    def clear(self, requests: Sequence[GenerationRequest]) -> None:
        """Remove the prompts of these requests: a server has answered them."""
        if not self._by_prompt:
            return
        for request in requests:
            self._by_prompt.pop(tuple(request.prompt_ids), None)

    def questionable(self) -> list[Suspect]:
        """Return the prompts that were in flight at two losses or more, the prompts with the most losses first."""
        # Copy the values: a rank's thread runs this method while the event loop's thread changes the dict.
        suspects = [s for s in list(self._by_prompt.values()) if len(s.servers) >= _LOSSES]
        return sorted(suspects, key=_count_losses, reverse=True)


def _count_losses(suspect: Suspect) -> int:
    return len(suspect.servers)
