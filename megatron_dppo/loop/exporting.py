"""The trained policy as a Hugging Face folder, and what transformers makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.loop.batches import BatchLayout
from megatron_dppo.loop.export_check import max_log_prob_difference
from megatron_dppo.trainer.distributed import any_rank
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.types import Problem, Rollout

SEQUENCES_TO_CHECK = 16


def export(
    config: TrainConfig,
    trainer: Trainer,
    layout: BatchLayout,
    examples: Sequence[Rollout | Problem],
) -> float | None:
    """Write ``<run.directory>/hf``. Collective.

    Returns the largest difference of a log-probability, in nats, between trainer and export on the first
    ``examples``; None unless ``checkpoint.verify_export``.
    """
    folder = Path(config.run.directory) / "hf"
    _clear(folder, trainer)
    trainer.export_hf(folder)
    if not config.checkpoint.verify_export:
        return None
    sequences = [_halves(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, layout, folder, sequences, config.rollout.temperature)


def _clear(folder: Path, trainer: Trainer) -> None:
    """Remove what an earlier, shorter run of this directory exported; its weights live on in the checkpoints."""
    if trainer.topology.rank == 0 and folder.exists():
        shutil.rmtree(folder)
    any_rank(False)  # nobody goes on before it is gone


def _halves(example: Rollout | Problem) -> tuple[Sequence[int], Sequence[int]]:
    """What comes first and what is scored; of a problem that nobody answered, its prompt without the first token."""
    if isinstance(example, Rollout):
        return example.prompt_ids, example.response_ids
    return example.prompt_ids[:1], example.prompt_ids[1:]
