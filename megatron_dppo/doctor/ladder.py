"""How much of mean |pi - mu| each cause makes up (``--parts``): passes over the batch, each with one more cause fixed.

A rung of this ladder is one pass of the real Trainer over the batch. The gap is mean |pi - mu| over
the response tokens; its decrease from one rung to the next is that cause's part. The gap of the last
rung is numerics: kernels, order of summation and rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from megatron_dppo.config.schema import ParallelConfig, TrainConfig
from megatron_dppo.data.batch_commands import show_facts
from megatron_dppo.data.packing import pack, plan_micro_batches, unpack_sampled
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.trainer.trainer import Trainer

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


def rungs(
    dtype: str,
    temperature: float,
    *,
    rollout_policy: Path,
    policy: Path,
    recorded: bool,
    precision: bool = True,
) -> list[Rung]:
    """The passes for this batch; a cause that is not possible has none.

    Args:
        dtype, temperature: of the run's model and of its rollouts.
        rollout_policy: folder of the weights that sampled the batch.
        policy: folder of the trainer's weights now.
        recorded: whether a response has recorded routing.
        precision: whether there is a pass in float32.
    """
    ladder = [Rung(START, policy, 1.0, False, dtype)]
    if temperature != 1:
        ladder.append(replace(ladder[-1], fixes="sampling transform", temperature=temperature))
    if policy.resolve() != rollout_policy.resolve():
        ladder.append(replace(ladder[-1], fixes="staleness", weights=rollout_policy))
    if recorded:
        ladder.append(replace(ladder[-1], fixes="routing", replay=True))
    if precision and dtype != "float32":
        ladder.append(replace(ladder[-1], fixes="precision", dtype="float32"))
    return ladder


def measure(
    ladder: Sequence[Rung],
    build: Callable[[Rung], Trainer],
    micro_batch_tokens: int,
    batch: Sequence[Trajectory],
) -> Iterator[Measured]:
    """Run the passes in order; a new trainer is built only if weights or dtype change.

    Raises ValueError if a model does not fit the batch.
    """
    mu = rollout_log_probs(batch).exp()
    trainer, built, before = None, None, None
    for rung in ladder:
        # One after another: two would not fit, and Megatron's groups are the whole process's.
        if built != (rung.weights, rung.dtype):
            if trainer is not None:
                trainer.close()
            trainer, built = build(rung), (rung.weights, rung.dtype)
        assert trainer is not None
        log_probs = log_probs_of(trainer, micro_batch_tokens, rung, batch)
        pi = log_probs.exp()
        gap, ratio = (pi - mu).abs(), pi / mu
        counts = trainer.routing_agreement().values()
        compared = counts.get(names.COMPARED, 0)
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


def rollout_log_probs(batch: Sequence[Trajectory]) -> Tensor:
    """log mu of all response tokens, nats, float64 [tokens]."""
    # In float64 before any difference: |pi - mu| is as small as float32's rounding.
    log_probs = [t.column("rollout_log_probs") for t in batch]
    return torch.from_numpy(np.concatenate(log_probs).astype(np.float64))


def trainer_of(config: TrainConfig, batch: Sequence[Trajectory], rung: Rung) -> Trainer:
    """A Trainer of the run's model in this one process, with the rung's weights and dtype."""
    recorded = any("routed_experts" in t.columns for t in batch)
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


def log_probs_of(
    trainer: Trainer, micro_batch_tokens: int, rung: Rung, batch: Sequence[Trajectory]
) -> Tensor:
    """log pi of all response tokens, float64 [tokens], under the rung's temperature and routing."""
    left_out = ("topk_ids", "topk_log_probs", *(() if rung.replay else ("routed_experts",)))
    wanted = [t.without(*left_out) for t in batch]
    plan = plan_micro_batches([t.length for t in wanted], micro_batch_tokens)
    groups = [[wanted[i] for i in rows] for rows in plan]
    by_position: dict[int, Tensor] = {}
    values = trainer.log_probs([pack(group) for group in groups], temperature=rung.temperature)
    for rows, group, log_probs in zip(plan, groups, values, strict=True):
        for i, response in zip(rows, unpack_sampled(group, log_probs), strict=True):
            by_position[i] = response.cpu().double()
    return torch.cat([by_position[i] for i in range(len(batch))])


# --- as the command shows it


@dataclass(frozen=True)
class Parts:
    """All passes over a batch, and what its gap is made of."""

    recorded: bool
    log_mu: Tensor
    measured: Sequence[Measured]
    split: dict[str, float]

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        batch: Sequence[Trajectory],
        rollout_policy: Path,
        policy: Path,
        *,
        precision: bool,
    ) -> Parts:
        """Run the passes. Arguments as in ``rungs``; ``batch``: responses with a token."""
        recorded = any("routed_experts" in t.columns for t in batch)
        ladder = rungs(
            config.model.dtype,
            config.temperature,
            rollout_policy=rollout_policy,
            policy=policy,
            recorded=recorded,
            precision=precision,
        )
        measured = []
        with progress("measuring", len(ladder)) as bar:
            build = partial(trainer_of, config, batch)
            for rung in measure(ladder, build, config.training.micro_batch_tokens, batch):
                measured.append(rung)
                bar.advance()
        return cls(recorded, rollout_log_probs(batch), measured, parts(measured))

    @property
    def routing(self) -> str:
        """What is known of the routing, in a line."""
        if not self.recorded:
            return "no recorded routing in this batch: what routing does is part of the numerics"
        agreement = next(m.agreement for m in self.measured if m.agreement is not None)
        return f"at the rollout's weights {100 * agreement:.2f}% of tokens x layers route as the engine"

    def show(self, title: str, facts: Sequence[str]) -> None:
        """Print facts and both tables."""
        console = show_facts(title, [*facts, self.routing], width=120)
        ladder = Table(title="pi with one more cause fixed in each row", title_justify="left")
        ladder.add_column("fixed")
        for name in ("mean |pi-mu|", "99%", "max", "pi/mu 1% .. 99%", "moved pi by"):
            ladder.add_column(name, justify="right")
        for i, m in enumerate(self.measured):
            ladder.add_row(
                m.rung.fixes, _small(m.gap), _small(m.gap_p99), _small(m.gap_max),
                f"{m.ratio_low:.4f} .. {m.ratio_high:.4f}", _small(m.moved) if i else "",
            )  # fmt: skip
        console.print(ladder)
        table = Table(title="What mean |pi-mu| is made of", title_justify="left")
        table.add_column("cause")
        table.add_column("part", justify="right")
        table.add_column("share", justify="right")
        total = self.measured[0].gap
        for cause, part in self.split.items():
            table.add_row(cause, _small(part), _share(part, total))
        table.add_row("all", _small(total), _share(total, total), style="bold")
        console.print(table)

    def to_text(self, step: int, responses: int) -> str:
        """Every figure, JSON."""
        figures = {
            "step": step, "responses": responses, "tokens": len(self.log_mu), "parts": self.split,
            "rungs": [m.as_json() for m in self.measured],
        }  # fmt: skip
        return json.dumps(figures, indent=2) + "\n"


def _small(value: float) -> str:
    return f"{value:.2e}"


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}%" if total else ""
