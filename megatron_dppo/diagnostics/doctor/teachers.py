"""The scores of a run's teachers, as sides that the doctor compares with the teachers' own checkpoints.

A teacher has a side for the scores that its batch was saved with, a side for the mass of the saved Top-K, and a side
for each of its servers that answers now.
The weights of a teacher count as version 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.diagnostics.doctor.diagnosis import Side
from megatron_dppo.diagnostics.explain.explanation import as_float64, as_int64
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.fleet.endpoint import record_of_command
from megatron_dppo.fleet.record import Keys
from megatron_dppo.fleet.teachers import scores_by
from megatron_dppo.loop.teachers import TeacherPrompts, score_response
from megatron_dppo.spec import RunSpec, TeacherSpec
from megatron_dppo.system.async_runner import AsyncRunner

COLUMN = "teacher_log_probs"
TOPK_IDS = "teacher_topk_ids"
TOPK_LOG_PROBS = "teacher_topk_log_probs"


@dataclass(frozen=True)
class TeacherCase:
    """The responses that a teacher scores.

    Attributes:
        teacher: the teacher.
        config: configuration of the teacher's servers.
        positions: positions of the responses in the run's batch.
        batch: the responses as the teacher sees them.
    """

    teacher: TeacherSpec
    config: TrainConfig
    positions: Sequence[int]
    batch: Sequence[Trajectory]

    @property
    def folder(self) -> Path:
        """Hugging Face folder of the teacher."""
        return Path(self.config.model.hf_checkpoint)

    def sides(self, unexamined: dict[str, str]) -> Iterator[Side]:
        """Yield the saved scores, then each server's. If a server has none, the reason goes into ``unexamined``."""
        if all(COLUMN in t.columns for t in self.batch):
            yield self._side(self.name, [t.column(COLUMN) for t in self.batch])
        for url in self._urls(unexamined):
            server_name = f"{self.name} at {url}"
            try:
                with AsyncRunner() as runner:
                    scores = runner.run(self._scores_by(url))
            except (EngineError, TimeoutError) as error:
                unexamined[server_name] = str(error) or "no answer"
                continue
            yield self._side(server_name, scores)

    def topk_side(self) -> Side | None:
        """Return the mass of the saved Top-K at each token; None if there is no Top-K, or some responses lack it."""
        if not all({TOPK_IDS, TOPK_LOG_PROBS} <= t.columns.keys() for t in self.batch):
            return None
        masses: list[np.ndarray] = []
        for t in self.batch:
            log_probs = as_float64(t.column(TOPK_LOG_PROBS))
            masses.append(_mass(t, log_probs).numpy())
        return self._side(f"{self.name}, Top-K", masses)

    @property
    def name(self) -> str:
        """Name of the side of the saved scores. The other sides' names begin with it."""
        return f"teacher {self.teacher.name}"

    def _side(self, name: str, scores: Sequence[np.ndarray]) -> Side:
        log_probs = tuple(as_float64(row) for row in scores)
        return Side(name, 0, tuple(range(len(self.batch))), log_probs)

    def _urls(self, unexamined: dict[str, str]) -> list[str]:
        """Return the addresses of the teacher's servers: attached ones, and those that the run runs now."""
        urls = list(self.teacher.servers.urls)
        try:
            servers = record_of_command(self.config.run.directory).teachers()
        except (EngineError, ValueError) as error:
            unexamined[f"started servers of {self.name}"] = str(error)
            return urls
        return urls + [server.url for server in servers if server.teacher == self.teacher.name]

    async def _scores_by(self, url: str) -> list[np.ndarray]:
        keys = Keys.of_environment()
        vocabulary = self.teacher.model.shape.vocab_size
        async with EngineClient(url, keys.api, ca_file=self.config.engine.ca_file) as client:
            score = partial(scores_by, client)
            async with asyncio.timeout(self.config.distillation.request_timeout_s):
                rows = await asyncio.gather(
                    *(score_response(score, t, 0, vocabulary) for t in self.batch)
                )
        return [columns[COLUMN] for columns in rows]


def reference_topk_mass(t: Trajectory, log_probs: Tensor) -> Tensor:
    """Return log of the reference's mass on the ids of the saved Top-K. It is a Reading."""
    ids = as_int64(t.column(TOPK_IDS))
    return _mass(t, log_probs.gather(-1, ids.clamp(min=0)))


def _mass(t: Trajectory, topk_log_probs: Tensor) -> Tensor:
    """Return log of the mass of the Top-K at each token, [N]. ``topk_log_probs``: [N, K]."""
    is_empty = torch.from_numpy(t.column(TOPK_IDS) < 0)
    return topk_log_probs.masked_fill(is_empty, -torch.inf).logsumexp(-1)


def teacher_cases(
    config: TrainConfig,
    prompts: TeacherPrompts,
    problems: Sequence[Problem],
    batch: Sequence[Trajectory],
) -> list[TeacherCase]:
    """Return the case of each teacher that has responses to ``problems`` with a token. Raises ModelError, OSError."""
    problem_by_id = {problem.problem_id: problem for problem in problems}
    seen_by: dict[str, dict[int, Trajectory]] = {}
    for position, response in enumerate(batch):
        problem = problem_by_id.get(response.problem_id)
        if problem is not None and response.sampled:
            seen = seen_by.setdefault(prompts.teacher_of(problem), {})
            # The recorded experts are the policy's.
            seen[position] = prompts.seen(problem, response).without("routed_experts")
    cases: list[TeacherCase] = []
    for teacher in RunSpec.of_checked(config).teachers:
        seen = seen_by.get(teacher.name, {})
        if seen:
            serving = teacher.serving_config(config)
            cases.append(TeacherCase(teacher, serving, list(seen), list(seen.values())))
    return cases
