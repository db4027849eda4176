"""Measurement of the gap by cause: passes over the batch, each with one more cause fixed.

A rung of this ladder is one pass of the real Trainer over the batch. The gap is mean |pi - mu| over
the response tokens; its decrease from one rung to the next is that cause's part. The gap of the last
rung is numerics: kernels, order of summation and rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.schema import ParallelConfig, TrainConfig
from megatron_dppo.data.packing import (
    PackedBatch,
    TrainingSample,
    pack,
    plan_micro_batches,
    unpack_responses,
)
from megatron_dppo.data.routing import usable_rows
from megatron_dppo.metrics import names
from megatron_dppo.metrics.definitions import COMPARED
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Rollout

START = "nothing fixed"


@dataclass(frozen=True)
class Rung:
    """Settings of one pass; ``fixes``: the cause that it removes in addition to those before it."""

    fixes: str
    weights: Path
    temperature: float
    replay: bool
    dtype: str


@dataclass(frozen=True)
class Measured:
    """Results of one pass.

    Attributes:
        rung: its settings.
        gap, gap_p99, gap_max: mean, 99th percentile and maximum of |pi - mu|.
        moved: mean |pi - pi of the pass before|; shows also changes that cancel in ``gap``.
        ratio_low, ratio_high: 1st and 99th percentile of pi / mu.
        agreement: share of recorded tokens x layers whose natural routing is the engine's.
        log_probs: float64 [tokens], log pi of the response tokens in the batch's order.
    """

    rung: Rung
    gap: float
    moved: float
    gap_p99: float
    gap_max: float
    ratio_low: float
    ratio_high: float
    agreement: float | None
    log_probs: Tensor = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """All values except ``log_probs``."""
        rung = {**asdict(self.rung), "weights": str(self.rung.weights)}
        values = {k: v for k, v in vars(self).items() if k not in ("rung", "log_probs")}
        return {**rung, **values}


def rungs(config: TrainConfig, *, rollout_policy: Path, policy: Path, recorded: bool) -> list[Rung]:
    """The passes for this batch; a cause that is not possible has none.

    Args:
        config: of the run.
        rollout_policy: folder of the weights that sampled the batch.
        policy: folder of the trainer's weights now.
        recorded: whether a response has recorded routing.
    """
    dtype, temperature = config.model.dtype, config.temperature
    found = [Rung(START, policy, 1.0, False, dtype)]
    if temperature != 1:
        found.append(replace(found[-1], fixes="sampling transform", temperature=temperature))
    if policy.resolve() != rollout_policy.resolve():
        found.append(replace(found[-1], fixes="staleness", weights=rollout_policy))
    if recorded:
        found.append(replace(found[-1], fixes="routing", replay=True))
    if dtype != "float32":
        found.append(replace(found[-1], fixes="precision", dtype="float32"))
    return found


def measure(
    ladder: Sequence[Rung], config: TrainConfig, rollouts: Sequence[Rollout]
) -> Iterator[Measured]:
    """Run the passes in order; a new trainer is built only if weights or dtype change.

    Raises ValueError if a model does not fit the batch.
    """
    mu = rollout_log_probs(rollouts).exp()
    trainer, built, before = None, None, None
    for rung in ladder:
        if built != (rung.weights, rung.dtype):
            if trainer is not None:
                trainer.close()
            trainer, built = _trainer(config, rung, rollouts), (rung.weights, rung.dtype)
        assert trainer is not None
        log_probs = _log_probs(trainer, config, rung, rollouts)
        pi = log_probs.exp()
        gap, ratio = (pi - mu).abs(), pi / mu
        counts = trainer.routing_agreement().values()
        compared = counts.get(COMPARED, 0)
        yield Measured(
            rung=rung,
            gap=float(gap.mean()),
            moved=0.0 if before is None else float((pi - before).abs().mean()),
            gap_p99=float(gap.quantile(0.99)),
            gap_max=float(gap.max()),
            ratio_low=float(ratio.quantile(0.01)),
            ratio_high=float(ratio.quantile(0.99)),
            agreement=counts[names.ROUTING_AGREEMENT] / compared if compared else None,
            log_probs=log_probs,
        )
        before = pi
    if trainer is not None:
        trainer.close()


def parts(measured: Sequence[Measured]) -> dict[str, float]:
    """Split the gap of the first pass: cause -> decrease by its fix, and ``numerics``: the rest.

    A part is negative if the fix increased the gap. ``precision`` is not a part: it shows how much of
    the numerics a float32 trainer would remove.
    """
    causes = [m for m in measured if m.rung.fixes != "precision"]
    split = {b.rung.fixes: a.gap - b.gap for a, b in pairwise(causes)}
    return {**split, "numerics": causes[-1].gap}


def rollout_log_probs(rollouts: Sequence[Rollout]) -> Tensor:
    """log mu of all response tokens, nats, float64 [tokens]."""
    return torch.tensor([p for r in rollouts for p in r.rollout_log_probs], dtype=torch.float64)


def _trainer(config: TrainConfig, rung: Rung, rollouts: Sequence[Rollout]) -> Trainer:
    """A Trainer of the run's model in this one process, with the rung's weights and dtype."""
    recorded = any(r.routed_experts is not None for r in rollouts)
    model = config.model.model_copy(
        update={"hf_checkpoint": str(rung.weights), "dtype": rung.dtype}
    )
    return Trainer(
        config.model_copy(
            update={
                "model": model,
                "parallel": ParallelConfig(),
                "rollout": config.rollout.model_copy(update={"router_replay": recorded}),
            }
        )
    )


def _log_probs(
    trainer: Trainer, config: TrainConfig, rung: Rung, rollouts: Sequence[Rollout]
) -> Tensor:
    samples = [_sample(i, rollout) for i, rollout in enumerate(rollouts)]
    plan = plan_micro_batches([s.length for s in samples], config.training.micro_batch_tokens)
    groups = [[samples[i] for i in rows] for rows in plan]
    batches: list[PackedBatch] = [pack(group) for group in groups]
    if not rung.replay:
        batches = [batch.without_routing() for batch in batches]
    found: dict[int, Tensor] = {}
    values = trainer.log_probs(batches, temperature=rung.temperature)
    for group, log_probs in zip(groups, values, strict=True):
        for sample, own in zip(group, unpack_responses(group, log_probs), strict=True):
            found[sample.index] = own.cpu().double()
    return torch.cat([found[i] for i in range(len(rollouts))])


def _sample(index: int, rollout: Rollout) -> TrainingSample:
    routed = rollout.routed_experts
    return TrainingSample(
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        advantage=rollout.advantage,
        rollout_log_probs=rollout.rollout_log_probs,
        recomputed_log_probs=None,
        topk_ids=None,
        topk_log_probs=None,
        index=index,
        routed_experts=routed,
        routed_valid=None if routed is None else usable_rows(rollout),
    )
