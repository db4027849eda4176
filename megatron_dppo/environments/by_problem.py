"""Several environments in one run: an entry of a problem's metadata names the environment of its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_dppo.environments import (
    Environment,
    Observation,
    PolicyFormat,
    Step,
    Turn,
    check_environment,
    find_environment,
    makes_prompts,
    note_settings,
    reads_tool_calls,
)

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Problem

_KEYS = {"name", "options"}
"""Keys of an environment's settings."""


class ByProblem:
    """An episode of the environment that the problem names.

    Args:
        environments: Name -> settings of an environment: ``name`` as in ``environment.name``, and ``options``.
        column: Entry of the metadata with the name of a problem's environment.
    """

    def __init__(
        self, environments: Mapping[str, Mapping[str, Any]], column: str = "environment"
    ) -> None:
        self._environments = environments
        self._column = column
        self._sampling: Mapping[str, float] = {}
        self._policy_format = PolicyFormat()
        self._environment: Environment | None = None

    @classmethod
    def check_options(cls, environments: Any, column: Any = "environment") -> None:
        """Raise ValueError for settings that are none, and for bad options of an environment."""
        cls._check_settings(environments, column)
        for key, settings in environments.items():
            try:
                check_environment(settings["name"], settings.get("options", {}))
            except ValueError as error:
                raise ValueError(f"options: environments.{key}: {error}") from error

    @staticmethod
    def _check_settings(environments: Any, column: Any) -> None:
        """Raise ValueError for settings that are none."""
        if not isinstance(column, str) or not column:
            raise ValueError(f"options: column: got {column!r}, expected an entry of the metadata")
        if not isinstance(environments, Mapping) or not environments:
            raise ValueError(
                f"options: environments: got {environments!r}, expected names, each with the settings of an environment"
            )
        for key, settings in environments.items():
            is_valid = isinstance(settings, Mapping) and {"name"} <= settings.keys() <= _KEYS
            if not is_valid or not isinstance(settings.get("options", {}), Mapping):
                raise ValueError(
                    f"options: environments.{key}: got {settings!r}, expected a name and perhaps options"
                )
            if settings["name"] == "by-problem":
                raise ValueError(f"options: environments.{key}: got by-problem inside by-problem")

    @staticmethod
    def members(environments: Any, column: Any = "environment") -> dict[str, Mapping[str, Any]]:
        """Return the settings of each environment by its key in the options; none for bad settings."""
        try:
            ByProblem._check_settings(environments, column)
        except ValueError:
            return {}
        return {f"environments.{key}": settings for key, settings in environments.items()}

    @staticmethod
    def makes_prompts(environments: Mapping[str, Any], column: str = "environment") -> bool:
        """Whether one of the environments makes prompts."""
        return any(makes_prompts(e["name"], e.get("options", {})) for e in environments.values())

    @staticmethod
    def problem_fault(
        metadata: Mapping[str, Any], environments: Mapping[str, Any], column: str = "environment"
    ) -> str | None:
        """Return the reason why a problem with this metadata has no environment; None if it has one."""
        name = metadata.get(column)
        if isinstance(name, str) and name in environments:
            return None
        return (
            f"its metadata has {name!r} as {column!r}, expected an environment of environment.options.environments: "
            f"{', '.join(environments)}"
        )

    @staticmethod
    def example_metadata(
        environments: Mapping[str, Any], column: str = "environment"
    ) -> dict[str, str]:
        """Return metadata of a problem that has the first environment."""
        return {column: next(iter(environments))}

    @staticmethod
    def reads_tool_calls(environments: Mapping[str, Any], column: str = "environment") -> bool:
        """Whether one of the environments reads the policy's calls of tools."""
        return any(reads_tool_calls(e["name"], e.get("options", {})) for e in environments.values())

    def note_sampling(self, sampling: Mapping[str, float]) -> None:
        self._sampling = sampling

    def note_policy_format(self, policy_format: PolicyFormat) -> None:
        self._policy_format = policy_format

    async def reset(self, problem: Problem) -> Observation:
        settings = self._environments[problem.metadata[self._column]]
        kind = find_environment(settings["name"])
        environment = kind(**settings.get("options", {}))
        self._environment = environment
        note_settings(environment, self._sampling, self._policy_format)
        return await environment.reset(problem)

    async def step(self, turn: Turn) -> Step:
        assert self._environment is not None
        return await self._environment.step(turn)

    async def close(self) -> None:
        if self._environment is not None:
            await self._environment.close()
