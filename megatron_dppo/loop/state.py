"""What a run remembers between two starts, beside weights and optimizer: plain JSON, stored in each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dppo.config.schema import TrainConfig


class ResumeError(ValueError):
    """A checkpoint does not belong to the run that it should continue."""


@dataclass
class RunState:
    """Position of a run.

    ``step``: rollout batches trained on, which is also the weight version of the policy.
    ``sampler``: position in the data (``ProblemSampler.state_dict``). ``identity``: what makes the
    run this run and no other, see :func:`identity_of`.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Values that ``json`` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`to_json`. Raises ResumeError naming fields that are missing or unknown."""
        expected = set(cls.__dataclass_fields__)
        if set(values) != expected:
            raise ResumeError(
                f"run state in the checkpoint has fields {sorted(values)}, expected {sorted(expected)}; "
                "it was written by another version"
            )
        return cls(**values)

    def check_identity(self, identity: dict[str, Any], checkpoint: str) -> None:
        """Raise ResumeError where ``identity`` is another run's, naming each difference."""
        differences = [
            f"{key}: {self.identity.get(key)!r} there, {identity.get(key)!r} now"
            for key in sorted(self.identity.keys() | identity.keys())
            if self.identity.get(key) != identity.get(key)
        ]
        if differences:
            raise ResumeError(
                f"{checkpoint} belongs to another run ({'; '.join(differences)}); give back these "
                "values, or name another run.directory, or start anew with run.resume=never"
            )


def identity_of(config: TrainConfig, data_sha256: str) -> dict[str, Any]:
    """What may not change between two starts of a run: else its curve would silently be two runs'.

    Learning rates, batch sizes, layouts, limits and schedules may change.
    """
    return {
        "algorithm.name": config.algorithm.name,
        "algorithm.options": dict(config.algorithm.options),
        "data.train (SHA-256)": data_sha256,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "data.shuffle": config.data.shuffle,
        "reward.name": config.reward.name,
        "rollout.temperature": config.rollout.temperature,
        "run.seed": config.run.seed,
    }
