"""Draw docs/overview.png, one training step along its data, and docs/processes.png, the processes and their
connections.

python tools/draw_overview.py [docs]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ENGINE, LOOP, TRAINER, SYNC, CONTROL = "#d9e8f6", "#e9f3e1", "#fbe9d7", "#efe3f4", "#eeeeee"


@dataclass(frozen=True)
class Box:
    """A box with its centre ``x``, ``y``. Its text: ``title``, then ``action``, then the place of its ``code``."""

    x: float
    y: float
    title: str
    action: str
    code: str
    colour: str
    width: float = 1.95
    height: float = 1.05

    def edge(self, dx: float, dy: float) -> tuple[float, float]:
        """Return a point of the border. ``dx`` and ``dy``: distances from the centre, in halves of width and height."""
        return self.x + dx * (self.width / 2 + 0.04), self.y + dy * (self.height / 2 + 0.04)

    def draw(self, axes: Axes) -> None:
        """Draw the box."""
        style = "round,pad=0.02,rounding_size=0.08"
        corner = (self.x - self.width / 2, self.y - self.height / 2)
        axes.add_patch(
            FancyBboxPatch(
                corner, self.width, self.height, boxstyle=style,
                facecolor=self.colour, edgecolor="#555555",
            )
        )  # fmt: skip
        place: dict[str, Any] = {"ha": "center", "va": "center"}
        axes.text(self.x, self.y + 0.27, self.title, fontsize=10.5, weight="bold", **place)
        axes.text(self.x, self.y - 0.02, self.action, fontsize=9, **place)
        axes.text(self.x, self.y - 0.32, self.code, fontsize=8.5, family="monospace", **place)


@dataclass(frozen=True)
class Arrow:
    """An arrow between the borders of two boxes. ``tail`` and ``head``: as in ``Box.edge``. ``shift``: the label's
    distance from the arrow's middle."""

    start: str
    end: str
    tail: tuple[float, float]
    head: tuple[float, float]
    label: str = ""
    shift: tuple[float, float] = (0.0, 0.0)
    both: bool = False

    def draw(self, axes: Axes, boxes: dict[str, Box]) -> None:
        """Draw the arrow with its label."""
        (x0, y0), (x1, y1) = boxes[self.start].edge(*self.tail), boxes[self.end].edge(*self.head)
        style = "<|-|>" if self.both else "-|>"
        axes.add_patch(
            FancyArrowPatch(
                (x0, y0), (x1, y1), arrowstyle=style, mutation_scale=14, color="#333333"
            )
        )
        middle = ((x0 + x1) / 2 + self.shift[0], (y0 + y1) / 2 + self.shift[1])
        axes.text(*middle, self.label, ha="center", va="center", fontsize=8.5, style="italic")


STEP = {
    "problems": Box(0.9, 3.0, "problems", "the next prompts", "data/", LOOP, width=1.5),
    "fleet": Box(3.2, 3.0, "SGLang fleet", "draws responses, says mu", "fleet/, engine/", ENGINE),
    "trajectories": Box(5.6, 3.0, "trajectories", "tokens, mask, columns", "data/", LOOP),
    "rewards": Box(8.0, 3.0, "rewards, advantages", "score - group mean", "rewards/, algorithms/", LOOP),
    "exchange": Box(10.4, 3.0, "exchange, packing", "who trains on what", "loop/exchange.py, data/", LOOP),
    "forward": Box(10.4, 1.0, "Megatron-Core", "logits, TP x PP x EP x DP", "trainer/", TRAINER),
    "statistics": Box(8.0, 1.0, "policy statistics", "log pi, one all-reduce", "vocab_parallel/", TRAINER),
    "loss": Box(5.6, 1.0, "divergence, mask, loss", "D(mu, pi) > delta blocks", "algorithms/", TRAINER),
    "update": Box(3.2, 1.0, "weight update", "sent, compared, committed", "weights/", SYNC),
}  # fmt: skip
RIGHT, LEFT = ((1.0, 0.0), (-1.0, 0.0)), ((-1.0, 0.0), (1.0, 0.0))
STEP_ARROWS = (
    Arrow("problems", "fleet", *RIGHT),
    Arrow("fleet", "trajectories", *RIGHT),
    Arrow("trajectories", "rewards", *RIGHT),
    Arrow("rewards", "exchange", *RIGHT),
    Arrow("exchange", "forward", (0, -1), (0, 1), "micro-batches", (-0.55, 0.0)),
    Arrow("forward", "statistics", *LEFT),
    Arrow("statistics", "loss", *LEFT),
    Arrow("loss", "update", *LEFT, "optimiser step", (0.0, -0.68)),
    Arrow("update", "fleet", (0, 1), (0, -1), "weight version n", (-0.62, 0.0)),
)
PROCESSES = {
    "commands": Box(
        1.6,
        7.0,
        "your commands",
        "status, stop, fleet, report",
        "slurm/, fleet/, metrics/",
        CONTROL,
        width=2.5,
    ),
    "supervisor": Box(
        6.4,
        7.0,
        "supervisor, one a run",
        "starts, watches, restarts; the fleet's record",
        "train.py: launch/, fleet/endpoint.py",
        CONTROL,
        width=4.0,
    ),
    "router": Box(
        11.6,
        5.0,
        "HTTP router, one a fleet",
        "where a prefix is cached",
        "fleet/http_router.py",
        ENGINE,
        width=2.9,
    ),
    "server": Box(
        11.6,
        2.7,
        "SGLang server, one a device group",
        "scheduler, model, our plugins",
        "engine/launch_server.py",
        ENGINE,
        width=3.3,
    ),
    "rank": Box(
        5.4,
        2.7,
        "trainer rank, one a device",
        "the loop, Megatron-Core, the weight update",
        "train.py: loop/run.py",
        TRAINER,
        width=3.9,
    ),
    "parser": Box(
        1.45,
        4.3,
        "answer parser",
        "one a rank that generates",
        "engine/answer_parsing.py",
        LOOP,
        width=2.5,
    ),
    "reward": Box(
        1.45,
        2.7,
        "reward workers",
        "one response at a time",
        "rewards/verifier.py",
        LOOP,
        width=2.5,
    ),
    "environment": Box(
        1.45,
        1.1,
        "environment workers",
        "many episodes at a time",
        "environments/workers.py",
        LOOP,
        width=2.5,
    ),
    "agent": Box(
        1.45,
        -0.9,
        "agent, one an episode",
        "your program or function",
        "agents/agent.py",
        LOOP,
        width=2.5,
    ),
    "sandbox": Box(
        5.0,
        -0.9,
        "sandbox, one a snippet",
        "Python in bubblewrap",
        "environments/python_sandbox.py",
        LOOP,
        width=3.1,
    ),
    "folder": Box(
        7.6,
        0.7,
        "the run's folder",
        "metrics, batches, checkpoints; lease, stop request",
        "(a shared file system)",
        SYNC,
        width=4.4,
    ),
}
PROCESS_ARROWS = (
    Arrow("commands", "supervisor", *RIGHT, "HTTP, admin key", (0.0, 0.2)),
    Arrow(
        "supervisor",
        "rank",
        (-0.5, -1),
        (0.0, 1),
        "Popen or srun;\nexit code, heartbeat file",
        (-0.95, 0.2),
    ),
    Arrow(
        "rank",
        "supervisor",
        (0.55, 1),
        (0.05, -1),
        "members, faults:\nHTTP, admin key",
        (0.75, -0.5),
    ),
    Arrow("supervisor", "router", (1, -0.5), (-0.4, 1), "Popen", (0.45, 0.2)),
    Arrow(
        "supervisor",
        "server",
        (0.65, -1),
        (-0.85, 1),
        "Popen or srun,\nhealth by HTTP",
        (0.35, 0.45),
    ),
    Arrow("rank", "router", (1, 0.55), (-1, -0.4), "prompts: HTTP, API key", (0.35, -0.35)),
    Arrow("router", "server", (0, -1), (0, 1), "HTTP", (0.35, 0.0), both=True),
    Arrow(
        "rank",
        "server",
        (1, -0.35),
        (-1, -0.35),
        "weights: NCCL or gloo,\nCUDA IPC, disk; orders and\nhashes: HTTP, admin key",
        (0.0, -0.6),
    ),
    Arrow("rank", "parser", (-1, 0.5), (1, -0.3), "pipe,\nshared memory", (0.75, 0.25), both=True),
    Arrow("rank", "reward", *LEFT, "pipe, JSON", (0.0, -0.22), both=True),
    Arrow("rank", "environment", (-0.85, -1), (1, 0.6), "pipe, JSON", (0.6, -0.05), both=True),
    Arrow(
        "environment",
        "agent",
        (-0.4, -1),
        (-0.4, 1),
        "Popen; chat completions:\nHTTP, a session's key",
        (1.05, 0.0),
        both=True,
    ),
    Arrow("environment", "sandbox", (1, -0.6), (-0.5, 1), "bwrap, pipes", (0.62, 0.12), both=True),
    Arrow("rank", "folder", (0.6, -1), (-0.45, 1), "files, written whole", (-0.95, 0.0), both=True),
)


def main() -> None:
    """Write both pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    draw(folder / "overview.png", STEP, STEP_ARROWS, (12.4, 4.1), (0, 11.6, 0.2, 3.8))
    draw(folder / "processes.png", PROCESSES, PROCESS_ARROWS, (13.4, 9.1), (0, 13.5, -1.55, 7.7))


def draw(
    path: Path, boxes: dict[str, Box], arrows: tuple[Arrow, ...], inches: tuple[float, float],
    limits: tuple[float, float, float, float],
) -> None:  # fmt: skip
    """Write one picture."""
    figure, axes = plt.subplots(figsize=inches, dpi=110)
    for box in boxes.values():
        box.draw(axes)
    for arrow in arrows:
        arrow.draw(axes, boxes)
    axes.axis(limits)
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
