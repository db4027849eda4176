"""Export the policy of a run, compare the export's log-probabilities with the trainer's, and upload the export.

In the export, adapters are merged into the weights. Adapters are also written to a separate PEFT folder, unless the
routers are trained with them. The comparison loads the export with transformers.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_dppo.checkpoint_conversion import uploading
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.metrics.records import EXPORT_FOLDER, remember_upload
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.collectives import all_gather_json, barrier, broadcast_json

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)

ADAPTERS_FOLDER = "adapters"
SEQUENCES_TO_CHECK = 16
"""Number of sequences whose log-probabilities the check compares."""

Example = tuple[int, list[int], list[bool]]
"""A trajectory's position in the batch, and the tokens and the loss mask of its first branch, as plain values."""


def export(
    directory: str, trainer: Trainer, examples: Sequence[Trajectory | Problem] | None
) -> float | None:
    """Write ``<directory>/hf`` and the adapters next to it, then check the export on ``examples``. Collective.

    Args:
        directory: folder of the run.
        trainer: the trainer whose weights are exported.
        examples: sequences for the check; only the first ``SEQUENCES_TO_CHECK`` are used. None: no check.

    Returns:
        Largest difference of a log-probability between trainer and export, nats; None without a check.
    """
    folder = Path(directory) / EXPORT_FOLDER
    _clear(folder, trainer)
    trainer.export_hf(folder)
    if trainer.adapted is not None and not trainer.config.lora.train_router:
        adapters = folder.with_name(ADAPTERS_FOLDER)
        _clear(adapters, trainer)
        trainer.adapted.export(adapters, trainer.config.model.hf_checkpoint)
    if examples is None:
        return None
    sequences = [_sequence_to_check(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, folder, sequences, trainer.config.temperature)


def _clear(folder: Path, trainer: Trainer) -> None:
    """Remove the export of an earlier, shorter run; its weights are still in the checkpoints."""
    if trainer.topology.rank == 0 and folder.exists():
        shutil.rmtree(folder)
    # No rank continues before the folder is removed.
    barrier()


def _sequence_to_check(example: Trajectory | Problem) -> Trajectory:
    """Return the sequence to compare: a trajectory, or the prompt of a problem.

    Of the problem's prompt, the first token counts as the prompt, and the other tokens count as the response.
    """
    if isinstance(example, Trajectory):
        return example
    return Trajectory.of_response(example.prompt_ids[:1], example.prompt_ids[1:])


def max_log_prob_difference(
    trainer: Trainer, folder: str | Path, trajectories: Sequence[Trajectory], temperature: float
) -> float:
    """Compute max |log pi_trainer - log pi_transformers| over the sampled tokens, nats. Collective.

    Rank 0 loads ``folder`` with transformers, in the exported dtype, on the CPU.

    Args:
        trainer: the trainer whose weights were exported.
        folder: the exported Hugging Face folder.
        trajectories: the sequences to compare.
        temperature: divides the logits of both models.
    """
    # Drop all columns. With a column of recorded routing, the trainer would use other experts than transformers.
    sequences = [t.without(*t.columns) for t in trajectories]
    # The first micro-batch has all sequences. The interleaved schedule may need more micro-batches, which are empty.
    batches = trainer.packed(sequences)
    trainer_values = trainer.log_probs(batches)[0].cpu()[batches[0].loss_mask]
    difference = None
    if trainer.topology.rank == 0:
        transformers_values = torch.cat(transformers_log_probs(folder, sequences, temperature))
        difference = (trainer_values.double() - transformers_values.double()).abs().max().item()
    return broadcast_json(difference, src=0)


def transformers_log_probs(
    folder: str | Path, trajectories: Sequence[Trajectory], temperature: float
) -> list[torch.Tensor]:
    """Compute log pi of each sampled token with transformers, nats: one fp32 tensor [N] for each trajectory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Load the folder with the defaults, as its users do: in the dtype that its config.json names.
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    results = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        positions = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        with torch.no_grad():
            # The logits at a position predict the next token.
            logits = model(ids[None]).logits[0, positions - 1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        results.append(log_probs.gather(1, ids[positions][:, None])[:, 0])
    return results


def examples_of(trajectories: Mapping[int, Trajectory]) -> list[Example]:
    """Copy this rank's trajectories among the first ``SEQUENCES_TO_CHECK`` trajectories of the batch.

    The copies are used after the batch is freed.
    """
    examples = []
    for position in range(SEQUENCES_TO_CHECK):
        if position in trajectories:
            branch = trajectories[position].branches[0]
            examples.append((position, branch.token_ids.tolist(), branch.loss_mask.tolist()))
    return examples


def gathered_examples(examples: Sequence[Example]) -> list[Trajectory]:
    """Gather the examples of all ranks and return them on every rank, in the order of positions. Collective."""
    by_position: dict[int, list[Any]] = {}
    for share in all_gather_json(list(examples)):
        for position, *columns in share:
            by_position[position] = columns
    # The problem's id and the sample's index are not needed: set both to 0.
    return [Trajectory(0, 0, *by_position[position]) for position in sorted(by_position)]


def upload_export(directory: str, repository: str, steps: int) -> None:
    """Upload ``<directory>/hf``, the export after ``steps`` steps, to huggingface.co.

    A failed upload is logged with the command that repeats it; the error is not raised. The upload is recorded in any
    case, so that the run counts as finished.
    """
    folder = Path(directory) / EXPORT_FOLDER
    log.info("sending %s to %s", folder, repository)
    try:
        log.info("%s is sent: %s", folder, uploading.upload(folder, repository))
    except CheckpointError as error:
        command = f"megatron-dppo convert upload --hf {folder} --repo {repository}"
        log.warning("%s; the run itself is finished. This repeats it: %s", error, command)
    remember_upload(directory, repository, steps)
