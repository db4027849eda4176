"""What a start would stumble over after its first seconds: inputs, data, answers, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.records import DataError
from megatron_dppo.loop.fresh_start import refuse_damage, refuse_fresh_start
from megatron_dppo.loop.input_hashes import (
    InputError,
    check_input_hashes,
    model_files,
    sha256_of,
    side_files,
)
from megatron_dppo.loop.run_data import RunData
from megatron_dppo.loop.state import ResumeError, RunState, identity_of
from megatron_dppo.metrics.history import CHECKPOINTS_FOLDER, read_history
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.rewards.checked_answers import hand_over
from megatron_dppo.rewards.verifier import VerifierError
from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, read_manifest

_NEEDED_FOR_DATA = ("data", "model.hf_checkpoint", "reward")
"""Keys without which the data can't be read and scored."""


def data_and_resume_problems(
    config: TrainConfig, refused: Sequence[str] = (), answers: str | None = None
) -> list[str]:
    """Compare inputs with their hashes where a list has them, open the data, score every gold answer with
    the reward, and see where the run would resume.

    Loads no weights, starts nothing but reward workers, writes nothing but ``answers``: a file for the
    run that follows, which then need not score them again. ``refused``: what other checks have refused; what can't
    be looked at for one of these is left out.
    """
    data: list[RunData] = []
    problems = []
    if (listed := config.run.sha256_list) is not None:
        problems += _problem("run.sha256_list", lambda: check_input_hashes(listed))
    if not any(problem.startswith(_NEEDED_FOR_DATA) for problem in refused):
        problems += _problem("data", lambda: data.append(_checked_data(config, answers)))
    if data:
        sha256 = data[0].train.sha256
        problems += _problem("run.resume", lambda: check_resume(config, sha256))
    return problems


def check_resume(config: TrainConfig, data_sha256: str) -> None:
    """Raise ResumeError or CheckpointError where a start would refuse the run's checkpoints."""
    if config.run.resume == "never":
        return
    directory = Path(config.run.directory)
    folders = CheckpointDirectory(directory / CHECKPOINTS_FOLDER, config.checkpoint.keep)
    survey = folders.survey()
    refuse_damage(config, survey)
    if survey.complete:
        last = survey.complete[-1].path
        state = RunState.from_json(read_manifest(last)["state"])
        state.check_identity(identity_of(config, data_sha256), str(last))
        state.check_file_names(model_files(config).keys(), str(last))
        sides = side_files(config).items()
        state.check_files({name: sha256_of(path) for name, path in sides}, str(last))
    else:
        reasons = [unusable.reason for unusable in survey.unusable]
        refuse_fresh_start(config, reasons, read_history(directory))


def _checked_data(config: TrainConfig, answers: str | None) -> RunData:
    data = RunData(config)
    bad = data.bad_answers()
    if answers is not None:
        hand_over(Path(answers), data.scored, bad)
    data.settle(bad)
    return data


def _problem(key: str, check: Callable[[], None]) -> list[str]:
    try:
        check()
    except (CheckpointError, DataError, InputError, ResumeError, VerifierError, OSError) as error:
        return [f"{key}: {error}"]
    return []
