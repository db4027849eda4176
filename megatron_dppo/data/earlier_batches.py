"""Batch files of version 1, in which each trajectory was a prompt and a response.

``counts`` [n, 6]: problem, sample, prompt tokens, response tokens, finish reason, version spans.
Read alone: ``trajectory_codec`` writes the present form.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from megatron_dppo.data.flat_arrays import split
from megatron_dppo.data.trajectory import FINISH_REASONS, Trajectory


def is_earlier(names: Container[str]) -> bool:
    """Whether a file with arrays of these names has the form that this module reads."""
    return "counts" in names


def from_earlier(arrays: Mapping[str, np.ndarray]) -> list[Trajectory]:
    """The batch. Raises KeyError, ValueError and IndexError where it is none."""
    counts, scores = arrays["counts"], arrays["scores"]
    prompts = split(arrays["prompt_ids"], counts[:, 2])
    responses = split(arrays["response_ids"], counts[:, 3])
    spans = split(arrays["weight_versions"], counts[:, 5])
    per_token = {
        name: split(arrays[name], counts[:, 3])
        for name in ("rollout_log_probs", "topk_ids", "topk_log_probs")
        if name in arrays
    }
    routing = _routing(arrays, counts)
    batch = []
    for i, (problem, sample, _, _, reason, _) in enumerate(counts.tolist()):
        columns = {name: parts[i] for name, parts in per_token.items()} | routing[i]
        if len(arrays["weight_versions"]):
            versions, starts, ends = spans[i].T
            columns["weight_version"] = np.repeat(versions, ends - starts).astype(np.int32)
        batch.append(
            Trajectory.of_response(
                prompts[i],
                responses[i],
                problem_id=problem,
                sample_index=sample,
                columns=columns,
                finish_reason=FINISH_REASONS[reason],
                reward=float(scores[i, 0]),
                advantage=float(scores[i, 1]),
            )
        )
    return batch


def _routing(arrays: Mapping[str, np.ndarray], counts: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Each trajectory's recorded routing under its column's name, where it has any."""
    if "routed_experts" not in arrays:
        return [{} for _ in counts]
    recorded = arrays["routed"]
    parts = split(arrays["routed_experts"], np.where(recorded, counts[:, 2] + counts[:, 3] - 1, 0))
    return [
        {"routed_experts": part} if there else {}
        for part, there in zip(parts, recorded, strict=True)
    ]
