"""Supervised run on one rank: warm start of a policy before RL."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from megatron_dppo.algorithms.policy_loss import LossSums, negative_log_likelihood
from megatron_dppo.config.schema import SupervisedConfig
from megatron_dppo.data.packing import PackedBatch, pack, padded_length, plan_mini_batch
from megatron_dppo.data.problems import Pair, load_pairs, load_tokenizer
from megatron_dppo.data.sampling import ProblemSampler
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.logging import fatal
from megatron_dppo.loop.ending import RunFence, run_fence
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import EXPORT_FOLDER
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.shape import forward_flops
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.trainer import Trainer
from megatron_dppo.trainer.watchdog import patience
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats

log = logging.getLogger(__name__)


def run_supervised_rank(config: SupervisedConfig) -> None:
    """Run ``run.steps`` optimiser steps on shuffled pairs, then export. Collective.

    What a user can put right ends the process with a message.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with run_fence(config.run.directory) as fence:
            _run(config, fence)
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")


def _run(config: SupervisedConfig, fence: RunFence) -> None:
    out = Path(config.run.directory) / EXPORT_FOLDER
    if out.exists():
        raise CheckpointError(f"{out}: there already; remove it, or name another run.directory")
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    pairs = load_pairs(
        config.data.train, tokenizer, apply_chat_template=config.data.apply_chat_template
    )
    with patience("others start"):
        trainer = Trainer(config)
    fence.join()
    sampler = ProblemSampler(len(pairs), config.run.seed)
    first = last = 0.0
    with progress("supervised warm start", config.run.steps) as bar:
        for step in range(config.run.steps):
            chosen = [pairs[i] for i in sampler.next(config.training.sequences_per_step)]
            last = _step(trainer, config, chosen)
            first = last if step == 0 else first
            bar.update(completed=step + 1, note=f"{last:.3f} nats a token")
    fence.check_together()
    with patience("others export"):
        trainer.export_hf(out)
    log.info("supervised: %.3f -> %.3f nats a token in %d steps", first, last, config.run.steps)


def _step(trainer: Trainer, config: SupervisedConfig, pairs: list[Pair]) -> float:
    """One optimiser step; returns the mean negative log-likelihood, nats per token."""
    samples = [Trajectory.of_response(prompt, response) for prompt, response in pairs]
    multiple = trainer.share.sequence_multiple
    lengths = [padded_length(s.length, multiple) for s in samples]
    cost = forward_flops(trainer.shape)
    plan = plan_mini_batch(
        lengths,
        [cost(length) for length in lengths],
        trainer.topology.dp_size,
        config.training.micro_batch_tokens,
        trainer.micro_batch_multiple,
    )
    own_batches = plan[trainer.topology.dp_rank]
    batches = [
        pack(
            [samples[i] for i in rows],
            indices=rows,
            pad_multiple=trainer.pad_multiple,
            sequence_multiple=multiple,
        )
        for rows in own_batches
    ]
    tokens = sum(s.sampled for s in samples)
    values = trainer.train_mini_batch(batches, _loss, float(tokens)).metrics.values()
    return values[names.LOSS] / tokens


def _loss(stats: PolicyStats, batch: PackedBatch) -> LossSums:
    return negative_log_likelihood(stats.log_probs, batch.loss_mask.to(stats.log_probs.device))
