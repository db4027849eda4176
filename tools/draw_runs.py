"""Draw one metric of several runs over their steps. Runs of one kind have one colour.

python tools/draw_runs.py docs/lora.png --metric evaluation/held_out/accuracy \
    "full training=runs/full-1,runs/full-2" "lora.rank=8=runs/lora-1,runs/lora-2"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_dppo.metrics.records import read_records, series

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("kinds", nargs="+", help="LABEL=FOLDER,FOLDER,...")
    parser.add_argument("--metric", default="evaluation/held_out/accuracy")
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7.2, 3.6), dpi=110)
    for colour, kind in zip(COLOURS, options.kinds, strict=False):
        label, _, folders = kind.rpartition("=")
        for i, folder in enumerate(folders.split(",")):
            steps, values = series(read_records(folder), options.metric)
            axes.plot(steps, values, "o-", color=colour, ms=3.5, lw=1.4, label="" if i else label)
    axes.set(xlabel="step", ylabel=options.metric)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
