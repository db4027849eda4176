"""The spool: the scored responses since the newest checkpoint, kept so that restarted ranks need not sample them again.

    <run.directory>/spool/
      settings                   hash of the settings that the responses depend on
      trained.jsonl              {"step", "weights", "rounds"}: a step that was trained on, the hash of the resulting
                                 weights, and the number of rounds in which its problems were drawn
      rows.json                  metrics rows of the steps that the present start repeats, by the step
      step_<n>/draws.jsonl       {"round", "problems"}: the problems that were drawn for the batch of step n
      step_<n>/rank<r>.frames    the scored responses of leader r (``data/response_frames.py``)

Each leader appends its own responses in a background thread, as soon as they are scored. "Earlier ranks" are the ranks
before a restart, or the ranks of an earlier start of the run. Ranks that resume from the checkpoint of step k draw the
same problems as the earlier ranks. They find two sorts of responses in the spool: responses of steps that the earlier
ranks trained on, so that training repeats these steps exactly, and responses of unfinished batches. Steps up to the
newest checkpoint are removed.

A repeated step needs no server, and servers have no weights for it. So a step is repeated only if every rank has all of
its responses, undamaged. The first step that lacks a response ends the repetition: its problems, and its other
responses, are those of an unfinished batch, and all later steps are removed. A line of ``trained.jsonl`` is written
after the responses of the step are on the disk, and before servers receive the weights of the step. If one rank cannot
write, all ranks stop storing responses, with a warning, and the run goes on.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from megatron_dppo.metrics.records import read_step_lines, step_name, step_of_name
from megatron_dppo.rewards.verifier import Score
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import empty_folder, sync_to_disk, write_atomically
from megatron_dppo.trainer.collectives import first_failure, on_rank_0

log = logging.getLogger(__name__)

_SETTINGS = "settings"
_TRAINED = "trained.jsonl"
_ROWS = "rows.json"
_DRAWS = "draws.jsonl"
BatchKey = tuple[int, int]
"""Key of a response in the spool's files: (position of its group in the whole batch, index in the group)."""
JobKey = tuple[int, int]
"""Key of a response in this rank's job: (position of its problem in the job, index in the group)."""


@dataclass(frozen=True)
class OwnShare:
    """This rank's share of every batch.

    Attributes:
        own_positions: selects, from positions of groups in a batch, the positions of this rank's groups.
        group_size: responses per group.
        problems: the training problems, in the order of the indices that the sampler draws.
    """

    own_positions: Callable[[Sequence[int]], list[int]]
    group_size: int
    problems: Sequence[Problem]

    def problem_of_key(self, drawn_indices: Sequence[int]) -> dict[BatchKey, int] | None:
        """Return the problem id of each response in this rank's share of a batch; None for indices without a problem.

        ``drawn_indices``: indices of the batch's problems in the data, in the order of drawing.
        """
        if not all(0 <= index < len(self.problems) for index in drawn_indices):
            return None
        problem_ids: dict[BatchKey, int] = {}
        for position in self.own_positions(range(len(drawn_indices))):
            problem = self.problems[drawn_indices[position]]
            for index in range(self.group_size):
                problem_ids[position, index] = problem.problem_id
        return problem_ids


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
    _trained_rounds: dict[int, int] = field(default_factory=dict, init=False)
    """Step -> the number of rounds of draws, of the steps in ``trained_digests``."""
    _draws: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    _rounds: dict[int, int] = field(default_factory=dict, init=False)
    """Step -> the number of rounds that these ranks have drawn."""
    _files: dict[int, BinaryIO] = field(default_factory=dict, init=False)
    _failure: str | None = field(default=None, init=False)
    """The write error of this rank, or of another rank, after which nothing more is written."""

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "spool")

    def open(self, settings: str, step: int, share: OwnShare, *, is_fresh: bool) -> None:
        """Read the responses and draws that earlier ranks stored for the steps after ``step``. Collective.

        Args:
            settings: hash of the settings that responses depend on; files of other settings are removed.
            step: the step of the checkpoint that was loaded; 0 without a checkpoint.
            share: the responses that this rank needs to repeat a step.
            is_fresh: whether the run begins anew, so that stored responses are removed.
        """
        if self.folder is None:
            return
        kept = on_rank_0(partial(self._read, settings, step, is_fresh=is_fresh))
        if kept is None:
            self.folder = None
            return
        trained, draws = kept
        for line in trained:
            # Step n makes weight version n.
            version, digest = line["step"], line["weights"]
            if version <= step:
                self.known_digests[version] = digest
            else:
                self.trained_digests[version] = digest
                self._trained_rounds[version] = line["rounds"]
        self._draws = {(drawn_step, round_): problems for drawn_step, round_, problems in draws}
        self._require_all_responses(share)

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
        self._rounds[step] = round_
        if self.rank == 0 and self._draws.get((step, round_)) != list(problems):
            line = json.dumps({"step": step, "round": round_, "problems": list(problems)}) + "\n"
            self._submit(self._append_line, f"{step_name(step)}/{_DRAWS}", line)

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
        oldest_version = self.oldest_version(step)
        responses: dict[BatchKey, ScoredResponse] = {}
        try:
            if not path.is_file():
                return {}
            for response in read_frames(path):
                versions = {span.weight_version for span in response.trajectory.version_spans}
                if all(oldest_version <= version < step for version in versions):
                    responses[response.key] = response
        except OSError as error:
            log.warning("%s: %s; its responses are not used", path, error.strerror)
            return {}
        return responses

    def keep(self, step: int, response: ScoredResponse) -> None:
        """Append a response in the background."""
        self._submit(self._append_frame, step, response)

    def flush(self) -> None:
        """Wait until all earlier writes are done."""
        self._writer.submit(_nothing).result()

    def sync(self, step: int) -> None:
        """Put the stored responses of ``step`` on the disk, on every rank. Collective."""
        self._submit(self._sync_frames, step)
        self._agree_on_writes()

    def note_trained(self, step: int, digest: str) -> None:
        """Store the hash of the weights that ``step`` made, before servers receive these weights. Collective.

        Rank 0 writes the hash. Call ``sync`` first. If earlier ranks trained on the step, the hash is compared with the
        hash of their weights instead.
        """
        if step in self.trained_digests:
            self._compare(step, digest)
        elif step not in self.known_digests:
            self._write_trained(step, digest)
        self._submit(self._close_file, step)
        self._agree_on_writes()

    def read_rows(self) -> dict[str, Any]:
        """Return the metrics rows that an earlier start has stored by ``keep_rows``. Called on rank 0."""
        if self.folder is None:
            return {}
        try:
            rows: dict[str, Any] = json.loads((self.folder / _ROWS).read_text())
        except (OSError, ValueError):
            return {}
        return rows

    def keep_rows(self, rows: Mapping[str, Any]) -> None:
        """Store metrics rows that the records are about to lose. Called on rank 0."""
        if self.folder is not None:
            self._write(write_atomically, self.folder / _ROWS, json.dumps(rows))

    def forget_until(self, step: int) -> None:
        """Remove the steps up to ``step``, whose checkpoint is complete. Called on rank 0, from any thread."""
        if self.folder is None:
            return
        for path in self.folder.glob("step_*"):
            if step_of_name(path.name) <= step:
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
        self._write_trained(step, digest)
        self._submit(self._drop_untrained)
        self.uses_untrained = False
        log.warning(
            "step %d was repeated from the responses of the earlier ranks, and its weights have the hash %s, those of "
            "the earlier ranks %s: the responses of unfinished batches are sampled anew",
            step,
            digest,
            expected_hash,
        )

    def _write_trained(self, step: int, digest: str) -> None:
        """Append ``step`` to the file of trained steps, on rank 0."""
        if self.rank == 0:
            rounds = self._rounds.get(step, 0)
            line = json.dumps({"step": step, "weights": digest, "rounds": rounds}) + "\n"
            self._submit(self._append_line, _TRAINED, line)

    def _require_all_responses(self, share: OwnShare) -> None:
        """End the repetition before the first step of which a rank lacks a response. Collective."""
        for step in sorted(self.trained_digests):
            fault = first_failure(self._fault_of(step, share))
            if fault is None:
                continue
            log.warning(
                "step %d is not repeated from the responses of the earlier ranks, but trained anew, as all later "
                "steps: %s",
                step,
                fault,
            )
            self._end_repetition(step)
            return

    def _fault_of(self, step: int, share: OwnShare) -> str | None:
        """Return why this rank can't repeat ``step`` from stored responses; None if it can."""
        rounds = range(1, self._trained_rounds[step] + 1)
        drawn_indices: list[int] = []
        for round_ in rounds:
            drawn_indices += self._draws.get((step, round_), [])
        problem_ids = share.problem_of_key(drawn_indices)
        if not rounds or problem_ids is None or any((step, r) not in self._draws for r in rounds):
            return f"{self.folder} lacks the problems that were drawn for the step"
        responses = self.found(step)
        whole_count = 0
        for key, problem_id in problem_ids.items():
            response = responses.get(key)
            whole_count += response is not None and response.trajectory.problem_id == problem_id
        if whole_count == len(problem_ids):
            return None
        return f"{self._frames_of(step)} has {whole_count} of {len(problem_ids)} responses"

    def _end_repetition(self, step: int) -> None:
        """Forget that earlier ranks trained on ``step`` and later steps, and remove the later steps. Collective."""
        self.trained_digests = {s: d for s, d in self.trained_digests.items() if s < step}
        self._draws = {key: drawn for key, drawn in self._draws.items() if key[0] <= step}

        def remove_later() -> None:
            assert self.folder is not None
            for path in self.folder.glob("step_*"):
                if step_of_name(path.name) > step:
                    shutil.rmtree(path)
            lines = read_step_lines(self.folder / _TRAINED)
            kept_lines = [json.dumps(line) + "\n" for line in lines if line["step"] < step]
            write_atomically(self.folder / _TRAINED, "".join(kept_lines))

        if self.rank == 0:
            self._write(remove_later)
        self._agree_on_writes()

    def _agree_on_writes(self) -> None:
        """Wait for this rank's writes. If one of any rank failed, store nothing more on all ranks. Collective."""
        if self.folder is None:
            return
        self.flush()
        failure = first_failure(self._failure)
        # This rank's own failure may be newer than the agreement, so do not overwrite it.
        if failure is not None and self._failure is None:
            self._failure = failure
            if self.rank == 0:
                log.warning("%s; so no rank keeps responses any longer", failure)

    def _read(self, settings: str, step: int, *, is_fresh: bool) -> list[Any] | None:
        """Return the results of ``_read_trained`` and ``_read_draws``.

        If the spool's settings differ or the run is new, empty the spool first. Returns None if it can't be emptied.
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
            try:
                self._empty(settings)
            except OSError as fault:
                log.warning(
                    "spool: %s can't be emptied, so no responses are kept: %s", self.folder, fault
                )
                return None
            return [[], []]

    def _empty(self, settings: str) -> None:
        """Remove all files, and write ``settings`` anew, so that the next start finds the responses of this start."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        empty_folder(self.folder)
        write_atomically(self.folder / _SETTINGS, settings)

    def _read_trained(self, step: int) -> list[dict[str, Any]]:
        """Return the line of each trained step, and rewrite the file with only these lines.

        A step up to the checkpoint's ``step`` is included if its weights may sample the next batch. Later steps are
        included up to the first step that the file lacks.
        """
        assert self.folder is not None
        path = self.folder / _TRAINED
        lines = read_step_lines(path) if path.is_file() else []
        line_of_step = {line["step"]: line for line in lines}
        first_version = self.oldest_version(step + 1)
        steps = [version for version in sorted(line_of_step) if first_version <= version <= step]
        while step + 1 in line_of_step:
            step += 1
            steps.append(step)
        kept_lines: list[dict[str, Any]] = []
        for number in steps:
            line = line_of_step[number]
            # Earlier versions did not write the number of rounds.
            rounds = line.get("rounds", 0)
            kept_lines.append({"step": number, "weights": str(line["weights"]), "rounds": rounds})
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept_lines))
        return kept_lines

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
        return self.folder / step_name(step) / f"rank{self.rank}.frames"

    @property
    def _is_off(self) -> bool:
        """Whether nothing is written: without a folder, and after a write error."""
        return self.folder is None or self._failure is not None

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
        except (OSError, RunError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._failure = f"rank {self.rank} can't write in {self.folder}: {reason}"
            log.warning(
                "%s; responses are no longer kept for a restart of the ranks", self._failure
            )

    def _append_frame(self, step: int, response: ScoredResponse) -> None:
        if step not in self._files:
            self._files[step] = open_frames(self._frames_of(step))
        append_frame(self._files[step], response)

    def _sync_frames(self, step: int) -> None:
        """Put this rank's responses of ``step``, and the names of their file and folder, on the disk."""
        assert self.folder is not None
        path = self._frames_of(step)
        if path.is_file():
            sync_to_disk(path)
            sync_to_disk(path.parent)
        sync_to_disk(self.folder)

    def _drop_untrained(self) -> None:
        """Remove this rank's responses of steps that earlier ranks did not train on."""
        assert self.folder is not None
        for path in self.folder.glob(f"step_*/rank{self.rank}.frames"):
            step = step_of_name(path.parent.name)
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
            file.flush()
            os.fsync(file.fileno())


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


def settings_of_responses(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings. Of the section ``run`` keep only the keys that affect responses: folder and seed."""
    run = {key: settings["run"][key] for key in ("directory", "seed")}
    return {**settings, "run": run}
