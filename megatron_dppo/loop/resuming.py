"""Where a start continues: from a checkpoint of this very run, or at step 0 where nothing would be lost by it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.config.data_schema import RewardConfig, RewardTerm
from megatron_dppo.config.schema import AlgorithmConfig, CheckpointConfig, RunConfig, TrainConfig
from megatron_dppo.loop import inputs
from megatron_dppo.metrics import records
from megatron_dppo.rewards.answers import hand_over
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import sha256_of
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointDirectory,
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    UnusableCheckpoint,
    read_manifest,
)
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import on_rank_0
from megatron_dppo.trainer.trainer import Trainer

# State of the loop that each checkpoint holds beside weights and optimizer, as plain JSON.

log = logging.getLogger(__name__)


class ResumeError(RunError, ValueError):
    """A checkpoint does not belong to the run that it should continue."""


FILES = "files (SHA-256)"
"""Key of the identity: hashes of the files that the run started from, by their names."""


@dataclass
class RunState:
    """Position and identity of a run.

    Attributes:
        step: rollout batches trained on; also the weight version of the policy.
        sampler: position in the data (``Sampler.state_dict``).
        identity: settings that must not change between starts, see :func:`identity_of`, and ``FILES``.
        records: what was recorded until then (``Recorder.mark``).
        weights: hash of the policy's weights (``Trainer.weights_digest``) by the form that it is of
            (``Trainer.weights_form``); empty where an earlier version wrote the checkpoint.
        settings: the whole configuration of the start that wrote the checkpoint; likewise.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`to_json`. Raises ResumeError for missing or unknown fields."""
        expected = set(cls.__dataclass_fields__)
        if not expected - _LATER_FIELDS <= set(values) <= expected:
            raise ResumeError(
                f"run state in the checkpoint has fields {sorted(values)}, expected {sorted(expected)}; "
                "it was written by another version"
            )
        return cls(**values)

    def check_identity(self, identity: dict[str, Any], checkpoint: str) -> None:
        """Raise ResumeError, naming each difference, unless ``identity`` is this run's."""
        differences = [
            f"{key}: {self.identity.get(key)!r} there, {identity.get(key)!r} now"
            for key in sorted((self.identity.keys() | identity.keys()) - {FILES})
            if self.identity.get(key) != identity.get(key)
        ]
        if differences:
            raise ResumeError(
                f"{checkpoint} belongs to another run ({'; '.join(differences)}); give back these "
                "values, or name another run.directory, or start anew with run.resume=never"
            )

    def check_weights(self, form: str, digest: str, checkpoint: Path) -> None:
        """Raise DamagedCheckpointError unless loaded weights have the hash of those that the step made.

        Hashes are compared where the ranks hold the same ``form`` of parameters as those that saved.
        """
        expected = self.weights.get(form, digest)
        if digest != expected:
            raise DamagedCheckpointError(
                f"{checkpoint}: its weights have the hash {digest}, expected {expected}, the hash of the "
                f"weights that step {self.step} made"
            )

    def changed_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Each key of the configuration whose value is not that of the start that saved, with both values."""
        if not self.settings:
            return []
        saved, present = flat_settings(self.settings), flat_settings(settings)
        changes = []
        for key in sorted(saved.keys() | present.keys()):
            before, after = (
                repr(flat[key]) if key in flat else "not set" for flat in (saved, present)
            )
            if before != after:
                changes.append(f"{key}: {before} there, {after} now")
        return changes

    def check_files(self, files: Mapping[str, str], checkpoint: str) -> None:
        """Raise ResumeError, naming each file of ``files`` that is not as it was when the run began with it.

        Files that are new, or gone, are another check's.
        """
        hashes = self.identity.get(FILES, {})
        changed = sorted(name for name in files if hashes.get(name, files[name]) != files[name])
        if changed:
            changes = "; ".join(
                f"{name}: its SHA-256 is {files[name][:12]}..., was {hashes[name][:12]}..."
                for name in changed
            )
            raise ResumeError(
                f"{checkpoint} was begun with other files ({changes}); give them back, or start anew with "
                "run.resume=never"
            )

    def check_file_names(self, names: Set[str], checkpoint: str) -> None:
        """Raise ResumeError where a model's folder has lost or got a file since the run began."""
        hashes = self.identity.get(FILES)
        if hashes is not None and (odd := {n for n in hashes if not n.startswith("data")} ^ names):
            raise ResumeError(
                f"{checkpoint} was begun with other files: {', '.join(sorted(odd))} came or went since"
            )


_LATER_FIELDS = {"weights", "settings"}
"""Fields that checkpoints of earlier versions lack."""


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The whole configuration as plain JSON, but for what each start may say of itself."""
    settings = config.model_dump(mode="json")
    del settings["run"]["resume"]
    return settings


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``settings`` by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def changes_of(state: RunState, settings: Mapping[str, Any]) -> str | None:
    """A sentence with each key of the configuration that changed since the checkpoint; None where none did."""
    changes = state.changed_settings(settings)
    if not changes:
        return None
    return (
        f"the configuration changed since the checkpoint of step {state.step}: {'; '.join(changes)}; "
        "docs/checkpoints.md says what a run is held to"
    )


def changes_since_checkpoint(config: TrainConfig) -> str | None:
    """As ``changes_of``, of the checkpoint that a start would go on from; None also where there is none."""
    if config.run.resume == "never":
        return None
    directory = Path(config.run.directory) / records.CHECKPOINTS_FOLDER
    survey = CheckpointDirectory(directory, config.checkpoint.keep).survey()
    if not survey.complete:
        return None
    state = RunState.from_json(read_manifest(survey.complete[-1].path)["state"])
    return changes_of(state, settings_of(config))


def identity_of(config: TrainConfig, data_sha256: str) -> dict[str, Any]:
    """Settings that must not change between two starts of a run, with their values.

    With another value the metrics after the resume would not continue those before it. Learning
    rates, batch sizes, layouts, limits and schedules may change.
    """
    algorithm, data = config.algorithm, config.data
    return {
        "algorithm.name": algorithm.name,
        "algorithm.settings": algorithm.settings,
        "algorithm.options": dict(algorithm.options),
        "algorithm.aggregation": algorithm.aggregation,
        "algorithm.reference_estimator": algorithm.reference_estimator,
        "algorithm.reference_importance_weights": algorithm.reference_importance_weights,
        "algorithm.reference_kl": algorithm.reference_kl,
        "algorithm.truncated_responses": algorithm.truncated_responses,
        **_advantage_identity(algorithm),
        "data.train (SHA-256)": data_sha256,
        "data.train (keys)": [
            [file.prompt_key, file.answer_key, *filter(None, [file.metadata_key])]
            for file in data.train_files
        ],
        "data.system_prompt": data.system_prompt,
        "data.prompt_template": data.prompt_template,
        **_argument_identity(data.chat_template_arguments),
        "data.max_prompt_tokens": data.max_prompt_tokens,
        "data.shuffle": data.shuffle,
        "reward.name": config.reward.name,
        **_reward_identity(config.reward),
        "rollout.stop": list(config.rollout.stop),
        "rollout.temperature": config.rollout.temperature,
        "run.seed": config.run.seed,
    }


def _argument_identity(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's arguments, where there are any: earlier checkpoints have no such key."""
    return {"data.chat_template_arguments": dict(arguments)} if arguments else {}


def _advantage_identity(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What decides on the advantages beside the rewards; as little as differs from defaults, as checkpoints of before
    have none of it."""
    usual = AlgorithmConfig()
    keys = ("advantage", "overlong_tokens", "length_penalty")
    values = {key: getattr(algorithm, key) for key in keys}
    return {f"algorithm.{k}": v for k, v in values.items() if v != getattr(usual, k)}


_WHERE = ("url", "api_key_variable")
"""Options of rewards that say where a server is, not what it answers."""


def _reward_identity(reward: RewardConfig) -> dict[str, Any]:
    """What of the rewards decides on their values, beside the first one's name; as little as differs from defaults, as
    checkpoints of before have none of it. A server's address does not."""
    unchanged = RewardTerm(name=reward.name)
    rows = {
        name: [term.name, term.weight, {k: v for k, v in term.options.items() if k not in _WHERE}]
        for name, term in reward.terms.items()
    }
    usual = [unchanged.name, unchanged.weight, unchanged.options]
    return {} if list(rows.values()) == [usual] else {"reward (weights, options)": rows}


# When a run may begin at step 0, and when that would lose what earlier starts trained.

_SHOWN = 3


def newer_unusable(survey: CheckpointSurvey) -> list[UnusableCheckpoint]:
    """Unusable checkpoints of later steps than the last written usable one's."""
    last = survey.complete[-1].step if survey.complete else -1
    return [unusable for unusable in survey.unusable if unusable.step > last]


def refuse_damage(on_damage: str, survey: CheckpointSurvey) -> None:
    """Let a run fall back past an unusable newest checkpoint only where ``checkpoint.on_damage`` says so.

    Raises DamagedCheckpointError otherwise. Without any usable one see :func:`refuse_fresh_start`.
    """
    newer = newer_unusable(survey)
    if survey.complete and newer and on_damage == "refuse":
        raise refused_damage(newer[0].reason, survey.complete)


def refused_damage(reason: str, older: Sequence[StoredCheckpoint]) -> DamagedCheckpointError:
    """The error for a damaged newest checkpoint. ``older``: usable ones before it, the last at the end."""
    back = f"checkpoint.on_damage=previous goes on from {older[-1].path.name}, " if older else ""
    return DamagedCheckpointError(f"{reason}; {back}run.resume=never begins anew")


def refuse_fresh_start(run: RunConfig, unusable: Sequence[str], history: records.History) -> None:
    """Raise ResumeError where a start at step 0 would begin a trained run anew.

    A run that ended before its first checkpoint was written has nothing to go on from and may begin anew.
    ``unusable``: what is wrong with each checkpoint that is there.
    """
    directory = run.directory
    remains = []
    if unusable:
        shown = "; ".join(unusable[:_SHOWN]) + ("; ..." if len(unusable) > _SHOWN else "")
        remains.append(f"{len(unusable)} checkpoint(s) that can't be used ({shown})")
    elif history.saved is not None:
        remains.append(f"no checkpoint, though one of step {history.saved} was written")
    elif history.counted:
        remains.append("no checkpoint, though one that was written is in the records")
    if history.damage is not None:
        remains.append(f"records that can't be read ({history.damage})")
    if not remains and run.resume == "required":
        remains.append("no checkpoint")
    if not remains:
        return
    if history.recorded is not None:
        remains.append(f"records up to step {history.recorded}")
    raise ResumeError(
        f"{directory} holds {' and '.join(remains)}; run.resume: {run.resume} would begin anew "
        f"at step 0. Bring the checkpoints back (is {directory}/{records.CHECKPOINTS_FOLDER} mounted?), or "
        "begin anew with run.resume=never, which sets aside what is there"
    )


def resume(
    run: RunConfig,
    checkpoints: CheckpointConfig,
    trainer: Trainer,
    store: CheckpointStore,
    identity: dict[str, Any],
    *,
    replays: bool,
) -> RunState | None:
    """The state of the checkpoint that the run goes on from, loaded into ``trainer``. Collective.

    None: the run begins at step 0, and what earlier starts recorded lies in a folder of its own, but for the rollouts
    of a run that ``replays`` them. Raises ResumeError where it can't go on although it should, DamagedCheckpointError
    where its checkpoint is damaged and ``checkpoint.on_damage`` does not let it fall back.
    """
    if run.resume == "never":
        _set_aside(run.directory, rollouts=not replays)
        return None
    survey = store.survey()
    refuse_damage(checkpoints.on_damage, survey)
    passed = {unusable.path: unusable.reason for unusable in newer_unusable(survey)}
    # The last written one; older ones only where it is damaged and may be passed over.
    for checkpoint in reversed(survey.complete):
        try:
            state = RunState.from_json(store.load(trainer, checkpoint))
            state.check_weights(trainer.weights_form(), trainer.weights_digest(), checkpoint.path)
        except DamagedCheckpointError as error:
            if checkpoints.on_damage == "refuse":
                raise refused_damage(str(error), survey.complete[:-1]) from error
            passed[checkpoint.path] = str(error)
            continue
        state.check_identity(identity, str(checkpoint.path))
        if passed:
            _leave_behind(run.directory, store, passed, state.step)
        log.info("resumed from %s", checkpoint.path)
        return state
    # Rank 0's view for all: NFS may show another rank another folder, and all must decide alike.
    history = records.History(**on_rank_0(lambda: asdict(records.read_history(run.directory))))
    damage = passed | {unusable.path: unusable.reason for unusable in survey.unusable}
    refuse_fresh_start(run, list(damage.values()), history)
    _set_aside(run.directory, rollouts=not replays)
    return None


def _leave_behind(
    directory: str, store: CheckpointStore, passed: dict[Path, str], step: int
) -> None:
    """Before a start that falls back to ``step``: rename what it passed, copy the records that it drops."""
    copy = on_rank_0(lambda: str(records.keep_copy(directory)))
    for path, reason in passed.items():
        store.set_aside(path)
        log.warning("damaged checkpoint, renamed and passed over: %s", reason)
    log.warning("records after step %d are dropped; a copy with them is in %s", step, copy)


def _set_aside(directory: str, *, rollouts: bool) -> None:
    """Before a start at step 0."""

    def act() -> str | None:
        folder = records.set_aside(directory, rollouts=rollouts)
        return None if folder is None else str(folder)

    folder = on_rank_0(act)
    if folder is not None:
        log.info("beginning anew; what earlier starts left is in %s", folder)


# What a start would stumble over after its first seconds: inputs, data, answers, checkpoints.

_NEEDED_FOR_DATA = ("data", "model.hf_checkpoint")
"""Keys without which the data can't be read."""
_NEEDED_FOR_SCORES = ("reward",)
"""Keys without which nothing can be scored."""


def data_and_resume_faults(
    config: TrainConfig, refused: Sequence[str] = (), answers: str | None = None
) -> list[str]:
    """Compare inputs with their hashes where a list has them, open the data, try the rewards, score every gold answer
    with them, and see where the run would resume.

    Loads no weights, starts nothing but reward workers, writes nothing but ``answers``: a file for the
    run that follows, which then need not score them again. ``refused``: what other checks have refused; what can't
    be looked at for one of these is left out.
    """
    faults: list[str] = []
    if config.run.sha256_list is not None:
        with _noting(faults, "run.sha256_list"):
            inputs.check_input_hashes(config.run.sha256_list)
    if not any(fault.startswith(_NEEDED_FOR_DATA) for fault in refused):
        with _noting(faults, "data"):
            data = inputs.RunData(config)
            # Each stage by itself, so that a fault of one hides no other's.
            with _noting(faults, "run.resume"):
                check_resume(config, data.train.sha256)
            if any(fault.startswith(_NEEDED_FOR_SCORES) for fault in refused):
                return faults
            with _noting(faults, "reward"):
                faults += data.reward_faults()
            with _noting(faults, "data"):
                bad = data.bad_answers()
                if answers is not None:
                    hand_over(Path(answers), data.scored, bad)
                data.settle(bad)
    return faults


def check_resume(config: TrainConfig, data_sha256: str) -> None:
    """Raise ResumeError or CheckpointError where a start would refuse the run's checkpoints."""
    if config.run.resume == "never":
        return
    directory = Path(config.run.directory)
    folders = CheckpointDirectory(directory / records.CHECKPOINTS_FOLDER, config.checkpoint.keep)
    survey = folders.survey()
    refuse_damage(config.checkpoint.on_damage, survey)
    if survey.complete:
        last = survey.complete[-1].path
        state = RunState.from_json(read_manifest(last)["state"])
        state.check_identity(identity_of(config, data_sha256), str(last))
        files = inputs.model_files(config.model.hf_checkpoint, config.lora.start_from)
        state.check_file_names(files.keys(), str(last))
        # Weights are hashed later, by the ranks: what holds none is read in milliseconds.
        sides = {n: sha256_of(path) for n, path in files.items() if path.suffix != inputs.WEIGHTS}
        state.check_files(sides, str(last))
    else:
        reasons = [unusable.reason for unusable in survey.unusable]
        refuse_fresh_start(config.run, reasons, records.read_history(directory))


@contextmanager
def _noting(faults: list[str], key: str) -> Iterator[None]:
    """What the block raises, of ``key``, is one of ``faults``."""
    try:
        yield
    except (RunError, OSError) as error:
        faults.append(f"{key}: {error}")
