"""Actions on the disk whose failure on one rank is every rank's failure, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_dppo.checkpoint_conversion.errors import CheckpointError
from megatron_dppo.trainer.collectives import all_gather_json, broadcast_json

T = TypeVar("T")


def on_every_rank(action: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """``action()``, which must not be collective; CheckpointError on all ranks if one's failed.

    ``group``: of all ranks, in their order (None: the default one).
    """
    error: Exception | None = None
    try:
        result = action()
    except (OSError, RuntimeError, ValueError) as failure:
        error = failure
    reports = all_gather_json(None if error is None else str(error), group)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text is not None]
    if failed:
        raise CheckpointError("; ".join(failed)) from error
    return result


def on_rank_0(action: Callable[[], Any], group: ProcessGroup | None = None) -> Any:
    """``action()`` of global rank 0, whose result is plain JSON, on every rank."""
    result = on_every_rank(lambda: action() if dist.get_rank() == 0 else None, group)
    return broadcast_json(result, src=0, group=group)
