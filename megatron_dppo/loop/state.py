"""State of the loop that each checkpoint holds beside weights and optimizer, as plain JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.system.errors import RunError

log = logging.getLogger(__name__)

RECORDED_LATER = (
    "algorithm.aggregation",
    "algorithm.reference_estimator",
    "algorithm.reference_importance_weights",
    "algorithm.reference_kl",
    "algorithm.truncated_responses",
)
"""Settings that every identity has now; a checkpoint without one was written before they were recorded."""


class ResumeError(RunError, ValueError):
    """A checkpoint does not belong to the run that it should continue."""


FILES = "files (SHA-256)"
"""Key of the identity: hashes of the files that the run started from, by their names."""
_LATER_FIELDS = {"records"}
"""What checkpoints of earlier versions lack."""


@dataclass
class RunState:
    """Position and identity of a run.

    Attributes:
        step: rollout batches trained on; also the weight version of the policy.
        sampler: position in the data (``Sampler.state_dict``).
        identity: settings that must not change between starts, see :func:`identity_of`, and ``FILES``.
        records: what was recorded until then (``metrics.records.RecordsMark``).
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`to_json`. Raises ResumeError for missing or unknown fields."""
        expected = set(cls.__dataclass_fields__)
        if set(values) | _LATER_FIELDS != expected:
            raise ResumeError(
                f"run state in the checkpoint has fields {sorted(values)}, expected {sorted(expected)}; "
                "it was written by another version"
            )
        return cls(**values)

    def check_identity(self, identity: dict[str, Any], checkpoint: str) -> None:
        """Raise ResumeError, naming each difference, unless ``identity`` is this run's.

        What the checkpoint's version did not record yet (``RECORDED_LATER``) is taken as it is now: a warning names
        it, and the run's next checkpoints hold it.
        """
        unrecorded = {
            key: identity[key]
            for key in RECORDED_LATER
            if key in identity and key not in self.identity
        }
        differences = [
            f"{key}: {self.identity.get(key)!r} there, {identity.get(key)!r} now"
            for key in sorted((self.identity.keys() | identity.keys()) - {FILES, *unrecorded})
            if self.identity.get(key) != identity.get(key)
        ]
        if differences:
            raise ResumeError(
                f"{checkpoint} belongs to another run ({'; '.join(differences)}); give back these "
                "values, or name another run.directory, or start anew with run.resume=never"
            )
        if unrecorded:
            named = ", ".join(f"{key}={value}" for key, value in unrecorded.items())
            log.warning(
                "%s is of a version that did not record %s; make sure that it ran so",
                checkpoint,
                named,
            )
            self.identity |= unrecorded

    def check_files(self, files: Mapping[str, str], checkpoint: str) -> None:
        """Raise ResumeError, naming each file of ``files`` that is not as it was when the run began with it.

        A checkpoint of an earlier version knows none. Files that are new, or gone, are another check's.
        """
        known = self.identity.get(FILES, {})
        changed = sorted(name for name in files if known.get(name, files[name]) != files[name])
        if changed:
            told = "; ".join(
                f"{name}: its SHA-256 is {files[name][:12]}..., was {known[name][:12]}..."
                for name in changed
            )
            raise ResumeError(
                f"{checkpoint} was begun with other files ({told}); give them back, or start anew with "
                "run.resume=never"
            )

    def check_file_names(self, names: Set[str], checkpoint: str) -> None:
        """Raise ResumeError where a model's folder has lost or got a file since the run began."""
        known = self.identity.get(FILES)
        if known is not None and (odd := {n for n in known if not n.startswith("data")} ^ names):
            raise ResumeError(
                f"{checkpoint} was begun with other files: {', '.join(sorted(odd))} came or went since"
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
        **{
            key: getattr(config.algorithm, key.removeprefix("algorithm.")) for key in RECORDED_LATER
        },
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
