"""Export of the trained policy as a Hugging Face folder, with an optional check by transformers.

Adapters are merged into it, and written a second time by themselves, as PEFT's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.batches import BatchLayout
from megatron_dppo.loop.export_check import max_log_prob_difference
from megatron_dppo.metrics.history import EXPORT_FOLDER
from megatron_dppo.trainer.collectives import all_gather_json, barrier
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Problem

ADAPTERS_FOLDER = "adapters"
SEQUENCES_TO_CHECK = 16
"""Number of examples that the check compares."""


Example = tuple[int, list[int], list[bool]]
"""Position in the batch, tokens and loss mask of a trajectory, as plain values."""


def examples_of(trajectories: Mapping[int, Trajectory]) -> list[Example]:
    """The first trajectories of a batch that are on this rank; copies, of a batch that goes."""
    first = [(p, trajectories[p]) for p in range(SEQUENCES_TO_CHECK) if p in trajectories]
    return [(p, t.token_ids.tolist(), t.loss_mask.tolist()) for p, t in first]


def gathered_examples(examples: Sequence[Example]) -> list[Trajectory]:
    """Those of all ranks, in order, on every rank. Collective."""
    by_position = {p: t for share in all_gather_json(list(examples)) for p, *t in share}
    return [Trajectory(0, 0, *by_position[position]) for position in sorted(by_position)]


def export(
    config: TrainConfig,
    trainer: Trainer,
    layout: BatchLayout,
    examples: Sequence[Trajectory | Problem],
) -> float | None:
    """Write ``<run.directory>/hf``, its adapters beside it, and check it with ``checkpoint.verify_export``. Collective.

    Args:
        config: of the run.
        trainer: whose weights are exported.
        layout: multiples that micro-batches must satisfy.
        examples: sequences for the check; the first ``SEQUENCES_TO_CHECK`` are used.

    Returns:
        Largest difference of a log-probability between trainer and export, nats; None without check.
    """
    folder = Path(config.run.directory) / EXPORT_FOLDER
    _clear(folder, trainer)
    trainer.export_hf(folder)
    if config.lora.rank and not config.lora.train_router:
        adapters = folder.with_name(ADAPTERS_FOLDER)
        _clear(adapters, trainer)
        trainer.export_peft(adapters)
    if not config.checkpoint.verify_export:
        return None
    compared = [_compared(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, layout, folder, compared, config.rollout.temperature)


def _clear(folder: Path, trainer: Trainer) -> None:
    """Remove the export of an earlier, shorter run; its weights are still in the checkpoints."""
    if trainer.topology.rank == 0 and folder.exists():
        shutil.rmtree(folder)
    barrier()  # no rank continues before the folder is removed


def _compared(example: Trajectory | Problem) -> Trajectory:
    """What the check compares on: a trajectory, or all of a problem's prompt but its first token."""
    if isinstance(example, Trajectory):
        return example
    return Trajectory.of_response(example.prompt_ids[:1], example.prompt_ids[1:])
