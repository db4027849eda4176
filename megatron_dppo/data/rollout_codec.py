"""Rollout batches as flat arrays: what travels between ranks and what a saved batch file holds. Nothing is pickled.

Ragged fields are concatenated; ``counts`` holds the lengths. The response's text is left out: the tokens say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_dppo.data.routing import check_recording
from megatron_dppo.types import FinishReason, Rollout, VersionSpan

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


class RolloutFormatError(ValueError):
    """The bytes are not an encoded rollout batch."""


def encode(rollouts: Sequence[Rollout]) -> bytes:
    """A rollout batch as one safetensors blob; token ids int32, log-probabilities float32."""
    counts = [
        (r.problem_id, r.sample_index, len(r.prompt_ids), len(r.response_ids),
         FINISH_REASONS.index(r.finish_reason), len(r.weight_versions))
        for r in rollouts
    ]  # fmt: skip
    spans = [(s.weight_version, s.start, s.end) for r in rollouts for s in r.weight_versions]
    arrays = {
        "counts": np.array(counts, dtype=np.int64).reshape(-1, 6),
        "prompt_ids": _flat([r.prompt_ids for r in rollouts], np.int32),
        "response_ids": _flat([r.response_ids for r in rollouts], np.int32),
        "rollout_log_probs": _flat([r.rollout_log_probs for r in rollouts], np.float32),
        "scores": np.array([(r.reward, r.advantage) for r in rollouts], dtype=np.float64).reshape(-1, 2),
        "weight_versions": np.array(spans, dtype=np.int64).reshape(-1, 3),
    }  # fmt: skip
    for name in ("topk_ids", "topk_log_probs"):
        rows = [getattr(r, name) for r in rollouts]
        if any(row is not None for row in rows):
            arrays[name] = _stack(name, rows)
    recorded = [r.routed_experts for r in rollouts if r.routed_experts is not None]
    if recorded:  # of some rollouts or of all
        arrays["routed_experts"] = np.concatenate(recorded)
        arrays["routed"] = np.array([r.routed_experts is not None for r in rollouts])
    # save() writes the memory as it lies: an array in another order would come back garbled.
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode(blob: bytes) -> list[Rollout]:
    """Inverse of :func:`encode`, with empty texts. Raises RolloutFormatError."""
    try:
        arrays = load(blob)
        counts = arrays["counts"]
        prompts = _split(arrays["prompt_ids"], counts[:, 2])
        responses = _split(arrays["response_ids"], counts[:, 3])
        log_probs = _split(arrays["rollout_log_probs"], counts[:, 3])
        spans = _split(arrays["weight_versions"], counts[:, 5])
        scores = arrays["scores"]
        routing = _routing(arrays, counts)
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise RolloutFormatError(f"not a rollout batch: {error!r}") from error
    rows_of = {"topk_ids": counts[:, 3], "topk_log_probs": counts[:, 3]}
    extras = {k: _split(arrays[k], n) for k, n in rows_of.items() if k in arrays}
    return [
        Rollout(
            problem_id=int(count[0]),
            sample_index=int(count[1]),
            prompt_ids=prompts[i].tolist(),
            response_ids=responses[i].tolist(),
            rollout_log_probs=log_probs[i].tolist(),
            finish_reason=FINISH_REASONS[count[4]],
            text="",
            weight_versions=[VersionSpan(*map(int, s)) for s in spans[i]],
            reward=float(scores[i, 0]),
            advantage=float(scores[i, 1]),
            routed_experts=routing[i],
            **{name: parts[i] for name, parts in extras.items()},
        )
        for i, count in enumerate(counts)
    ]


def batch_path(folder: str | Path, step: int) -> Path:
    """File of the rollout batch of ``step`` in ``folder``."""
    return Path(folder) / f"step_{step:06d}.safetensors"


def save_batch(folder: str | Path, step: int, rollouts: Sequence[Rollout]) -> Path:
    """Write one step's batch; the file appears whole or not at all."""
    path = batch_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(rollouts))
    partial.replace(path)
    return path


def load_batch(folder: str | Path, step: int) -> list[Rollout]:
    """Read one step's batch. Raises FileNotFoundError, or RolloutFormatError with the path and the fault."""
    path = batch_path(folder, step)
    try:
        return decode(path.read_bytes())
    except RolloutFormatError as error:
        raise RolloutFormatError(f"{path}: {error}") from error


def _flat(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows] or [np.empty(0, dtype)])


def _stack(name: str, rows: Sequence[np.ndarray | None]) -> np.ndarray:
    missing = sum(row is None for row in rows)
    if missing:
        raise ValueError(
            f"{name}: {missing} of {len(rows)} rollouts have none, expected all or none of them"
        )
    return np.concatenate([row for row in rows if row is not None])


def _routing(arrays: dict[str, np.ndarray], counts: np.ndarray) -> list[np.ndarray | None]:
    """Each rollout's recorded routing, checked as far as that needs no model."""
    if "routed_experts" not in arrays:
        return [None] * len(counts)
    recorded = arrays["routed"]
    rows = np.where(recorded, counts[:, 2] + counts[:, 3] - 1, 0)
    parts = _split(arrays["routed_experts"], rows)
    for index in np.flatnonzero(recorded):
        try:
            check_recording(parts[index], np.iinfo(parts[index].dtype).max + 1)
        except ValueError as error:
            raise ValueError(f"rollout {index}: {error}") from error
    return [part if there else None for part, there in zip(parts, recorded, strict=True)]


def _split(flat: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    if int(counts.sum()) != len(flat):
        raise ValueError(f"{len(flat)} rows, expected {int(counts.sum())}")
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
