"""Writer and loader of Megatron's distributed checkpoint format.

Every rank writes its file in its own process with torch's writer, which reports a failure to all
ranks. ``megatron.core.dist_checkpointing.save`` is not used: it writes in forked processes and
spawns a manager process (seconds of imports for a small model), and a rank that fails to write its
small files leaves the others waiting. The files are the same:
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

from megatron_dppo.checkpoint_conversion.errors import CheckpointError


class _Writer(dcp.FileSystemWriter):
    """torch's writer; its errors are the disk's OSErrors."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # After a failed write, closing the zip writer raises an error about its position.
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else error) from None


class ShardedSave:
    """One save of a sharded state dict. Construction and ``write`` are collective.

    Args:
        state: sharded state dict.
        data_group: the replicas; tensors that all of them hold are distributed over it for writing.

    Attributes:
        own_bytes: tensor bytes that this rank will write.
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

        Raises CheckpointError on every rank if a rank could not write.
        """
        try:
            dcp.save(
                mcore_to_pyt_state_dict(self._tensors),
                # One thread: torch's writer loses the errors of further threads.
                storage_writer=_Writer(folder, thread_count=1, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as error:
            raise CheckpointError(_reasons(error)) from error

    def write_headers(self, folder: Path) -> None:
        """Write the other files that ``dist_checkpointing.load`` expects. Global rank 0 only."""
        common = io.BytesIO()  # torch.save to a path reports a full disk as "iostream error"
        torch.save(self._common, common)
        (folder / COMMON_STATE_FNAME).write_bytes(common.getvalue())
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def load_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill ``state`` from ``folder``, which may be of another layout. Collective.

    Load only trusted checkpoints: torch unpickles ``.metadata``. Tensors and common.pt are read with
    ``weights_only``.

    Raises:
        CheckpointError: unreadable, or the folder's tensors are not those of ``state``.
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
