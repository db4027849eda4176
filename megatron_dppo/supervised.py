"""Train on prompt-response pairs, as a warm start.

``megatron-dppo supervised CONFIG.yaml [key.path=value ...]``.

The trainer of RL runs maximises the likelihood of the responses. The result is a Hugging Face folder,
``<run.directory>/hf``, from which an RL run can start. The program is for short runs: it saves no checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config import (
    ConfigError,
    SupervisedConfig,
    check_supervised_config,
    load_as,
    resolved_yaml,
)
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.machine import set_allocator, set_precision, this_machine
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.launch.library_checks import (
    CHECK,
    check_everything_supervised,
    check_in_child,
    checkpoint_faults,
    untried_options,
)
from megatron_dppo.launch.local import run_local
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.launch.stops import exit_by_code
from megatron_dppo.logging import configure_logging, fatal
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import EXPORT_FOLDER
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.shape import forward_flops
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import name_rank
from megatron_dppo.system.secret_variables import hide_secrets

if TYPE_CHECKING:
    from megatron_dppo.algorithms.policy_loss import LossSums
    from megatron_dppo.data.packing import PackedBatch
    from megatron_dppo.data.problems import Pair
    from megatron_dppo.loop.ending import RunFence
    from megatron_dppo.trainer.trainer import Trainer
    from megatron_dppo.vocab_parallel.policy_stats import PolicyStats

MODULE = "megatron_dppo.supervised"
log = logging.getLogger(MODULE)


def run_supervised_rank(config: SupervisedConfig) -> None:
    """Run ``run.steps`` optimiser steps on shuffled pairs, then export. Collective.

    Errors that the user can correct end the process with a message.
    """
    import torch

    from megatron_dppo.loop.ending import run_fence

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with run_fence(config.run.directory) as fence:
            _run(config, fence)
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")


def _run(config: SupervisedConfig, fence: RunFence) -> None:
    from megatron_dppo.data.sampling import ProblemSampler
    from megatron_dppo.trainer.trainer import Trainer
    from megatron_dppo.trainer.watchdog import patience

    out = Path(config.run.directory) / EXPORT_FOLDER
    if out.exists():
        raise CheckpointError(f"{out}: there already; remove it, or name another run.directory")
    pairs = _load_data(config)
    with patience("others start"):
        trainer = Trainer(config)
    fence.join()
    sampler = ProblemSampler(len(pairs), config.run.seed)
    losses: list[float] = []
    with progress("supervised warm start", config.run.steps) as bar:
        for step in range(config.run.steps):
            step_pairs = [pairs[i] for i in sampler.next(config.training.sequences_per_step)]
            losses.append(_step(trainer, config, step_pairs))
            bar.update(completed=step + 1, note=f"{losses[-1]:.3f} nats a token")
    fence.check_together()
    with patience("others export"):
        trainer.export_hf(out)
    log.info(
        "supervised: %.3f -> %.3f nats a token in %d steps", losses[0], losses[-1], len(losses)
    )


def _load_data(config: SupervisedConfig) -> list[Pair]:
    """Load the tokenizer and the pairs, and log what is seldom intended. Raises DataError."""
    from megatron_dppo.data.problems import (
        PromptForm,
        embedding_rows,
        load_pairs,
        load_tokenizer,
        template_warnings,
    )
    from megatron_dppo.data.turn_ends import ResponseEnds

    folder = config.model.hf_checkpoint
    tokenizer = load_tokenizer(folder)
    rows = embedding_rows(folder)
    form = PromptForm(
        config.data.apply_chat_template, arguments=config.data.chat_template_arguments
    )
    for warning in template_warnings(tokenizer, form, ResponseEnds.of(folder, tokenizer), rows):
        log.warning("%s: %s", folder, warning)
    pairs = load_pairs(config.data.train, tokenizer, form=form, embedding_rows=rows)
    file_warning = data_files(config.data.train).warning
    if file_warning:
        log.warning("%s", file_warning)
    return pairs


def _step(trainer: Trainer, config: SupervisedConfig, pairs: list[Pair]) -> float:
    """Make one optimiser step; return the mean negative log-likelihood in nats per token."""
    from megatron_dppo.data.balancing import plan_mini_batch
    from megatron_dppo.data.packing import pack, padded_length

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
    batches = []
    for indices in plan[trainer.topology.dp_rank]:
        batch = pack(
            [samples[i] for i in indices],
            indices=indices,
            pad_multiple=trainer.pad_multiple,
            sequence_multiple=multiple,
        )
        batches.append(batch)
    tokens = sum(s.sampled for s in samples)
    values = trainer.train_mini_batch(batches, _loss, float(tokens)).metrics.values()
    return values[metric_names.LOSS] / tokens


def _loss(stats: PolicyStats, batch: PackedBatch) -> LossSums:
    from megatron_dppo.algorithms.likelihood import negative_log_likelihood

    return negative_log_likelihood(stats.log_probs, batch.loss_mask.to(stats.log_probs.device))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate and run; return the exit code: 0 done, 1 failed, 2 refused, 130 stopped by Ctrl-C."""
    options = _parser().parse_args(arguments)
    hide_secrets()
    adopt_slurm_rank()
    try:
        config = load_as(SupervisedConfig, options.config, options.overrides)
        if options.check:
            check_everything_supervised(config, options.config)
            faults = list(checkpoint_faults(config.model.hf_checkpoint))
            if faults:
                raise ConfigError(faults, options.config)
            _load_data(config)
            for warning in untried_options(config):
                print(f"warning: {warning}")
            return 0
        # Ranks check the configuration themselves. The starting process, which has no RANK, leaves the check to a child
        # process if options are forwarded to Megatron-Core: the child imports the library for the check.
        if "RANK" in os.environ or not config.forwards_to_megatron:
            check_supervised_config(config, options.config)
        if "RANK" not in os.environ:
            exit_by_code()
            if config.forwards_to_megatron:
                check_code = check_in_child(MODULE, [options.config, *options.overrides])
                if check_code:
                    return check_code
            return run_local(
                config.run, config.parallel, resolved_yaml(config), None, MODULE, this_machine()
            )
    except RunError as error:
        fatal(str(error))
    if this_machine().gpus:
        set_allocator(None, os.environ)
        set_precision(config.megatron, os.environ)
    rank = int(os.environ["RANK"])
    name_rank(rank)
    # Configure the log before libraries are imported, so that it has their messages.
    configure_logging(config.run.directory, rank)
    run_supervised_rank(config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo supervised",
        description="Train on prompt-response pairs; writes a Hugging Face folder.",
        epilog="Keys and their meaning: SupervisedConfig in megatron_dppo/config/schema.py.",
    )
    add_config_arguments(parser)
    parser.add_argument(CHECK, action="store_true", help="validate and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
