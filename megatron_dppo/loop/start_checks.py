"""Checks of a start before any process runs: inputs, data, answers and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop import input_hashes, inputs
from megatron_dppo.loop.resuming import check_damage, check_fresh_start
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.run_state import RunState, changes_of, settings_of
from megatron_dppo.loop.teachers import TeacherPrompts
from megatron_dppo.metrics import records
from megatron_dppo.rewards.checked_answers import hand_over
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import sha256_of
from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, read_manifest

_NEEDED_FOR_DATA = ("data", "model.hf_checkpoint")
"""Sections and keys without which the data can't be read."""
_NEEDED_FOR_SCORES = ("reward",)
"""Sections without which responses can't be scored."""


def data_and_resume_faults(
    config: TrainConfig, known_faults: Sequence[str] = (), answers: str | None = None
) -> list[str]:
    """Check the inputs' hashes, the data, the rewards, the gold answers and the checkpoint; return every fault.

    The function loads no weights and starts no processes except reward workers.

    Args:
        config: configuration of the run.
        known_faults: faults of other checks, and keys with a fault. Each text begins with the key. Checks that need one
            of these keys are skipped.
        answers: file for the faults of the gold answers. The run that follows reads the file, and need not score the
            answers again.
    """
    faults: list[str] = []
    if config.run.sha256_list is not None:
        with _noting(faults, "run.sha256_list"):
            input_hashes.check_input_hashes(config.run.sha256_list)
    if not any(fault.startswith(_NEEDED_FOR_DATA) for fault in known_faults):
        with _noting(faults, "data"):
            data = inputs.RunData(config)
            # Each check has its own block, so that the next check runs even if this check finds a fault.
            with _noting(faults, "run.resume"):
                check_resume(config, data.train.sha256)
            if config.distillation.teachers and not config.rollout.replay_from:
                with _noting(faults, "distillation"):
                    TeacherPrompts(config, data)
            if any(fault.startswith(_NEEDED_FOR_SCORES) for fault in known_faults):
                return faults
            with _noting(faults, "reward"):
                faults += data.reward_faults()
            with _noting(faults, "data"):
                bad_answers = data.bad_answers()
                if answers is not None:
                    hand_over(Path(answers), data.answer_check_inputs, bad_answers)
                data.refuse_or_drop(bad_answers)
    return faults


def check_resume(config: TrainConfig, data_sha256: str) -> None:
    """Raise ResumeError or CheckpointError if a start would refuse the run's checkpoints."""
    if config.run.resume == "never":
        return
    directory = Path(config.run.directory)
    checkpoint_directory = CheckpointDirectory(
        directory / records.CHECKPOINTS_FOLDER, config.checkpoint.keep
    )
    survey = checkpoint_directory.survey()
    check_damage(config.checkpoint.on_damage, survey)
    if not survey.complete:
        reasons = [unusable.reason for unusable in survey.unusable]
        check_fresh_start(config.run, reasons, records.read_history(directory))
        return
    newest = survey.complete[-1].path
    state = RunState.from_json(read_manifest(newest)["state"])
    state.check_identity(identity_of(config, data_sha256), str(newest))
    files = inputs.model_files(config.model.hf_checkpoint, config.lora.start_from)
    state.check_file_names(files.keys(), str(newest))
    # Hash only the small files here, in milliseconds. The ranks hash the weights later.
    small_hashes: dict[str, str] = {}
    for name, path in files.items():
        if path.suffix != inputs.WEIGHTS_SUFFIX:
            small_hashes[name] = sha256_of(path)
    state.check_files(small_hashes, str(newest))


@contextmanager
def _noting(faults: list[str], key: str) -> Iterator[None]:
    """Append the error that the block raises to ``faults``, prefixed with the configuration's ``key``."""
    try:
        yield
    except (RunError, OSError) as error:
        faults.append(f"{key}: {error}")


def changes_since_checkpoint(config: TrainConfig) -> str | None:
    """Return a sentence with each key of the configuration that changed since the checkpoint that a start would load.

    Returns None without a checkpoint, or if no key changed.
    """
    if config.run.resume == "never":
        return None
    directory = Path(config.run.directory) / records.CHECKPOINTS_FOLDER
    survey = CheckpointDirectory(directory, config.checkpoint.keep).survey()
    if not survey.complete:
        return None
    state = RunState.from_json(read_manifest(survey.complete[-1].path)["state"])
    return changes_of(state, settings_of(config))
