"""Draw docs/overview.png: one training step along its data, with the folders that do each part.

python tools/draw_overview.py [docs/overview.png]
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

Box = tuple[float, float, str, str, str]
"""x, y (of the centre), title, what it does, where it lives."""

ENGINE, LOOP, TRAINER, SYNC = "#d9e8f6", "#e9f3e1", "#fbe9d7", "#efe3f4"
BOXES: dict[str, tuple[Box, str]] = {
    "problems": ((0.9, 3.0, "problems", "the next prompts", "data/"), LOOP),
    "fleet": ((3.2, 3.0, "SGLang fleet", "draws responses, says mu", "fleet/, engine/"), ENGINE),
    "trajectories": ((5.6, 3.0, "trajectories", "tokens, mask, columns", "data/"), LOOP),
    "rewards": ((8.0, 3.0, "rewards, advantages", "score - group mean", "rewards/, algorithms/"), LOOP),
    "exchange": ((10.4, 3.0, "exchange, packing", "who trains on what", "loop/rollouts/, data/"), LOOP),
    "forward": ((10.4, 1.0, "Megatron-Core", "logits, TP x PP x EP x DP", "trainer/"), TRAINER),
    "statistics": ((8.0, 1.0, "policy statistics", "log pi, one all-reduce", "vocab_parallel/"), TRAINER),
    "loss": ((5.6, 1.0, "divergence, mask, loss", "D(mu, pi) > delta blocks", "algorithms/"), TRAINER),
    "update": ((3.2, 1.0, "weight update", "sent, compared, committed", "weight_sync/"), SYNC),
}  # fmt: skip
ARROWS = (
    ("problems", "fleet", ""),
    ("fleet", "trajectories", ""),
    ("trajectories", "rewards", ""),
    ("rewards", "exchange", ""),
    ("exchange", "forward", "micro-batches"),
    ("forward", "statistics", ""),
    ("statistics", "loss", ""),
    ("loss", "update", "optimiser step"),
    ("update", "fleet", "weight version n"),
)
WIDTH, HEIGHT = 1.95, 1.05


def main() -> None:
    """Write the picture."""
    path = sys.argv[1] if len(sys.argv) > 1 else "docs/overview.png"
    figure, axes = plt.subplots(figsize=(12.4, 4.1), dpi=110)
    for name, (box, colour) in BOXES.items():
        _draw_box(axes, box, colour, narrow=name == "problems")
    for start, end, label in ARROWS:
        _draw_arrow(axes, start, end, label)
    axes.set(xlim=(0, 11.6), ylim=(0.2, 3.8))
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(path)


def _draw_box(axes: Axes, box: Box, colour: str, *, narrow: bool) -> None:
    x, y, title, action, folder = box
    width = _width(narrow)
    corner = (x - width / 2, y - HEIGHT / 2)
    style = "round,pad=0.02,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(corner, width, HEIGHT, boxstyle=style, facecolor=colour, edgecolor="#555555")
    )
    axes.text(x, y + 0.27, title, ha="center", va="center", fontsize=10.5, weight="bold")
    axes.text(x, y - 0.02, action, ha="center", va="center", fontsize=9)
    axes.text(x, y - 0.32, folder, ha="center", va="center", fontsize=8.5, family="monospace")


def _draw_arrow(axes: Axes, start: str, end: str, label: str) -> None:
    (x0, y0, *_), (x1, y1, *_) = BOXES[start][0], BOXES[end][0]
    if y0 == y1:
        side = 1 if x1 > x0 else -1
        tail = (x0 + side * (_width(start == "problems") / 2 + 0.04), y0)
        head = (x1 - side * (WIDTH / 2 + 0.04), y1)
    else:
        side = 1 if y1 > y0 else -1
        tail, head = (x0, y0 + side * (HEIGHT / 2 + 0.04)), (x1, y1 - side * (HEIGHT / 2 + 0.04))
    axes.add_patch(
        FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=14, color="#333333")
    )
    if label and y0 == y1:
        axes.text(
            (tail[0] + head[0]) / 2, y0 - 0.68, label, ha="center", fontsize=8.5, style="italic"
        )
    elif label:
        axes.text(
            x0 - 0.08, (y0 + y1) / 2, label, ha="right", va="center", fontsize=8.5, style="italic"
        )


def _width(narrow: bool) -> float:
    return 1.5 if narrow else WIDTH


if __name__ == "__main__":
    main()
