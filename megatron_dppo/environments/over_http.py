"""An environment in an HTTP server, for environments whose libraries need their own Python.

The server answers three POST requests:

    /reset  {"problem": {problem_id, prompt, answer, messages, metadata[, tools]}}
                                                    -> {"episode": text, "observation": text}
    /step   {"episode", "text", "truncated"[, "open_thought"]}
                                                    -> {"observation": text, "reward": number, "done": bool,
                                                        "scored": bool}
    /close  {"episode"}                             -> {}

``episode`` is the server's own name of the episode. A field that is missing in an answer to /step has the default of
``Step``. Any status except 200 is a fault of the environment. ``tools/serve_environment.py`` is an example of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_dppo.config.checks import services_of
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import Observation, Step, Turn
from megatron_dppo.rewards.over_http import JsonEndpoint, service_faults

_STEP_FIELDS = {"observation", "reward", "done", "scored"}


class OverHttp:
    """An episode on the server at ``url``.

    ``api_key_variable``: the environment variable with the server's key; None: the server needs no key. Raises
    ValueError for an invalid URL, and if the variable is not set.
    """

    @classmethod
    def check_options(cls, **options: Any) -> None:
        cls(**options)

    def __init__(self, url: str, api_key_variable: str | None = None) -> None:
        self._endpoint = JsonEndpoint(url, api_key_variable)
        self._episode: str | None = None

    async def reset(self, problem: Problem) -> Observation:
        fields = asdict(problem)
        del fields["prompt_ids"]
        if not problem.tools:
            del fields["tools"]
        answer = await self._endpoint.post("/reset", {"problem": fields})
        if not isinstance(answer, dict) or not isinstance(answer.get("episode"), str):
            raise ValueError(
                f"/reset answered {self._endpoint.excerpt(answer)}, expected an object with the text episode"
            )
        self._episode = answer["episode"]
        # Use the check of observations in ``Step``.
        return self._checked({"observation": answer.get("observation", "")}).observation

    async def step(self, turn: Turn) -> Step:
        body = {"episode": self._episode, "text": turn.text, "truncated": turn.is_truncated}
        if turn.open_thought:
            body["open_thought"] = turn.open_thought
        answer: Any = await self._endpoint.post("/step", body)
        if not isinstance(answer, dict) or not answer.keys() <= _STEP_FIELDS:
            raise ValueError(
                f"/step answered {self._endpoint.excerpt(answer)}, expected an object of {sorted(_STEP_FIELDS)}"
            )
        is_scored = answer.pop("scored", False)
        return self._checked({**answer, "is_scored": is_scored})

    def _checked(self, fields: Mapping[str, Any]) -> Step:
        """Build the step of an answer.

        Raises TypeError and ValueError for bad values. The errors leave out the server's key, which an answer may echo.
        """
        try:
            return Step(**fields)
        except TypeError as error:
            raise TypeError(self._endpoint.without_key(str(error))) from None
        except ValueError as error:
            raise ValueError(self._endpoint.without_key(str(error))) from None

    async def close(self) -> None:
        try:
            if self._episode is not None:
                await self._endpoint.post("/close", {"episode": self._episode})
        finally:
            await self._endpoint.close()


def absent_services(config: TrainConfig) -> list[str]:
    """List the servers of the environment and of rewards that do not answer now, as ``KEY.url: ...``."""
    services = services_of(config)
    if services:
        return asyncio.run(service_faults(services))
    return []
