"""Split mean |pi - mu| of a batch into the parts of its causes (``--parts``).

The trainer scores the batch in several passes, the rungs of a ladder; each pass has one more cause fixed. The gap is
mean |pi - mu| over the response tokens. The decrease of the gap from one rung to the next is the part of the cause that
was fixed. The gap of the last rung in the run's dtype is numerics: kernels, order of summation and rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from megatron_dppo.config.schema import LoraConfig, ParallelConfig, TrainConfig
from megatron_dppo.data.balancing import plan_micro_batches
from megatron_dppo.data.packing import pack, unpack_sampled
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.explain.__main__ import show_facts
from megatron_dppo.diagnostics.explain.explanation import as_float64
from megatron_dppo.diagnostics.pages import SummaryTable
from megatron_dppo.diagnostics.report import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SMALL,
    STYLE,
    VERMILION,
    simplify,
)
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.trainer.trainer import Trainer

START = "nothing fixed"


@dataclass(frozen=True)
class Rung:
    """Settings of one pass.

    ``fixes`` names the cause that this pass removes and the pass before does not. ``replay``: whether tokens go to the
    experts that the engine recorded.
    """

    fixes: str
    weights: Path
    temperature: float
    replay: bool
    dtype: str


@dataclass(frozen=True)
class RungResult:
    """Results of one pass.

    Attributes:
        rung: settings of the pass.
        gap, gap_p99, gap_max: mean, 99th percentile and maximum of |pi - mu|.
        moved: mean |pi - pi of the pass before|; it also shows changes that cancel in ``gap``.
        ratio_low, ratio_high: 1st and 99th percentile of pi / mu.
        agreement: share of recorded tokens x layers in which the trainer's routers choose the same experts as the
            engine; None if nothing was compared.
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
        """Return all values except ``log_probs``."""
        rung = {**asdict(self.rung), "weights": str(self.rung.weights)}
        values = dict(vars(self))
        del values["rung"], values["log_probs"]
        return {**rung, **values}


def rungs(
    dtype: str,
    temperature: float,
    *,
    rollout_policy: Path,
    policy: Path,
    has_routing: bool,
    precision: bool = True,
) -> list[Rung]:
    """Return the passes for this batch. A cause that is not possible in the run has no pass.

    Args:
        dtype: dtype of the run's model.
        temperature: temperature of the run's rollouts.
        rollout_policy: folder of the weights that sampled the batch.
        policy: folder of the weights that the trainer had when it trained on the batch.
        has_routing: whether any response has recorded routing.
        precision: whether to add a pass in float32.
    """
    ladder = [Rung(fixes=START, weights=policy, temperature=1.0, replay=False, dtype=dtype)]
    if temperature != 1:
        ladder.append(replace(ladder[-1], fixes="sampling transform", temperature=temperature))
    if policy.resolve() != rollout_policy.resolve():
        ladder.append(replace(ladder[-1], fixes="staleness", weights=rollout_policy))
    if has_routing:
        ladder.append(replace(ladder[-1], fixes="routing", replay=True))
    if precision and dtype != "float32":
        ladder.append(replace(ladder[-1], fixes="precision", dtype="float32"))
    return ladder


def measure(
    ladder: Sequence[Rung],
    build: Callable[[Rung], Trainer],
    micro_batch_tokens: int,
    batch: Sequence[Trajectory],
) -> Iterator[RungResult]:
    """Run the passes in order, and build a new trainer only if weights or dtype change.

    Raises ValueError if a model does not match the batch.
    """
    mu = rollout_log_probs(batch).exp()
    trainer, model_key, previous_pi = None, None, None
    for rung in ladder:
        # Close a trainer before the next is built: two do not fit in memory, and a process has one set of Megatron's
        # process groups.
        if model_key != (rung.weights, rung.dtype):
            if trainer is not None:
                trainer.close()
            trainer = build(rung)
            model_key = (rung.weights, rung.dtype)
        assert trainer is not None
        log_probs = log_probs_of(trainer, micro_batch_tokens, rung, batch)
        pi = log_probs.exp()
        gap, ratio = (pi - mu).abs(), pi / mu
        counts = trainer.routing_agreement().values()
        compared_count = counts.get(metric_names.COMPARED, 0)
        agreement = None
        if compared_count:
            # This metric is still a count here: it becomes a share by the division.
            agreement = counts[metric_names.ROUTING_AGREEMENT] / compared_count
        moved = 0.0
        if previous_pi is not None:
            moved = float((pi - previous_pi).abs().mean())
        yield RungResult(
            rung=rung,
            gap=float(gap.mean()),
            moved=moved,
            gap_p99=float(gap.quantile(0.99)),
            gap_max=float(gap.max()),
            ratio_low=float(ratio.quantile(0.01)),
            ratio_high=float(ratio.quantile(0.99)),
            agreement=agreement,
            log_probs=log_probs,
        )
        previous_pi = pi
    if trainer is not None:
        trainer.close()


def split_gap(results: Sequence[RungResult]) -> dict[str, float]:
    """Return the parts of the first pass's gap: for each cause the decrease by its fix, for ``numerics`` the rest.

    A part is negative if the fix increased the gap. ``precision`` is not a part: its pass shows how much of the
    numerics a float32 trainer would remove.
    """
    passes = [m for m in results if m.rung.fixes != "precision"]
    split: dict[str, float] = {}
    for before, after in pairwise(passes):
        split[after.rung.fixes] = before.gap - after.gap
    split["numerics"] = passes[-1].gap
    return split


def rollout_log_probs(batch: Sequence[Trajectory]) -> Tensor:
    """Return log mu of all response tokens, in nats, float64 [tokens]."""
    log_probs = [t.column("rollout_log_probs") for t in batch]
    return as_float64(np.concatenate(log_probs))


def has_recorded_routing(batch: Sequence[Trajectory]) -> bool:
    return any("routed_experts" in t.columns for t in batch)


def trainer_of(config: TrainConfig, batch: Sequence[Trajectory], rung: Rung) -> Trainer:
    """Build a Trainer of the run's model with the rung's weights and dtype. This process is its only rank."""
    has_routing = has_recorded_routing(batch)
    model = config.model.model_copy(
        update={"hf_checkpoint": str(rung.weights), "dtype": rung.dtype}
    )
    return Trainer.read(
        config.model_copy(
            update={
                "model": model,
                "parallel": ParallelConfig(),
                # The folder has merged weights: the adapters are already in them.
                "lora": LoraConfig(),
                "rollout": config.rollout.model_copy(update={"router_replay": has_routing}),
            }
        )
    )


def log_probs_of(
    trainer: Trainer, micro_batch_tokens: int, rung: Rung, batch: Sequence[Trajectory]
) -> Tensor:
    """Compute log pi of all response tokens, float64 [tokens], with the rung's temperature and routing."""
    unused_columns = ["topk_ids", "topk_log_probs"]
    if not rung.replay:
        unused_columns.append("routed_experts")
    trajectories = [t.without(*unused_columns) for t in batch]
    plan = plan_micro_batches([t.length for t in trajectories], micro_batch_tokens)
    groups: list[list[Trajectory]] = []
    for rows in plan:
        groups.append([trajectories[i] for i in rows])
    by_position: dict[int, Tensor] = {}
    values = trainer.log_probs([pack(group) for group in groups], temperature=rung.temperature)
    for rows, group, log_probs in zip(plan, groups, values, strict=True):
        for i, response in zip(rows, unpack_sampled(group, log_probs), strict=True):
            by_position[i] = response.cpu().double()
    return torch.cat([by_position[i] for i in range(len(batch))])


@dataclass(frozen=True)
class Parts:
    """All passes over a batch, and its gap split into parts."""

    has_routing: bool
    log_mu: Tensor
    results: Sequence[RungResult]
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
        """Run the passes over ``batch``, responses with at least one token. See ``rungs`` for the other arguments."""
        has_routing = has_recorded_routing(batch)
        ladder = rungs(
            config.model.dtype,
            config.temperature,
            rollout_policy=rollout_policy,
            policy=policy,
            has_routing=has_routing,
            precision=precision,
        )
        results = []
        with progress("measuring", len(ladder)) as bar:
            build = partial(trainer_of, config, batch)
            for result in measure(ladder, build, config.training.micro_batch_tokens, batch):
                results.append(result)
                bar.advance()
        return cls(has_routing, rollout_log_probs(batch), results, split_gap(results))

    @property
    def routing(self) -> str:
        """Return a line about the agreement of the trainer's routing with the engine's."""
        if not self.has_routing:
            return "no recorded routing in this batch: what routing does is part of the numerics"
        # The routing is compared only in passes that replay it. All these passes have the rollout's weights.
        agreement = next(m.agreement for m in self.results if m.agreement is not None)
        return f"at the rollout's weights {100 * agreement:.2f}% of tokens x layers route as the engine"

    def show(self, title: str, facts: Sequence[str]) -> None:
        """Print the facts, then the table of passes and the table of parts."""
        console = show_facts(title, [*facts, self.routing], width=120)
        columns = ("fixed", "mean |pi-mu|", "99%", "max", "pi/mu 1% .. 99%", "moved pi by")
        passes: list[tuple[str, ...]] = []
        for i, m in enumerate(self.results):
            gaps = map(_small, (m.gap, m.gap_p99, m.gap_max))
            ratios = f"{m.ratio_low:.4f} .. {m.ratio_high:.4f}"
            passes.append((m.rung.fixes, *gaps, ratios, _small(m.moved) if i else ""))
        note = (
            "fixed: the cause that is fixed in this pass, beside those above; |pi-mu|: mean, 99th percentile and "
            "largest; pi/mu: 1st and 99th percentile; moved pi by: mean change of pi by this fix."
        )
        title = "pi with one more cause fixed in each row"
        SummaryTable(title, columns, passes, note).show(console)
        total = self.results[0].gap
        parts = {**self.split, "all": total}
        rows = [(cause, _small(part), _share(part, total)) for cause, part in parts.items()]
        note = "part: by how much fixing the cause lowers mean |pi-mu|; share: of the whole."
        title = "What mean |pi-mu| is made of"
        SummaryTable(title, ("cause", "part", "share"), rows, note).show(console)

    def to_text(self, step: int, responses: int) -> str:
        """Return every figure as JSON text."""
        figures = {
            "step": step,
            "responses": responses,
            "tokens": len(self.log_mu),
            "parts": self.split,
            "rungs": [m.as_json() for m in self.results],
        }
        return json.dumps(figures, indent=2) + "\n"


def _small(value: float) -> str:
    return f"{value:.2e}"


def _share(part: float, total: float) -> str:
    if total:
        return f"{100 * part / total:.1f}%"
    return ""


COLOURS = {"sampling transform": ORANGE, "staleness": VERMILION, "routing": PINK, "numerics": BLUE}
SMALLEST_GAP = 1e-9
"""Smaller gaps are drawn at this value, because a logarithmic axis has no zero."""
NARROWEST_RATIO = 1.001
"""The axis of pi / mu reaches at least from 1 / x to x (x: this value), so that mere rounding does not fill it."""
WIDE_RATIO = 4.0
"""The axis of pi / mu is logarithmic if a ratio is above this value or below 1 / this value."""
GROUPS, FEWEST = 16, 50
"""Groups of tokens for the percentiles: the largest number of groups, and the smallest number of tokens in a group."""
DARKENING = LinearSegmentedColormap.from_list("tokens", ["#9ecae1", "#08306b"])


def draw(path: Path, title: str, parts: Parts) -> None:
    """Write the PNG: a row of bars for the parts, then two panels for each of two passes.

    The two passes are the first pass (nothing fixed) and the last pass in the run's dtype (all causes fixed but
    numerics). Their panels show pi / mu and |pi - mu| of every token against mu, as in Figure 2 of arXiv 2602.04879.
    """
    results = parts.results
    log_mu = parts.log_mu.numpy()
    passes = [m for m in results if m.rung.dtype == results[0].rung.dtype]
    if len(passes) > 1:
        passes = [passes[0], passes[-1]]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 2.4 + 3.9 * len(passes)), dpi=130)
        figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        grid = figure.add_gridspec(1 + len(passes), 2, height_ratios=[1, *[2.2] * len(passes)])
        _draw_parts(figure.add_subplot(grid[0, :]), parts.split, results[0].gap)
        rows: list[tuple[Axes, Axes]] = []
        for i in range(1, len(passes) + 1):
            rows.append((figure.add_subplot(grid[i, 0]), figure.add_subplot(grid[i, 1])))
        for (left_axes, right_axes), result in zip(rows, passes, strict=True):
            log_pi = result.log_probs.numpy()
            name = "all but numerics fixed"
            if result is results[0]:
                name = result.rung.fixes
            _draw_ratio(left_axes, log_mu, log_pi, name)
            _draw_gap(right_axes, log_mu, log_pi, result.gap)
        gap_panels = [right_axes for _, right_axes in rows]
        limits = [axes.get_ylim() for axes in gap_panels]
        for axes in gap_panels:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        FigureCanvasAgg(figure).print_png(path)


def _draw_parts(axes: Axes, split: Mapping[str, float], total: float) -> None:
    """Draw one bar for each cause, from the gap before its fix to the gap after it."""
    remaining_gap = total
    for row, (cause, part) in enumerate(split.items()):
        axes.barh(row, -part, left=remaining_gap, color=COLOURS[cause], height=0.62)
        text = f" {part:.2e}"
        if total:
            text += f" ({100 * part / total:.0f}%)"
        right_end = max(remaining_gap, remaining_gap - part)
        axes.text(right_end, row, text, va="center", fontsize=SMALL)
        remaining_gap -= part
    axes.set_yticks(range(len(split)), list(split))
    axes.invert_yaxis()
    low, high = axes.get_xlim()
    # Matplotlib adds 5% to the longest bar; 18% leaves space for the text at its right.
    axes.set_xlim(min(0, low), 1.18 * max(total, high / 1.05))
    axes.set_xlabel("mean |pi - mu| left")
    axes.set_title("What the gap is made of", loc="left", fontweight="bold")
    simplify(axes, grid="x")


def _draw_ratio(axes: Axes, log_mu: np.ndarray, log_pi: np.ndarray, name: str) -> None:
    """Draw pi / mu of every token against mu, with its 1st and 99th percentile."""
    ratio = np.exp(log_pi - log_mu)
    width = max(ratio.max(), 1 / ratio.min())
    _density(axes, log_mu, ratio, "log" if width > WIDE_RATIO else "linear")
    axes.axhline(1, color="#444444", linewidth=0.8)
    for percent in (1, 99):
        (line,) = axes.plot(*_percentile(log_mu, ratio, percent), color=GREEN)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1 / NARROWEST_RATIO), max(high, NARROWEST_RATIO))
    if axes.get_yscale() == "linear":
        # Write tick labels in full (0.9995), not as differences ("-5") from an offset ("1e-4 + 1").
        axes.ticklabel_format(axis="y", useOffset=False)
    _finish(axes, f"pi / mu   ({name})", "ratio")
    line.set_label("1st and 99th percentile")
    axes.legend(handles=[line], frameon=False, fontsize=SMALL, loc="best")


def _draw_gap(axes: Axes, log_mu: np.ndarray, log_pi: np.ndarray, mean: float) -> None:
    """Draw |pi - mu| of every token against mu, with its 99th percentile and its mean."""
    gap = np.maximum(np.abs(np.exp(log_pi) - np.exp(log_mu)), SMALLEST_GAP)
    _density(axes, log_mu, gap, "log")
    (line,) = axes.plot(*_percentile(log_mu, gap, 99), color=GREEN, label="99th percentile")
    mean_line = axes.axhline(
        max(mean, SMALLEST_GAP), color=VERMILION, ls="--", label=f"mean {mean:.1e}"
    )
    _finish(axes, "|pi - mu|, the token's TV", "probability")
    axes.legend(handles=[line, mean_line], frameon=False, fontsize=SMALL, loc="best")


def _density(
    axes: Axes, log_mu: np.ndarray, values: np.ndarray, scale: Literal["log", "linear"]
) -> None:
    """Draw the density of tokens as hexagons, darker for more tokens."""
    axes.hexbin(
        np.exp(log_mu),
        values,
        xscale="log",
        yscale=scale,
        bins="log",
        gridsize=48,
        cmap=DARKENING,
        mincnt=1,
        linewidths=0.2,
    )


def _percentile(
    log_mu: np.ndarray, values: np.ndarray, percent: float
) -> tuple[list[float], list[float]]:
    """Return points of a percentile of ``values`` against mu, one for each group of tokens with similar mu.

    All groups have the same number of tokens, give or take one.
    """
    order = np.argsort(log_mu, kind="stable")
    groups = np.array_split(order, max(1, min(GROUPS, len(order) // FEWEST)))
    centres = [float(np.exp(np.median(log_mu[group]))) for group in groups]
    return centres, [float(np.percentile(values[group], percent)) for group in groups]


def _finish(axes: Axes, title: str, unit: str) -> None:
    """Set the title, the axis labels and the grid of a panel."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("mu, the engine's probability of the token")
    axes.set_ylabel(unit)
    simplify(axes)
