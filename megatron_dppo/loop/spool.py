"""The spool: the scored responses since the newest checkpoint, kept so that restarted ranks need not sample them again.

    <run.directory>/spool/
      settings                   hash of the settings that the responses depend on
      trained.jsonl              {"step", "weights"}: a step that was trained on, and the hash of the resulting weights
      step_<n>/draws.jsonl       {"round", "problems"}: the problems that were drawn for the batch of step n
      step_<n>/rank<r>.frames    the scored responses of leader r (``data/response_frames.py``)

Each leader appends its own responses in a background thread, as soon as they are scored. "Earlier ranks" are the ranks
before a restart, or the ranks of an earlier start of the run. Ranks that resume from the checkpoint of step k draw the
same problems as the earlier ranks. They find two sorts of responses in the spool: responses of steps that the earlier
ranks trained on, so that training repeats these steps exactly, and responses of unfinished batches. Steps up to the
newest checkpoint are removed. A write error ends the use of the spool with a warning, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dppo.data.response_frames import (
    ScoredResponse,
    append_frame,
    open_frames,
    read_frames,
)
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.metrics.records import read_step_lines
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically
from megatron_dppo.trainer.collectives import on_rank_0

log = logging.getLogger(__name__)

_SETTINGS = "settings"
_TRAINED = "trained.jsonl"
_DRAWS = "draws.jsonl"
BatchKey = tuple[int, int]
"""Key of a response in the spool's files: (position of its group in the whole batch, index in the group)."""
JobKey = tuple[int, int]
"""Key of a response in this rank's job: (position of its problem in the job, index in the group)."""


@dataclass
class ResponseSpool:
    """The spool of one rank. Call ``open`` first; ``close`` waits until everything is written.

    Attributes:
        folder: the spool's folder; None if no responses are kept.
        rank: global rank.
        oldest_version: returns the oldest weight version that may sample the batch of a step.
        trained_digests: step -> hash of the weights that earlier ranks made in this step. The keys are the steps since
            the checkpoint.
        known_digests: weight version -> hash of the weights. The keys are versions up to the checkpoint's version, if
            they may have sampled a stored response.
    """

    folder: Path | None
    rank: int
    oldest_version: Callable[[int], int]
    trained_digests: dict[int, str] = field(default_factory=dict, init=False)
    known_digests: dict[int, str] = field(default_factory=dict, init=False)
    uses_untrained: bool = field(default=True, init=False)
    """Whether stored responses of batches that were not trained on may be used. False if a repeated step made other
    weights than before the restart: these responses were then sampled by weights that the run no longer has."""
    _draws: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    _files: dict[int, BinaryIO] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "spool")
        # Nothing is written after a write error, or without a folder.
        self._is_off = self.folder is None

    def open(self, settings: str, step: int, *, is_fresh: bool) -> None:
        """Read the responses and draws that earlier ranks stored for the steps after ``step``. Collective.

        Args:
            settings: hash of the settings that responses depend on; files of other settings are removed.
            step: the step of the checkpoint that was loaded; 0 without a checkpoint.
            is_fresh: whether the run begins anew, so that stored responses are removed.
        """
        if self.folder is None:
            return
        trained, draws = on_rank_0(partial(self._read, settings, step, is_fresh=is_fresh))
        # Step n makes weight version n.
        self.known_digests = {version: digest for version, digest in trained if version <= step}
        self.trained_digests = {version: digest for version, digest in trained if version > step}
        self._draws = {(drawn_step, round_): problems for drawn_step, round_, problems in draws}

    @property
    def last_trained(self) -> int:
        """The last step that earlier ranks have trained on since the checkpoint; 0 if there is no such step."""
        return max(self.trained_digests, default=0)

    def draws(self, step: int, round_: int, count: int) -> list[int] | None:
        """Return the ``count`` problems that earlier ranks drew in this round of a step's batch; None if unknown."""
        problems = self._draws.get((step, round_))
        if problems is None or len(problems) != count:
            return None
        return problems

    def note_draws(self, step: int, round_: int, problems: Sequence[int]) -> None:
        """Store the problems of a round. Runs on every rank; rank 0 writes."""
        if self.rank == 0 and self._draws.get((step, round_)) != list(problems):
            line = json.dumps({"step": step, "round": round_, "problems": list(problems)}) + "\n"
            self._submit(self._append_line, f"{_step_name(step)}/{_DRAWS}", line)

    def part(self, step: int, positions: Sequence[int]) -> StepPart:
        """Return this rank's part of a step's batch. ``positions``: positions of its groups in the batch."""
        return StepPart(self, step, tuple(positions))

    def found(self, step: int) -> dict[BatchKey, ScoredResponse]:
        """Return this rank's stored responses of a step by key.

        Two kinds are left out: damaged responses, and responses with tokens of weights that are too old for the step.
        """
        if self.folder is None or not (self.uses_untrained or step in self.trained_digests):
            return {}
        path = self._frames_of(step)
        if not path.is_file():
            return {}
        oldest_version = self.oldest_version(step)
        responses: dict[BatchKey, ScoredResponse] = {}
        for response in read_frames(path):
            versions = {span.weight_version for span in response.trajectory.version_spans}
            if all(oldest_version <= version < step for version in versions):
                responses[response.key] = response
        return responses

    def keep(self, step: int, response: ScoredResponse) -> None:
        """Append a response in the background."""
        self._submit(self._append_frame, step, response)

    def flush(self) -> None:
        """Wait until all stored responses are on the disk."""
        self._writer.submit(_nothing).result()

    def note_trained(self, step: int, digest: str) -> None:
        """Store the hash of the weights that ``step`` made. Rank 0 writes the hash.

        Call this method once all ranks have written their responses of the step. If earlier ranks trained on the step,
        the hash is compared with the hash of their weights instead.
        """
        if step in self.trained_digests:
            self._compare(step, digest)
        elif self.rank == 0 and step not in self.known_digests:
            line = json.dumps({"step": step, "weights": digest}) + "\n"
            self._submit(self._append_line, _TRAINED, line)
        self._submit(self._close_file, step)

    def forget_until(self, step: int) -> None:
        """Remove the steps up to ``step``, whose checkpoint is complete. Called on rank 0, from any thread."""
        if self.folder is None:
            return
        for path in self.folder.glob("step_*"):
            if int(path.name.removeprefix("step_")) <= step:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self._writer.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _compare(self, step: int, digest: str) -> None:
        """Compare the weights of a repeated step. If they differ, discard the responses of unfinished batches."""
        expected_hash = self.trained_digests[step]
        if digest == expected_hash:
            log.info(
                "step %d was repeated from the responses of the earlier ranks, bit for bit", step
            )
            return
        if self.rank == 0:
            line = json.dumps({"step": step, "weights": digest}) + "\n"
            self._submit(self._append_line, _TRAINED, line)
        self._submit(self._drop_untrained)
        self.uses_untrained = False
        log.warning(
            "step %d was repeated from the responses of the earlier ranks, and its weights have the hash %s, those of "
            "the earlier ranks %s: the responses of unfinished batches are sampled anew",
            step,
            digest,
            expected_hash,
        )

    def _read(self, settings: str, step: int, *, is_fresh: bool) -> list[Any]:
        """Return the results of ``_read_trained`` and ``_read_draws``.

        If the spool's settings differ or the run is new, empty the spool first.
        """
        assert self.folder is not None
        path = self.folder / _SETTINGS
        try:
            is_known = path.is_file() and path.read_text() == settings
            if is_fresh or not is_known:
                self._empty(settings)
                return [[], []]
            self.forget_until(step)
            return [self._read_trained(step), self._read_draws()]
        except (OSError, RunError, KeyError) as error:
            log.warning("spool: nothing of earlier ranks is used: %s", error)
            # Ignore an error here: the first attempt to store a response then fails too, and logs a warning.
            with suppress(OSError):
                self._empty(settings)
            return [[], []]

    def _empty(self, settings: str) -> None:
        """Remove all files, and write ``settings`` anew, so that the next start finds the responses of this start."""
        assert self.folder is not None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_atomically(self.folder / _SETTINGS, settings)

    def _read_trained(self, step: int) -> list[tuple[int, str]]:
        """Return pairs (step, hash of the step's weights), and rewrite the file with only these pairs.

        A step up to the checkpoint's ``step`` is included if its weights may sample the next batch. Later steps are
        included up to the first step that the file lacks.
        """
        assert self.folder is not None
        path = self.folder / _TRAINED
        lines = read_step_lines(path) if path.is_file() else []
        digests = {line["step"]: str(line["weights"]) for line in lines}
        first_version = self.oldest_version(step + 1)
        steps = [version for version in sorted(digests) if first_version <= version <= step]
        while step + 1 in digests:
            step += 1
            steps.append(step)
        trained = [(number, digests[number]) for number in steps]
        kept_lines = [json.dumps({"step": s, "weights": d}) + "\n" for s, d in trained]
        write_atomically(path, "".join(kept_lines))
        return trained

    def _read_draws(self) -> list[tuple[int, int, list[int]]]:
        """Return (step, round, problems) of each draw."""
        assert self.folder is not None
        draws = []
        for path in sorted(self.folder.glob(f"step_*/{_DRAWS}")):
            lines = read_step_lines(path)
            # Drop the incomplete line of a killed rank: the next line would be appended to it.
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
            draws += [(line["step"], line["round"], line["problems"]) for line in lines]
        return draws

    def _frames_of(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / _step_name(step) / f"rank{self.rank}.frames"

    def _submit(self, write: Callable[..., None], *arguments: Any) -> None:
        """Call ``write`` in the writing thread, after all earlier calls."""
        if not self._is_off:
            self._writer.submit(self._write, write, *arguments)

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        # An earlier call in the queue may have failed.
        if self._is_off:
            return
        try:
            write(*arguments)
        except OSError as error:
            self._is_off = True
            log.warning(
                "%s: %s; responses are no longer kept for a restart of the ranks",
                self.folder,
                error.strerror,
            )

    def _append_frame(self, step: int, response: ScoredResponse) -> None:
        if step not in self._files:
            self._files[step] = open_frames(self._frames_of(step))
        append_frame(self._files[step], response)

    def _drop_untrained(self) -> None:
        """Remove this rank's responses of steps that earlier ranks did not train on."""
        assert self.folder is not None
        for path in self.folder.glob(f"step_*/rank{self.rank}.frames"):
            step = int(path.parent.name.removeprefix("step_"))
            if step > self.last_trained:
                self._close_file(step)
                path.unlink()

    def _close_file(self, step: int) -> None:
        file = self._files.pop(step, None)
        if file is not None:
            file.close()

    def _append_line(self, name: str, line: str) -> None:
        assert self.folder is not None
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(line)


@dataclass(frozen=True)
class StepPart:
    """This rank's part of one round of a step's batch.

    ``positions``: positions of this rank's groups in the batch, in the job's order.
    """

    spool: ResponseSpool
    step: int
    positions: tuple[int, ...]

    def found(self, problems: Sequence[Problem]) -> dict[JobKey, tuple[Trajectory, Score]]:
        """Return the stored responses to ``problems``, the job's problems, with their scores."""
        job_position_of = {position: i for i, position in enumerate(self.positions)}
        scored_responses: dict[JobKey, tuple[Trajectory, Score]] = {}
        for (batch_position, index), response in self.spool.found(self.step).items():
            job_position = job_position_of.get(batch_position)
            if job_position is None:
                continue
            # Earlier ranks may have drawn another problem at this position.
            if response.trajectory.problem_id != problems[job_position].problem_id:
                continue
            scored_responses[job_position, index] = response.trajectory, Score(**response.score)
        return scored_responses

    def keep(self, key: JobKey, trajectory: Trajectory, score: Score) -> None:
        """Store a response, unless its reward has no value to train on."""
        if score.unavailable is None and score.refusal is None:
            score_values = {**asdict(score), "components": dict(score.components)}
            job_position, index = key
            batch_key = (self.positions[job_position], index)
            self.spool.keep(self.step, ScoredResponse(batch_key, trajectory, score_values))


def _nothing() -> None:
    """Do nothing. When the writing thread has made this call, all earlier calls are done."""


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def settings_of_responses(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings. Of the section ``run`` keep only the keys that affect responses: folder and seed."""
    run = {key: settings["run"][key] for key in ("directory", "seed")}
    return {**settings, "run": run}
