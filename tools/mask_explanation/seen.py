"""A saved step as its loss saw it: the responses' log-probabilities, divergences and mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mask_explanation.explanation import Place, Response, response_of, token_columns
from mask_explanation.policies import TokenTexts
from megatron_dppo.algorithms.decisions import Decisions, decide
from megatron_dppo.algorithms.diagnostics import token_metrics
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.presets import Algorithm
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.batches import trains

R = TypeVar("R", TokenInputs, Decisions)


@dataclass(frozen=True)
class SeenStep:
    """The trained tokens of a batch end to end, T of them, as the loss saw them.

    ``positions``, ``counts``: of the responses with a gradient, in the batch, and their tokens.
    ``token_ids`` int64 [T]; ``trains`` bool [T]; ``divergence`` float64 [T], what the mask compared,
    None where it measures none.
    """

    positions: list[int]
    counts: list[int]
    token_ids: Tensor
    inputs: TokenInputs
    trains: Tensor
    divergence: Tensor | None

    @classmethod
    def of(cls, batch: Sequence[Trajectory], settings: AlgorithmConfig) -> SeenStep:
        """Of a saved batch. Raises ValueError where it was saved without what the loss saw."""
        positions = [i for i, t in enumerate(batch) if t.sampled and trains(t, settings)]
        chosen = [batch[i] for i in positions]
        if not chosen:
            raise ValueError("no response of the batch has a gradient: nothing to explain")
        if any("loss_trains" not in t.columns for t in chosen):
            raise ValueError(
                "the batch holds no log-probabilities and no mask of the step that trained on it: it was "
                "saved by an earlier version. --policy FOLDER explains it under the weights in FOLDER, "
                "which are not the step's own"
            )
        counts = [t.sampled for t in chosen]
        log_probs = _joined(chosen, "loss_log_probs")
        assert log_probs is not None
        inputs = TokenInputs(
            log_probs=log_probs,
            rollout_log_probs=torch.from_numpy(
                np.concatenate([t.column("rollout_log_probs") for t in chosen])
            ),
            advantages=torch.tensor([t.advantage for t in chosen], dtype=torch.float32)
            .repeat_interleave(torch.tensor(counts)),
            loss_mask=torch.ones(len(log_probs), dtype=torch.bool),
            recomputed_log_probs=_joined(chosen, "loss_recomputed_log_probs"),
            entropy=_joined(chosen, "loss_entropy"),
            sequence_ids=torch.arange(len(chosen)).repeat_interleave(torch.tensor(counts)),
        )  # fmt: skip
        trained = _joined(chosen, "loss_trains")
        assert trained is not None
        ids = torch.from_numpy(np.concatenate([t.response_ids for t in chosen]).astype(np.int64))
        divergence = _joined(chosen, "loss_divergence")
        return cls(positions, counts, ids, inputs, trained, divergence)

    def decisions(self, algorithm: Algorithm) -> Decisions:
        """What the run's own algorithm decided."""
        weight = algorithm.weight(self.inputs)
        capped = weight.clamp(max=algorithm.ratio_cap)
        finite = self.inputs.log_probs.isfinite() & capped.isfinite()
        return Decisions(self.trains, finite, weight, capped)

    def others_decisions(self, algorithm: Algorithm) -> Decisions:
        """What another algorithm would have decided about the same tokens.

        Raises ValueError where its mask reads what was not saved.
        """
        if algorithm.reads_topk:
            raise ValueError(
                f"{algorithm.name} needs log pi at TopK(mu), which is not saved of a step; give weights "
                "with --policy"
            )
        if algorithm.needs_recomputed and self.inputs.recomputed_log_probs is None:
            raise ValueError(
                f"{algorithm.name} needs log-probabilities recomputed at the rollout's weights, which "
                "this run did not compute; give weights with --policy and --rollout-policy"
            )
        return decide(algorithm, self.inputs)


def explain_seen(
    seen: SeenStep,
    row: int,
    place: Place,
    trajectory: Trajectory,
    algorithm: Algorithm,
    decisions: Decisions,
    texts: TokenTexts,
) -> Response:
    """The ``row``-th of the step's responses. ``decisions``: of ``algorithm`` about all of them."""
    start = sum(seen.counts[:row])
    part = slice(start, start + seen.counts[row])
    inputs, decided = _sliced(seen.inputs, part), _sliced(decisions, part)
    columns = token_columns(inputs, decided) | {"exact_tv": None, "exact_kl": None}
    if seen.divergence is not None and algorithm.reads_topk:
        kind = "tv" if "tv_threshold" in algorithm.numbers else "kl"
        columns[f"topk_{kind}"] = seen.divergence[part]
        if algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution:
            columns[f"exact_{kind}"] = seen.divergence[part]
    metrics = token_metrics(inputs, decided, algorithm.ratio_cap)
    return response_of(place, trajectory, algorithm, columns, metrics, texts)


def _joined(chosen: Sequence[Trajectory], name: str) -> Tensor | None:
    if any(name not in t.columns for t in chosen):
        return None
    return torch.from_numpy(np.concatenate([t.columns[name] for t in chosen]))


def _sliced(record: R, part: slice) -> R:
    """A dataclass of tensors [T] and of None, cut to the rows of ``part``."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{n: x[part] for n, x in found.items() if x is not None})
