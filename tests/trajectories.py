"""Trajectories for tests, and the comparison of two trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.answer_parsing import ReceivedAnswer, parse
from megatron_dppo.engine.protocol import GenerationRequest


def trajectory(
    prompt: Sequence[int], response: Sequence[int], *, advantage: float = 1.0, **columns: Any
) -> Trajectory:
    """A response to problem 0 with ``columns``. A column that is None is left out.

    ``rollout_log_probs`` are -0.5, -1, ... unless they are given.
    """
    given = {"rollout_log_probs": [-0.5 * (j + 1) for j in range(len(response))], **columns}
    kept = {name: values for name, values in given.items() if values is not None}
    return Trajectory.of_response(prompt, response, advantage=advantage, columns=kept)


def masked(
    token_ids: Any, loss_mask: Any, *, problem_id: int = 0, advantage: float = 0.0, **columns: Any
) -> Trajectory:
    """A trajectory of these tokens, of which those with a mask were sampled. Lists become arrays."""
    return Trajectory(problem_id, 0, token_ids, loss_mask, columns, advantage=advantage)


def same_column(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Whether values, type and shape are equal, or both are missing."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether every field of the record is equal."""
    plain = ("problem_id", "sample_index", "finish_reason", "text", "reward", "advantage")
    return (
        all(getattr(a, name) == getattr(b, name) for name in plain)
        and same_column(a.token_ids, b.token_ids)
        and same_column(a.loss_mask, b.loss_mask)
        and a.columns.keys() == b.columns.keys()
        and all(same_column(a.columns[name], b.columns[name]) for name in a.columns)
    )


def parse_answers(
    payload: bytes, requests: Sequence[GenerationRequest], versions: range | None = None
) -> list[Trajectory]:
    """Return the trajectories of an engine's answer that is JSON alone."""
    return parse(ReceivedAnswer(payload, requests, versions, {})).trajectories
