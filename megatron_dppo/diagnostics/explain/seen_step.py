"""Read the loss inputs of a step from its saved batch, apply a mask to them, and compare them with the run's records.

The mask belongs to the run's own algorithm, or to another algorithm.

Legend: T = trained tokens of a batch, concatenated.
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
from megatron_dppo.algorithms.algorithm import Algorithm, build_algorithm
from megatron_dppo.algorithms.decisions import Decisions, decide
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.algorithms.table import NEGATIVE_THRESHOLDS
from megatron_dppo.algorithms.token_metrics import PPO_CLIP, token_metrics
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.explanation import (
    Response,
    TokenTexts,
    as_int64,
    compared_metrics,
    likeliest_of,
    require_independent_responses,
    response_of,
    token_columns,
)
from megatron_dppo.loop import learning
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.masked_tokens import MaskedTokenCounts, most_masked, read_masked_tokens
from megatron_dppo.metrics.records import MASKED_TOKENS_FILE, RECORDS_FILE, read_records, step_of
from megatron_dppo.metrics.sums import means
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.token_loss import with_sampled

R = TypeVar("R", TokenInputs, Decisions)


@dataclass(frozen=True)
class SeenStep:
    """The trained tokens of a batch as the loss saw them, concatenated to T tokens.

    Attributes:
        algorithm: the run's algorithm.
        responses: the responses that were trained on.
        positions: positions of these responses in the batch.
        inputs: inputs of the mask.
        trains: bool [T], the run's mask: whether the token trained.
        divergence: float64 [T], the divergence that the mask compared with its bound; None if the mask measures none.
    """

    algorithm: Algorithm
    responses: list[Trajectory]
    positions: list[int]
    inputs: TokenInputs
    trains: Tensor
    divergence: Tensor | None

    @classmethod
    def of(cls, batch: Sequence[Trajectory], settings: AlgorithmConfig) -> SeenStep:
        """Build the step from a saved batch. Raises ValueError if the batch was saved without the loss inputs."""
        positions = [i for i, t in enumerate(batch) if t.sampled and learning.trains(t, settings)]
        responses = [batch[i] for i in positions]
        if not responses:
            raise ValueError("no response of the batch has a gradient: nothing to explain")
        if any("loss_trains" not in t.columns for t in responses):
            raise ValueError(
                "the batch holds no log-probabilities and no mask of the step that trained on it: no step trained on "
                "the batch, or an earlier version of this program saved it. --policy FOLDER explains the batch under "
                "the weights in FOLDER, which are not the step's own"
            )
        training_mask = _joined(responses, "loss_trains")
        assert training_mask is not None
        divergence = _joined(responses, "loss_divergence")
        algorithm = build_algorithm(settings.name, settings.options, settings.settings)
        return cls(
            algorithm, responses, positions, _seen_inputs(responses), training_mask, divergence
        )

    @cached_property
    def counts(self) -> list[int]:
        """Number of tokens of each response."""
        return [t.sampled for t in self.responses]

    @cached_property
    def token_ids(self) -> Tensor:
        """Ids of the tokens, int64 [T]."""
        return _token_ids(self.responses)

    def notable_first(self, positions: Sequence[int], decisions: Decisions) -> list[int]:
        """Return ``positions`` with the responses first that have blocked tokens, then those with disputed tokens.

        A token is disputed if ``decisions`` let it train and PPO's Clip-Higher would block it. Within each of the three
        kinds, the order of ``positions`` stays.
        """
        clip_trains = rules.ratio_clip(self.inputs, rollout, **PPO_CLIP)
        blocked_rows = (~decisions.trains).split(self.counts)
        disputed_rows = (decisions.trains & ~clip_trains).split(self.counts)
        # False comes before True.
        kinds: dict[int, tuple[bool, bool]] = {}
        for position, blocked, disputed in zip(
            self.positions, blocked_rows, disputed_rows, strict=True
        ):
            has_blocked = bool(blocked.any())
            kinds[position] = (not has_blocked, not (has_blocked or disputed.any()))
        return sorted(positions, key=kinds.__getitem__)

    def was_trained_with(self, algorithm: Algorithm) -> bool:
        """Return whether the run trained with this algorithm and the same numbers."""
        return (algorithm.name, algorithm.numbers) == (self.algorithm.name, self.algorithm.numbers)

    def decisions(self, algorithm: Algorithm) -> Decisions:
        """Return the decisions of ``algorithm`` about the tokens. For the run's own algorithm, use the saved mask.

        Raises ValueError if the mask of another algorithm reads a value that was not saved.
        """
        if self.was_trained_with(algorithm):
            return self._own_decisions()
        return self._other_decisions(algorithm)

    def _own_decisions(self) -> Decisions:
        """Return the decisions of the run's own algorithm, with the saved mask."""
        weight = self.algorithm.weight(self.inputs)
        capped_weight = weight.clamp(max=self.algorithm.ratio_cap)
        is_finite = self.inputs.log_probs.isfinite() & capped_weight.isfinite()
        return Decisions(self.trains, is_finite, weight, capped_weight)

    def _other_decisions(self, algorithm: Algorithm) -> Decisions:
        """Return the decisions of another algorithm. Raises ValueError if it reads a value that was not saved."""
        needs_all_ids = algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution
        topk = self.inputs.topk_log_probs
        # The last column is not part of TopK(mu): it is the sampled token.
        saved_k = 0 if topk is None else topk.shape[1] - 1
        if needs_all_ids:
            needed_weights = "--policy"
            if algorithm.needs_recomputed_distribution:
                needed_weights = "--policy and --rollout-policy"
            raise ValueError(
                f"{algorithm.name} needs log-probabilities at every id, which are not saved with a step; give weights "
                f"with {needed_weights}"
            )
        if algorithm.reads_topk and saved_k < algorithm.topk:
            raise ValueError(
                f"{algorithm.name} needs log pi at TopK(mu), K = {algorithm.topk}, and what was saved of this step has "
                f"only TopK(mu), K = {saved_k} (rollout.topk_log_probs); give weights with --policy"
            )
        require_independent_responses(algorithm)
        if algorithm.needs_recomputed and self.inputs.recomputed_log_probs is None:
            raise ValueError(
                f"{algorithm.name} needs log-probabilities recomputed at the rollout's weights, which "
                "this run did not compute; give weights with --policy and --rollout-policy"
            )
        inputs = self.inputs
        if 0 < algorithm.topk < saved_k:
            # Drop the additional ids: with them, the divergence has another value than at the algorithm's own K.
            inputs = _seen_inputs([likeliest_of(t, algorithm.topk) for t in self.responses])
        return decide(algorithm, inputs)


def _seen_inputs(trajectories: Sequence[Trajectory]) -> TokenInputs:
    """Build the mask's inputs from the columns that the loss saved with the responses."""
    log_probs = _joined(trajectories, "loss_log_probs")
    rollout_log_probs = _joined(trajectories, "rollout_log_probs")
    assert log_probs is not None
    assert rollout_log_probs is not None
    topk: Sequence[Tensor | None] = (None, None, None)
    topk_log_pi = _joined(trajectories, "loss_topk_log_probs")
    if topk_log_pi is not None:
        topk_log_mu = _joined(trajectories, "topk_log_probs")
        topk_ids = _joined(trajectories, "topk_ids")
        assert topk_log_mu is not None
        assert topk_ids is not None
        # Add the sampled token to the TopK(mu) that the engine returned.
        sampled = (log_probs, rollout_log_probs, _token_ids(trajectories))
        topk = with_sampled(topk_log_pi, topk_log_mu, topk_ids, sampled=sampled)
    return TokenInputs(
        log_probs=log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=torch.from_numpy(np.concatenate([t.advantages for t in trajectories])),
        loss_mask=torch.ones(len(log_probs), dtype=torch.bool),
        recomputed_log_probs=_joined(trajectories, "loss_recomputed_log_probs"),
        topk_log_probs=topk[0],
        rollout_topk_log_probs=topk[1],
        topk_valid=topk[2],
        entropy=_joined(trajectories, "loss_entropy"),
        sequence_ids=_ids_of([t.sampled for t in trajectories]),
        branch_ids=_ids_of([branch.sampled for t in trajectories for branch in t.branches]),
    )


def _token_ids(responses: Sequence[Trajectory]) -> Tensor:
    """Concatenate the token ids of the responses, int64 [T]."""
    return as_int64(np.concatenate([t.response_ids for t in responses]))


def explain_seen(
    step: SeenStep,
    index: int,
    mini_batch: int,
    algorithm: Algorithm,
    decisions: Decisions,
    texts: TokenTexts,
) -> Response:
    """Explain the response at ``index`` of the batch. ``decisions``: what ``algorithm`` decides about all T tokens."""
    row = step.positions.index(index)
    start = sum(step.counts[:row])
    rows = slice(start, start + step.counts[row])
    inputs = _sliced(step.inputs, rows)
    response_decisions = _sliced(decisions, rows)
    columns = token_columns(inputs, response_decisions) | {"exact_tv": None, "exact_kl": None}
    # The saved divergence belongs to the run's own algorithm. For another algorithm, ``columns`` already has the
    # divergence.
    if step.divergence is not None and algorithm.reads_topk and step.was_trained_with(algorithm):
        divergence_name = (algorithm.preset.divergence or "kl").rpartition("_")[2]
        columns[f"topk_{divergence_name}"] = step.divergence[rows]
        # If the algorithm reads all ids, its Top-K divergence is the exact divergence.
        if algorithm.needs_full_distribution or algorithm.needs_recomputed_distribution:
            columns[f"exact_{divergence_name}"] = step.divergence[rows]
    metrics = token_metrics(inputs, response_decisions, algorithm.ratio_cap)
    return response_of(index, mini_batch, step.responses[row], algorithm, columns, metrics, texts)


def _ids_of(counts: Sequence[int]) -> Tensor:
    """Return for each token the number of its sequence, int64 [T]; ``counts`` has the sequences' lengths in tokens."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _joined(trajectories: Sequence[Trajectory], name: str) -> Tensor | None:
    """Concatenate the column ``name`` of the trajectories; None if one of them lacks it."""
    if any(name not in t.columns for t in trajectories):
        return None
    return torch.from_numpy(np.concatenate([t.columns[name] for t in trajectories]))


def _sliced(record: R, rows: slice) -> R:
    """Return a copy of a dataclass whose fields are tensors [T] or None, with each tensor cut to ``rows``."""
    cut_tensors: dict[str, Tensor] = {}
    for column in fields(record):
        tensor = getattr(record, column.name)
        if tensor is not None:
            cut_tensors[column.name] = tensor[rows]
    return replace(record, **cut_tensors)


COUNTS = (
    metric_names.TRAINED_TOKENS,
    metric_names.POSITIVE,
    metric_names.NEGATIVE,
    metric_names.MASKED,
)
"""Metrics that are counts. They must agree exactly."""
RELATIVE, ABSOLUTE = 1e-5, 1e-9
"""Relative and absolute part of the allowed difference of a mean. The means differ by rounding, because the run summed
the float32 numbers on another device and in another order."""


class DisagreementError(RunError, ValueError):
    """The saved batch of a step disagrees with the run's records of this step."""


def check_agreement(saved: SeenStep, run: Path, step: int) -> str:
    """Compare ``saved`` with the run's records of ``step``; returns a line about the comparison.

    The records are ``compared_metrics``, and the tokens that were masked most often.

    Raises DisagreementError that names the first figure that differs.
    """
    algorithm = saved.algorithm
    decisions = saved.decisions(algorithm)
    _check_rule(saved, decisions.finite)
    figures = means(token_metrics(saved.inputs, decisions, algorithm.ratio_cap).values())
    metrics_row = next((r for r in read_records(run) if step_of(r) == step), None)
    if metrics_row is None:
        raise DisagreementError(f"{run / RECORDS_FILE} has no record of step {step}")
    for name in compared_metrics():
        figure = figures.get(name, np.nan)
        recorded_figure = metrics_row.get(name)
        tolerance = 0.0
        if name not in COUNTS:
            tolerance = ABSOLUTE + RELATIVE * abs(figure)
        # ``not <=`` instead of ``>``: NaN is a difference too, and comparisons with NaN are false.
        differs = recorded_figure is not None and not abs(figure - recorded_figure) <= tolerance
        if differs or (recorded_figure is None and np.isfinite(figure)):
            raise DisagreementError(
                f"step {step}: {name} of the saved tokens is {figure:g}, {RECORDS_FILE} says {recorded_figure}"
            )
    masked_tokens = MaskedTokenCounts(int(saved.token_ids.max()) + 1)
    masked_tokens.add(saved.token_ids, saved.inputs.advantages, ~saved.trains)
    assert masked_tokens.counts is not None
    blocked_tokens = most_masked(masked_tokens.counts)
    recorded_tokens = read_masked_tokens(run, step)
    if blocked_tokens != recorded_tokens:
        recorded_text = "nothing"
        if recorded_tokens is not None:
            recorded_text = f"{recorded_tokens[:3]}..."
        raise DisagreementError(
            f"step {step}: the saved mask blocks {blocked_tokens[:3]}... most often, {MASKED_TOKENS_FILE} says "
            f"{recorded_text}"
        )
    return (
        f"as the loss saw it: {len(saved.trains)} tokens, {int((~saved.trains).sum())} blocked; agrees "
        f"with {RECORDS_FILE} and {MASKED_TOKENS_FILE}"
    )


def _check_rule(saved: SeenStep, finite: Tensor) -> None:
    """Check that the saved mask follows from the saved divergence, if the algorithm bounds a divergence in DPPO's form.

    ``finite``: bool [T], whether log pi and weight of a token are finite. Raises DisagreementError if the run blocked a
    token that the rule does not block, or trained a token that the rule blocks.
    """
    algorithm = saved.algorithm
    if algorithm.preset.divergence is None:
        return
    if saved.divergence is None:
        raise DisagreementError(f"{algorithm.name} measures a divergence, but none was saved")
    # A mask in DPPO's form has the same name as its divergence, and ``rules.near`` computes it from the divergence.
    if algorithm.preset.mask != algorithm.preset.divergence:
        return
    threshold_name = next(name for name in NEGATIVE_THRESHOLDS if name in algorithm.numbers)
    expected_mask = finite & rules.near(
        saved.inputs,
        algorithm.anchor,
        saved.divergence,
        threshold=algorithm.numbers[threshold_name],
        threshold_negative=algorithm.numbers.get(NEGATIVE_THRESHOLDS[threshold_name]),
    )
    wrong_rows = torch.nonzero(expected_mask != saved.trains).flatten().tolist()
    if wrong_rows:
        first_row = wrong_rows[0]
        outcome = "did not train"
        if saved.trains[first_row]:
            outcome = "trained"
        raise DisagreementError(
            f"the saved mask of {len(wrong_rows)} tokens does not follow from their saved divergence; the first token "
            f"has D = {float(saved.divergence[first_row]):g}, and {outcome}"
        )
