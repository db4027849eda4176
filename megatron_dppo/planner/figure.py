"""A plan's memory as a picture: one bar for each kind of GPU, by part."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.planner.units import GIB
from megatron_dppo.planner.verdict import Verdict

_COLOURS = {
    "weights": "#4C72B0", "gradients": "#DD8452", "optimizer": "#55A868", "activations": "#C44E52",
    "logits": "#8172B3", "working": "#937860", "communicators": "#8C8C8C", "context": "#CCB974",
    "KV cache": "#64B5CD", "left free": "#E5E5E5",
}  # fmt: skip


def bars(plan: Verdict) -> dict[str, dict[str, float]]:
    """Bar -> part -> GiB, from the top: each trainer stage, then a server's GPU."""
    found = {
        f"trainer, stage {rank.stage}": {part: size / GIB for part, size in rank.parts.items()}
        for rank in plan.ranks
    }
    engine = plan.engine
    if engine is not None:
        found["server"] = {
            "weights": engine.weights / GIB,
            "KV cache": max(0, engine.kv_pool) / GIB,
            "left free": engine.reserved / GIB,
        }
    return found


def draw(plan: Verdict, path: str | Path) -> None:
    """Write the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    drawn = bars(plan)
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(drawn)))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, parts in enumerate(drawn.values()):
        left = 0.0
        for part, size in parts.items():
            axes.barh(row, size, left=left, color=_COLOURS[part], edgecolor="white", height=0.6)
            if size > 3.5:
                axes.text(left + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=8)
            left += size
    whole = plan.cluster.device.memory / GIB
    axes.axvline(whole, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(drawn)), list(drawn))
    axes.invert_yaxis()
    axes.set_xlim(0, max(whole, *(sum(parts.values()) for parts in drawn.values())) * 1.03)
    axes.set_xlabel(f"GiB of a GPU; dashed: {plan.cluster.device.name}")
    used = [part for part in _COLOURS if any(part in parts for parts in drawn.values())]
    handles = [Rectangle((0, 0), 1, 1, color=_COLOURS[part]) for part in used]
    figure.legend(handles, used, loc="upper center", ncol=5, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.42 / figure.get_figheight()))
    figure.savefig(path, dpi=120)
