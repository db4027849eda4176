"""State of the training loop that each checkpoint stores as plain JSON, and its comparison with a later start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.checkpoint.directory import DamagedCheckpointError


class ResumeError(RunError, ValueError):
    """A checkpoint does not belong to the run that it should continue."""


FILES = "files (SHA-256)"
"""Key in ``RunState.identity``. The value maps the name of each file that the run started from to the file's hash."""


@dataclass
class RunState:
    """Position and identity of a run.

    Attributes:
        step: number of rollout batches that were trained on; also the weight version of the policy.
        sampler: position in the data (``Sampler.state_dict``).
        identity: settings that must not change between starts, see ``run_identity.identity_of``, and ``FILES``.
        records: position in the run's records (``Recorder.mark``).
        weights: hash of the policy's weights (``Trainer.weights_digest``) by the form of the parameters
            (``Trainer.weights_form``); empty in checkpoints of earlier versions.
        settings: the whole configuration of the start that wrote the checkpoint; empty in checkpoints of earlier
            versions.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Return the state from the values of :meth:`to_json`. Raises ResumeError for missing or unknown fields."""
        expected_fields = set(cls.__dataclass_fields__)
        missing_fields = expected_fields - _LATER_FIELDS - set(values)
        unknown_fields = set(values) - expected_fields
        if missing_fields or unknown_fields:
            raise ResumeError(
                f"run state in the checkpoint has fields {sorted(values)}, expected {sorted(expected_fields)}; "
                "it was written by another version"
            )
        return cls(**values)

    def check_identity(self, identity: dict[str, Any], checkpoint: str) -> None:
        """Raise ResumeError, with each difference, unless ``identity`` equals the stored identity (except FILES)."""
        differences: list[str] = []
        for key in sorted((self.identity.keys() | identity.keys()) - {FILES}):
            saved_value = self.identity.get(key)
            value = identity.get(key)
            if saved_value != value:
                differences.append(f"{key}: {saved_value!r} there, {value!r} now")
        if differences:
            raise ResumeError(
                f"{checkpoint} belongs to another run ({'; '.join(differences)}); restore these "
                "values, or name another run.directory, or start anew with run.resume=never"
            )

    def check_weights(self, form: str, digest: str, checkpoint: Path) -> None:
        """Raise DamagedCheckpointError unless the loaded weights have the hash that the step's weights had.

        ``form``: form of the parameters on these ranks. If the ranks that saved held another form, the hashes cannot be
        compared, and no error is raised. ``digest``: hash of the loaded weights.
        """
        expected_hash = self.weights.get(form, digest)
        if digest != expected_hash:
            raise DamagedCheckpointError(
                f"{checkpoint}: its weights have the hash {digest}, expected {expected_hash}, the hash of the "
                f"weights that step {self.step} made"
            )

    def changed_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Return each key of the configuration whose value changed since the checkpoint was saved, with both values."""
        if not self.settings:
            return []
        saved_settings = flat_settings(self.settings)
        new_settings = flat_settings(settings)
        changes = []
        for key in sorted(saved_settings.keys() | new_settings.keys()):
            saved_value = "not set"
            if key in saved_settings:
                saved_value = _as_text(saved_settings[key])
            new_value = "not set"
            if key in new_settings:
                new_value = _as_text(new_settings[key])
            if saved_value != new_value:
                changes.append(f"{key}: {saved_value} there, {new_value} now")
        return changes

    def check_files(self, files: Mapping[str, str], checkpoint: str) -> None:
        """Raise ResumeError with each of ``files`` whose hash changed since the run began.

        New and missing files are the subject of ``check_file_names``.
        """
        hashes = self.identity.get(FILES, {})
        changes: list[str] = []
        for name, digest in sorted(files.items()):
            if name in hashes and hashes[name] != digest:
                old_digest = hashes[name]
                changes.append(f"{name}: its SHA-256 is {digest[:12]}..., was {old_digest[:12]}...")
        if changes:
            raise ResumeError(
                f"{checkpoint} was begun with other files ({'; '.join(changes)}); give them back, or start anew with "
                "run.resume=never"
            )

    def check_file_names(self, names: Set[str], checkpoint: str) -> None:
        """Raise ResumeError if a model's folder has lost or gained a file since the run began.

        ``names``: names of the model's files now. Held-out files are not compared, because evaluations may change.
        """
        hashes = self.identity.get(FILES)
        if hashes is None:
            return
        saved_names = {name for name in hashes if not name.startswith("data")}
        changed_names = saved_names ^ names
        if changed_names:
            raise ResumeError(
                f"{checkpoint} was begun with other files: {', '.join(sorted(changed_names))} came or went since"
            )


_LATER_FIELDS = {"weights", "settings"}
"""Fields that checkpoints of earlier versions lack."""


def last_due(step: int, every: int, steps: int) -> int:
    """Return the last step, up to ``step``, after which an action is due.

    The action is due after each ``every`` steps, and after the last step of a run of ``steps`` steps.
    """
    if step == steps:
        return step
    return step - step % every


def settings_of(config: PolicyConfig) -> dict[str, Any]:
    """Return the whole configuration as plain JSON, without ``run.resume``: each start may choose its value."""
    settings = config.model_dump(mode="json")
    del settings["run"]["resume"]
    return settings


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``settings`` by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def changes_of(state: RunState, settings: Mapping[str, Any]) -> str | None:
    """Return a sentence with each key of the configuration that changed since the checkpoint; None without changes."""
    changes = state.changed_settings(settings)
    if not changes:
        return None
    return (
        f"the configuration changed since the checkpoint of step {state.step}: {'; '.join(changes)}; "
        "docs/checkpoints.md says what a run is held to"
    )


def _as_text(value: Any) -> str:
    """Return a setting as text. The keys of a table in a list are sorted, because a checkpoint sorts them."""
    if isinstance(value, list):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    return repr(value)
