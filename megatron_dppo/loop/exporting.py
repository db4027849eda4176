"""Export of the trained policy as a Hugging Face folder, with an optional check by transformers.

Adapters are merged into it, and written a second time by themselves, as PEFT's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.loop.learning import BatchLayout
from megatron_dppo.metrics.records import EXPORT_FOLDER
from megatron_dppo.trainer.collectives import all_gather_json, barrier, broadcast_json
from megatron_dppo.trainer.trainer import Trainer

# Check of an exported checkpoint: log-probabilities by transformers against the trainer's.


def max_log_prob_difference(
    trainer: Trainer,
    layout: BatchLayout,
    folder: str | Path,
    trajectories: Sequence[Trajectory],
    temperature: float,
) -> float:
    """max |log pi_trainer - log pi_transformers| over the sampled tokens, nats. Collective.

    transformers loads ``folder`` on rank 0, in the exported dtype, on the CPU.

    Args:
        trainer: whose weights were exported.
        layout: multiples that micro-batches must satisfy.
        folder: the exported Hugging Face folder.
        trajectories: what to compare on.
        temperature: divides the logits on both sides.
    """
    light = [t.without(*t.columns) for t in trajectories]
    batch = pack(
        light, pad_multiple=layout.pad_multiple, sequence_multiple=layout.sequence_multiple
    )
    batches = [batch] + [
        pack([], pad_multiple=layout.pad_multiple) for _ in range(layout.count_multiple - 1)
    ]
    ours = trainer.log_probs(batches)[0].cpu()[batch.loss_mask]
    difference = None
    if trainer.topology.rank == 0:
        theirs = torch.cat(transformers_log_probs(folder, light, temperature))
        difference = (ours.double() - theirs.double()).abs().max().item()
    return broadcast_json(difference, src=0)


def transformers_log_probs(
    folder: str | Path, trajectories: Sequence[Trajectory], temperature: float
) -> list[torch.Tensor]:
    """log pi of each sampled token by transformers, nats: one fp32 tensor [N] for each trajectory."""
    disable_progress_bar()
    # As somebody else would load it: in the type that its config.json names.
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        sampled = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        with torch.no_grad():
            # The logits of a position are of the token after it.
            logits = model(ids[None]).logits[0, sampled - 1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        answers.append(log_probs.gather(1, ids[sampled][:, None])[:, 0])
    return answers


ADAPTERS_FOLDER = "adapters"
SEQUENCES_TO_CHECK = 16
"""Number of examples that the check compares."""


Example = tuple[int, list[int], list[bool]]
"""Position in the batch, tokens and loss mask of a trajectory without branches, as plain values."""


def examples_of(trajectories: Mapping[int, Trajectory]) -> list[Example]:
    """The first trajectories of a batch that are on this rank; copies, of a batch that goes."""
    first = [
        (p, trajectories[p].branches[0]) for p in range(SEQUENCES_TO_CHECK) if p in trajectories
    ]
    return [(p, t.token_ids.tolist(), t.loss_mask.tolist()) for p, t in first]


def gathered_examples(examples: Sequence[Example]) -> list[Trajectory]:
    """Those of all ranks, in order, on every rank. Collective."""
    by_position = {p: t for share in all_gather_json(list(examples)) for p, *t in share}
    return [Trajectory(0, 0, *by_position[position]) for position in sorted(by_position)]


def export(
    directory: str,
    trainer: Trainer,
    layout: BatchLayout,
    examples: Sequence[Trajectory | Problem] | None,
) -> float | None:
    """Write ``<directory>/hf``, its adapters beside it, and check it on ``examples``. Collective.

    Args:
        directory: of the run.
        trainer: whose weights are exported.
        layout: multiples that micro-batches must satisfy.
        examples: sequences for the check, the first ``SEQUENCES_TO_CHECK`` are used; None: no check.

    Returns:
        Largest difference of a log-probability between trainer and export, nats; None without check.
    """
    folder = Path(directory) / EXPORT_FOLDER
    _clear(folder, trainer)
    trainer.export_hf(folder)
    lora = trainer.config.lora
    if lora.rank and not lora.train_router:
        adapters = folder.with_name(ADAPTERS_FOLDER)
        _clear(adapters, trainer)
        trainer.export_peft(adapters)
    if examples is None:
        return None
    compared = [_compared(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, layout, folder, compared, trainer.config.temperature)


def _clear(folder: Path, trainer: Trainer) -> None:
    """Remove the export of an earlier, shorter run; its weights are still in the checkpoints."""
    if trainer.topology.rank == 0 and folder.exists():
        shutil.rmtree(folder)
    # No rank continues before the folder is removed.
    barrier()


def _compared(example: Trajectory | Problem) -> Trajectory:
    """What the check compares on: a trajectory, or all of a problem's prompt but its first token."""
    if isinstance(example, Trajectory):
        return example
    return Trajectory.of_response(example.prompt_ids[:1], example.prompt_ids[1:])
