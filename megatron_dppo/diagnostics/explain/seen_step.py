"""A step as its loss saw it, from what was saved with the batch: what its mask decided, what another rule would have
decided about the same tokens, and whether it is what the run recorded of the step.

Legend: T = trained tokens of a batch, end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms import rules
from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.policy_loss import (
    Algorithm,
    Decisions,
    build_algorithm,
    decide,
    token_metrics,
)
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.explanation import (
    TOKEN_METRICS,
    Response,
    TokenTexts,
    check_one_response_says_it,
    likeliest_of,
    response_of,
    token_columns,
)
from megatron_dppo.loop.learning import trains
from megatron_dppo.metrics import sums
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, RECORDS_FILE, read_records, step_of
from megatron_dppo.metrics.sums import means
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.token_loss import with_sampled

R = TypeVar("R", TokenInputs, Decisions)


@dataclass(frozen=True)
class SeenStep:
    """The trained tokens of a batch end to end, T of them, as the loss saw them.

    ``algorithm``: the run's. ``responses``, ``positions``: those with a gradient, and where they are in the batch.
    ``inputs``: of what the mask saw; ``trains`` bool [T]; ``divergence`` float64 [T], what the mask compared, None
    where it measures none.
    """

    algorithm: Algorithm
    responses: list[Trajectory]
    positions: list[int]
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
                "the batch holds no log-probabilities and no mask of the step that trained on it: no step "
                "did, or an earlier version saved it. --policy FOLDER explains it under the weights in "
                "FOLDER, which are not the step's own"
            )
        trained = _joined(chosen, "loss_trains")
        assert trained is not None
        divergence = _joined(chosen, "loss_divergence")
        algorithm = build_algorithm(settings.name, settings.options, settings.settings)
        return cls(algorithm, chosen, positions, _seen_inputs(chosen), trained, divergence)

    @cached_property
    def counts(self) -> list[int]:
        """Tokens, by response."""
        return [t.sampled for t in self.responses]

    @cached_property
    def token_ids(self) -> Tensor:
        """int64 [T]."""
        return _token_ids(self.responses)

    def is_of(self, algorithm: Algorithm) -> bool:
        """Whether the run trained with it, and with these numbers."""
        return (algorithm.name, algorithm.numbers) == (self.algorithm.name, self.algorithm.numbers)

    def decisions(self, algorithm: Algorithm) -> Decisions:
        """What the run's algorithm decided, or what another one would have decided about the same tokens.

        Raises ValueError where another one's mask reads what was not saved.
        """
        return self._decided() if self.is_of(algorithm) else self._others_decisions(algorithm)

    def _decided(self) -> Decisions:
        weight = self.algorithm.weight(self.inputs)
        capped = weight.clamp(max=self.algorithm.ratio_cap)
        finite = self.inputs.log_probs.isfinite() & capped.isfinite()
        return Decisions(self.trains, finite, weight, capped)

    def _others_decisions(self, algorithm: Algorithm) -> Decisions:
        whole = algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution
        topk = self.inputs.topk_log_probs
        carried = 0 if topk is None else topk.shape[1] - 1
        if algorithm.reads_topk and (whole or carried < algorithm.topk or not carried):
            wanted = "every id" if whole else f"TopK(mu), K = {algorithm.topk}"
            raise ValueError(
                f"{algorithm.name} needs log pi at {wanted}, and what was saved of this step has K = {carried} "
                "(rollout.topk_log_probs); give weights with --policy"
            )
        check_one_response_says_it(algorithm)
        if algorithm.needs_recomputed and self.inputs.recomputed_log_probs is None:
            raise ValueError(
                f"{algorithm.name} needs log-probabilities recomputed at the rollout's weights, which "
                "this run did not compute; give weights with --policy and --rollout-policy"
            )
        inputs = self.inputs
        if not whole and 0 < algorithm.topk < carried:
            # More ids would make another divergence of the rule.
            inputs = _seen_inputs([likeliest_of(t, algorithm.topk) for t in self.responses])
        return decide(algorithm, inputs)


def _seen_inputs(chosen: Sequence[Trajectory]) -> TokenInputs:
    """Of responses that a loss saw."""
    log_probs, rollout_log_probs = (
        _joined(chosen, name) for name in ("loss_log_probs", "rollout_log_probs")
    )
    assert log_probs is not None
    assert rollout_log_probs is not None
    columns = [_joined(chosen, n) for n in ("loss_topk_log_probs", "topk_log_probs", "topk_ids")]
    topk: Sequence[Tensor | None] = (None, None, None)
    if columns[0] is not None:
        # Its run had them from the engine.
        log_pi, log_mu, topk_ids = (c for c in columns if c is not None)
        sampled = (log_probs, rollout_log_probs, _token_ids(chosen))
        topk = with_sampled(log_pi, log_mu, topk_ids, sampled=sampled)
    return TokenInputs(
        log_probs=log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=torch.from_numpy(np.concatenate([t.advantages for t in chosen])),
        loss_mask=torch.ones(len(log_probs), dtype=torch.bool),
        recomputed_log_probs=_joined(chosen, "loss_recomputed_log_probs"),
        topk_log_probs=topk[0],
        rollout_topk_log_probs=topk[1],
        topk_valid=topk[2],
        entropy=_joined(chosen, "loss_entropy"),
        sequence_ids=_ids_of([t.sampled for t in chosen]),
        branch_ids=_ids_of([branch.sampled for t in chosen for branch in t.branches]),
    )


def _token_ids(responses: Sequence[Trajectory]) -> Tensor:
    return torch.from_numpy(np.concatenate([t.response_ids for t in responses]).astype(np.int64))


def explain_seen(
    step: SeenStep,
    index: int,
    mini_batch: int,
    algorithm: Algorithm,
    decisions: Decisions,
    texts: TokenTexts,
) -> Response:
    """The response at ``index`` of the batch. ``decisions``: of ``algorithm`` about all of the step's."""
    row = step.positions.index(index)
    start = sum(step.counts[:row])
    rows = slice(start, start + step.counts[row])
    inputs, decided = _sliced(step.inputs, rows), _sliced(decisions, rows)
    columns = token_columns(inputs, decided) | {"exact_tv": None, "exact_kl": None}
    # What was saved is of the run's own rule; another one's is computed like any other column.
    if step.divergence is not None and algorithm.reads_topk and step.is_of(algorithm):
        kind = "tv" if "tv_threshold" in algorithm.numbers else "kl"
        columns[f"topk_{kind}"] = step.divergence[rows]
        if algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution:
            columns[f"exact_{kind}"] = step.divergence[rows]
    metrics = token_metrics(inputs, decided, algorithm.ratio_cap)
    return response_of(index, mini_batch, step.responses[row], algorithm, columns, metrics, texts)


def _ids_of(counts: Sequence[int]) -> Tensor:
    """int64: the number of each of so many tokens' sequence."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


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


def check_agreement(saved: SeenStep, run: Path, step: int) -> str:
    """Compare ``saved`` with all that the run recorded of ``step``; what was compared, in words.

    Raises DisagreementError naming the figure.
    """
    algorithm = saved.algorithm
    decisions = saved.decisions(algorithm)
    _check_rule(saved, decisions.finite)
    figures = means(token_metrics(saved.inputs, decisions, algorithm.ratio_cap).values())
    record = next((r for r in read_records(run) if step_of(r) == step), None)
    if record is None:
        raise DisagreementError(f"{run / RECORDS_FILE} has no record of step {step}")
    for name in TOKEN_METRICS:
        figure, recorded = figures.get(name, np.nan), record.get(name)
        allowed = 0.0 if name in COUNTS else ABSOLUTE + RELATIVE * abs(figure)
        differs = recorded is not None and not abs(figure - recorded) <= allowed
        if differs or (recorded is None and np.isfinite(figure)):
            raise DisagreementError(
                f"step {step}: {name} of the saved tokens is {figure:g}, {RECORDS_FILE} says {recorded}"
            )
    counts = sums.MaskedTokenCounts(int(saved.token_ids.max()) + 1)
    counts.add(saved.token_ids, saved.inputs.advantages, ~saved.trains)
    assert counts.counts is not None
    blocked = sums.most_masked(counts.counts)
    recorded_as_blocked = sums.read_masked_tokens(run, step)
    if blocked != recorded_as_blocked:
        raise DisagreementError(
            f"step {step}: the saved mask blocks {blocked[:3]}... most often, {MASKED_TOKENS_FILE} says "
            f"{recorded_as_blocked and recorded_as_blocked[:3]}..."
        )
    return (
        f"as the loss saw it: {len(saved.trains)} tokens, {int((~saved.trains).sum())} blocked; agrees "
        f"with {RECORDS_FILE} and {MASKED_TOKENS_FILE}"
    )


def _check_rule(saved: SeenStep, finite: Tensor) -> None:
    """Where the mask bounds a divergence in DPPO's form, each token was blocked exactly where the saved one says so."""
    algorithm = saved.algorithm
    if algorithm.preset.divergence is None:
        return
    if saved.divergence is None:
        raise DisagreementError(f"{algorithm.name} measures a divergence, but none was saved")
    if algorithm.preset.mask != algorithm.preset.divergence:
        return
    bounds = [v for n, v in algorithm.numbers.items() if n in ("tv_threshold", "kl_threshold")]
    negative = [v for n, v in algorithm.numbers.items() if n.endswith("_threshold_negative")]
    expected = finite & rules.near(
        saved.inputs, algorithm.anchor, saved.divergence, *bounds, *negative
    )
    wrong = torch.nonzero(expected != saved.trains).flatten().tolist()
    if wrong:
        raise DisagreementError(
            f"{len(wrong)} tokens were not blocked as their saved divergence says; the first has D = "
            f"{float(saved.divergence[wrong[0]]):g}, and {'trained' if saved.trains[wrong[0]] else 'did not'}"
        )
