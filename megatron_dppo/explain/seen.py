"""A saved step as its loss saw it: the responses' log-probabilities, divergences and mask; and whether that is what
the run recorded of the step, and follows from the mask's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import Algorithm, Decisions, decide, token_metrics
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.explain import explanation
from megatron_dppo.loop.learning import trains
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, RECORDS_FILE, read_records, step_of
from megatron_dppo.metrics.sums import MaskedTokenCounts, most_masked, read_masked_tokens
from megatron_dppo.metrics.table import means
from megatron_dppo.system.errors import RunError

R = TypeVar("R", TokenInputs, Decisions)


@dataclass(frozen=True)
class SeenStep:
    """The trained tokens of a batch end to end, T of them, as the loss saw them.

    ``positions``, ``counts``: of the responses with a gradient, in the batch, and their tokens. ``token_ids`` int64
    [T]; ``trains`` bool [T]; ``divergence`` float64 [T], what the mask compared, None where it measures none.
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
                f"{algorithm.name} needs log pi at TopK(mu), which is not saved of a step; give weights with --policy"
            )
        if algorithm.needs_recomputed and self.inputs.recomputed_log_probs is None:
            raise ValueError(
                f"{algorithm.name} needs log-probabilities recomputed at the rollout's weights, which "
                "this run did not compute; give weights with --policy and --rollout-policy"
            )
        return decide(algorithm, self.inputs)


def explain_seen(
    step: SeenStep,
    index: int,
    mini_batch: int,
    trajectory: Trajectory,
    algorithm: Algorithm,
    decisions: Decisions,
    texts: explanation.TokenTexts,
) -> explanation.Response:
    """The response at ``index`` of the batch. ``decisions``: of ``algorithm`` about all of the step's."""
    row = step.positions.index(index)
    start = sum(step.counts[:row])
    rows = slice(start, start + step.counts[row])
    inputs, decided = _sliced(step.inputs, rows), _sliced(decisions, rows)
    columns = explanation.token_columns(inputs, decided) | {"exact_tv": None, "exact_kl": None}
    if step.divergence is not None and algorithm.reads_topk:
        kind = "tv" if "tv_threshold" in algorithm.numbers else "kl"
        columns[f"topk_{kind}"] = step.divergence[rows]
        if algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution:
            columns[f"exact_{kind}"] = step.divergence[rows]
    metrics = token_metrics(inputs, decided, algorithm.ratio_cap)
    return explanation.response_of(
        index, mini_batch, trajectory, algorithm, columns, metrics, texts
    )


def _joined(chosen: Sequence[Trajectory], name: str) -> Tensor | None:
    if any(name not in t.columns for t in chosen):
        return None
    return torch.from_numpy(np.concatenate([t.columns[name] for t in chosen]))


def _sliced(record: R, rows: slice) -> R:
    """A dataclass of tensors [T] and of None, cut to ``rows``."""
    columns = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{n: x[rows] for n, x in columns.items() if x is not None})


COUNTS = (names.TRAINED_TOKENS, names.POSITIVE, names.NEGATIVE, names.MASKED)
RELATIVE, ABSOLUTE = 1e-5, 1e-9
"""Allowed of a mean: another device and another order of summation, from the same float32 numbers."""


class DisagreementError(RunError, ValueError):
    """What was saved of a step is not what was recorded of it."""


def check_agreement(saved: SeenStep, algorithm: Algorithm, run: Path, step: int) -> str:
    """Compare ``saved`` with all that the run recorded of ``step``; what was compared, in words.

    ``algorithm``: the run's own. Raises DisagreementError naming the figure.
    """
    _check_rule(saved, algorithm)
    decisions = saved.decisions(algorithm)
    figures = means(token_metrics(saved.inputs, decisions, algorithm.ratio_cap).values())
    record = next((r for r in read_records(run) if step_of(r) == step), None)
    if record is None:
        raise DisagreementError(f"{run / RECORDS_FILE} has no record of step {step}")
    for name in explanation.TOKEN_METRICS:
        figure, recorded = figures.get(name, np.nan), record.get(name)
        allowed = 0.0 if name in COUNTS else ABSOLUTE + RELATIVE * abs(figure)
        differs = recorded is not None and not abs(figure - recorded) <= allowed
        if differs or (recorded is None and np.isfinite(figure)):
            raise DisagreementError(
                f"step {step}: {name} of the saved tokens is {figure:g}, {RECORDS_FILE} says {recorded}"
            )
    counts = MaskedTokenCounts(int(saved.token_ids.max()) + 1)
    counts.add(saved.token_ids, saved.inputs.advantages, ~saved.trains)
    assert counts.counts is not None
    blocked, recorded_as_blocked = most_masked(counts.counts), read_masked_tokens(run, step)
    if blocked != recorded_as_blocked:
        raise DisagreementError(
            f"step {step}: the saved mask blocks {blocked[:3]}... most often, {MASKED_TOKENS_FILE} says "
            f"{recorded_as_blocked and recorded_as_blocked[:3]}..."
        )
    return (
        f"as the loss saw it: {len(saved.trains)} tokens, {int((~saved.trains).sum())} blocked; agrees "
        f"with {RECORDS_FILE} and {MASKED_TOKENS_FILE}"
    )


def _check_rule(saved: SeenStep, algorithm: Algorithm) -> None:
    """Where the mask bounds a divergence, each token was blocked exactly where the saved one says so."""
    if algorithm.preset.divergence is None:
        return
    if saved.divergence is None:
        raise DisagreementError(f"{algorithm.name} measures a divergence, but none was saved")
    bounds = [v for n, v in algorithm.numbers.items() if n in ("tv_threshold", "kl_threshold")]
    negative = [v for n, v in algorithm.numbers.items() if n.endswith("_threshold_negative")]
    finite = saved.decisions(algorithm).finite
    expected = finite & rules.near(
        saved.inputs, algorithm.anchor, saved.divergence, *bounds, *negative
    )
    wrong = torch.nonzero(expected != saved.trains).flatten().tolist()
    if wrong:
        raise DisagreementError(
            f"{len(wrong)} tokens were not blocked as their saved divergence says; the first has D = "
            f"{float(saved.divergence[wrong[0]]):g}, and {'trained' if saved.trains[wrong[0]] else 'did not'}"
        )
