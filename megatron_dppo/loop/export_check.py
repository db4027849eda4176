"""Check of an exported checkpoint: log-probabilities by transformers against the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.batches import BatchLayout
from megatron_dppo.trainer.collectives import broadcast_json
from megatron_dppo.trainer.trainer import Trainer


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
    batch = pack(light, pad_multiple=layout.pad_multiple)
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
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        sampled = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, sampled - 1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        answers.append(log_probs.gather(1, ids[sampled][:, None])[:, 0])
    return answers
