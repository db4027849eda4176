"""What a run remembers between two starts, beside weights and optimizer: plain JSON, stored in each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class ResumeError(ValueError):
    """A checkpoint does not belong to the run that it should continue."""


@dataclass
class RunState:
    """Position of a run.

    ``step``: rollout batches trained on, which is also the weight version of the policy.
    ``sampler``: position in the data (``ProblemSampler.state_dict``).
    ``data_sha256``: of the training file, so that a resumed run can't go on with another one unnoticed.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    data_sha256: str = ""

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
