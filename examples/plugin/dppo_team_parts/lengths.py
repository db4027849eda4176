"""Print the response lengths of each step of a run.

``megatron-dppo lengths RUN_DIRECTORY``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from megatron_dppo.logging import fatal
from megatron_dppo.metrics.records import RecordsError
from megatron_dppo.metrics.samples import read_samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a step: the shortest, the median and the longest response among the run's samples."""
    parser = argparse.ArgumentParser(prog="megatron-dppo lengths", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="folder of a run")
    run = parser.parse_args(arguments).run
    tokens_by_step: dict[int, list[int]] = defaultdict(list)
    try:
        for sample in read_samples(run):
            tokens_by_step[sample.step].append(sample.tokens)
    except RecordsError as error:
        fatal(str(error))
    for step, tokens in sorted(tokens_by_step.items()):
        print(f"step {step}: {min(tokens)} to {max(tokens)} tokens, median {median(tokens):g}")
    return 0
