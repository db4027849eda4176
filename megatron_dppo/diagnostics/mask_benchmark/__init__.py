"""``megatron-dppo bench-mask``: what policy statistics and masks cost here, beside other implementations."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def run_rank(rank: int, options: argparse.Namespace, result: Path) -> None:
    """Run the benchmark as ``rank``. Rank 0 writes the measurements into the file ``result``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # The libraries that are measured are imported here, so that the process that starts the ranks does not load them.
    from megatron_dppo.diagnostics.mask_benchmark.measure import measure

    measurements = measure(options)
    if rank == 0:
        result.write_text(json.dumps(measurements))
