"""Megatron's distributed checkpoint format, written by the ranks themselves.

``megatron.core.dist_checkpointing.save`` hands its tensors to forked processes and their results to
a manager process, which is spawned: seconds of imports for a small model, and a rank whose own small
files fail leaves the others waiting. Here every rank writes its file in its own process with
torch's writer, which reports a failure to all ranks; the files are the same, and
``megatron.core.dist_checkpointing.load`` reads them.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import (
    CheckpointingException,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_dppo.model.errors import CheckpointError


class _Writer(dcp.FileSystemWriter):
    """torch's writer, whose errors name the disk's."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # After a failed write the zip writer complains about its position, as it is closed.
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else error) from None


class ShardedSave:
    """One save: what this rank writes, then the writing. Construction and ``write`` are collective.

    ``data_group``: replicas over which tensors that all of them hold are spread, so that they write
    in parallel. ``own_bytes``: tensor bytes that this rank writes.
    """

    def __init__(self, state: dict[str, Any], data_group: ProcessGroup) -> None:
        sharded, self._common = save_preprocess(state)
        if data_group.size() > 1:
            distribution = determine_main_replica_uniform_distribution(sharded, data_group)
            distribute_main_replicas_with_precomputed_distribution(
                sharded, data_group, distribution
            )
        self._tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        self.own_bytes = sum(
            t.data.numel() * t.data.itemsize
            for t in nested_values(sharded)
            if isinstance(t, ShardedTensor) and is_main_replica(t.replica_id)
        )

    def write(self, folder: Path) -> None:
        """Write this rank's tensors and, on rank 0, the index. Collective.

        Raises CheckpointError on every rank where one of them could not write.
        """
        try:
            dcp.save(
                mcore_to_pyt_state_dict(self._tensors),
                # One thread: torch's writer loses the errors of any other.
                storage_writer=_Writer(folder, thread_count=1, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as error:
            raise CheckpointError(_reasons(error)) from error

    def write_headers(self, folder: Path) -> None:
        """What ``dist_checkpointing.load`` expects beside the tensors. Global rank 0, not collective."""
        common = io.BytesIO()  # torch.save to a path says "iostream error" where the disk is full
        torch.save(self._common, common)
        (folder / COMMON_STATE_FNAME).write_bytes(common.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def load_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill ``state`` from ``folder``, which may have been written under another layout. Collective.

    Raises CheckpointError where the folder holds other tensors than ``state``. torch unpickles
    ``.metadata``, so a checkpoint is to be trusted like code; tensors and common.pt are read with
    ``weights_only``.
    """
    try:
        return dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: {_reasons(error)}") from error
    except (CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{folder}: does not fit this model: {error}") from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(
        f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"
        for rank, failure in sorted(error.failures.items())
    )
