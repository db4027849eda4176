"""State of the loop that each checkpoint holds beside weights and optimizer, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dppo.config.schema import TrainConfig


class ResumeError(ValueError):
    """A checkpoint does not belong to the run that it should continue."""


@dataclass
class RunState:
    """Position and identity of a run.

    Attributes:
        step: rollout batches trained on; also the weight version of the policy.
        sampler: position in the data (``Sampler.state_dict``).
        identity: settings that must not change between starts, see :func:`identity_of`.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`to_json`. Raises ResumeError for missing or unknown fields."""
        expected = set(cls.__dataclass_fields__)
        if set(values) != expected:
            raise ResumeError(
                f"run state in the checkpoint has fields {sorted(values)}, expected {sorted(expected)}; "
                "it was written by another version"
            )
        return cls(**values)

    def check_identity(self, identity: dict[str, Any], checkpoint: str) -> None:
        """Raise ResumeError, naming each difference, unless ``identity`` is this run's."""
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
    """Settings that must not change between two starts of a run, with their values.

    With another value the metrics after the resume would not continue those before it. Learning
    rates, batch sizes, layouts, limits and schedules may change.
    """
    settings, data = config.algorithm.settings, config.data
    keys = [[file.prompt_key, file.answer_key] for file in data.train_files]
    later = {  # left out where nothing is set: a checkpoint without them was written so
        "data.system_prompt": data.system_prompt,
        "data.prompt_template": data.prompt_template,
        "data.train (keys)": keys if any(map(any, keys)) else None,
        "rollout.stop": list(config.rollout.stop) or None,
    }
    return {
        **{key: value for key, value in later.items() if value is not None},
        "algorithm.name": config.algorithm.name,
        # Left out where it is the default: a checkpoint without it was written by that.
        **({"algorithm.settings": settings} if settings != "stability" else {}),
        "algorithm.options": dict(config.algorithm.options),
        "data.train (SHA-256)": data_sha256,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "data.shuffle": config.data.shuffle,
        "reward.name": config.reward.name,
        "rollout.temperature": config.rollout.temperature,
        "run.seed": config.run.seed,
    }
