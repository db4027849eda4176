"""Forward and backward over a mini-batch of packed micro-batches, on Megatron's pipeline schedules.

T = tokens of a micro-batch, V = vocabulary, TP = tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.trainer.microbatch import model_inputs
from megatron_dppo.trainer.router_replay import ModelReplay
from megatron_dppo.trainer.token_loss import TokenLoss
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.vocab_parallel import PolicyStats, policy_stats


@dataclass(frozen=True)
class StatsSpec:
    """Which policy statistics a loss needs beside the sampled tokens' log-probabilities.

    ``topk``: log-probabilities at the batch's ``topk_ids``. ``entropy``: of each token's
    distribution.
    """

    topk: bool = False
    entropy: bool = False


@dataclass(frozen=True)
class StatsFunction:
    """``policy_stats`` with all that stays the same in a run."""

    topology: Topology
    vocab_size: int
    temperature: float
    spec: StatsSpec

    def __call__(
        self, logits: Tensor, batch: PackedBatch, spec: StatsSpec | None = None
    ) -> PolicyStats:
        """Statistics of logits [1, T, V / TP]; ``spec`` replaces the run's own.

        Raises ValueError where it wants TopK(mu) and the batch has none.
        """
        spec = spec or self.spec
        return policy_stats(
            logits.squeeze(0),
            batch.target_ids,
            self.topology.tensor_group if self.topology.tp_size > 1 else None,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            topk_ids=batch.column("topk_ids").long() if spec.topk else None,
            with_entropy=spec.entropy,
            raise_on_faults=False,
        )


@dataclass
class MicroBatchResults:
    """What the last stage keeps of each micro-batch, in order; empty on other stages."""

    metrics: MetricSums | None = None
    losses: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)

    def nonfinite(self, batches: list[PackedBatch]) -> list[tuple[int, list[int]]]:
        """(micro-batch, sequences) of each loss that is not finite.

        Sequences: those with a trained token whose log-probability is not finite; where there is
        none (the loss itself made it), all that train.
        """
        found = []
        for i, loss in enumerate(self.losses):
            if not torch.isfinite(loss):
                bad = ~torch.isfinite(self.log_probs[i]) & batches[i].loss_mask
                tokens = bad if bool(bad.any()) else batches[i].loss_mask
                found.append((i, _sequences_of(batches[i], tokens)))
        return found


def forward_backward(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    stats: StatsFunction,
    token_loss: TokenLoss,
    denominator: float,
    replay: ModelReplay | None = None,
) -> MicroBatchResults:
    """Accumulate the gradient of the summed loss / denominator in the buffers, then reduce them.

    Collective; on return gradients are summed over tokens, micro-batches and replicas. ``replay``
    holds the recordings of ``batches``.
    """
    results = MicroBatchResults()

    def loss_of(batch: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        policy = stats(logits, batch)
        sums = token_loss(policy, batch)
        loss = sums.loss / denominator
        if not loss.requires_grad:
            raise ValueError("the token loss has no gradient: it does not depend on log_probs")
        results.metrics = (
            sums.metrics if results.metrics is None else results.metrics + sums.metrics
        )
        results.losses.append(loss.detach())
        results.log_probs.append(policy.log_probs.detach())
        results.faults.append(policy.faults)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    _run_schedule(chunks, batches, loss_of, replay, forward_only=False)
    return results


@torch.no_grad()
def forward_log_probs(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    stats: StatsFunction,
    replay: ModelReplay | None = None,
    *,
    topk: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """log pi of each batch's targets, fp32 [T], and its ``PolicyStats.faults``; on the last stage
    only, empty lists elsewhere.

    ``topk``: at its ``topk_ids`` instead, fp32 [T, K]. An id outside the vocabulary or a NaN in
    the logits gives NaN and is counted among the faults, for the caller to stop on.
    """
    log_probs: list[Tensor] = []
    faults: list[Tensor] = []

    def keep(batch: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        policy = stats(logits, batch, StatsSpec(topk=topk))
        wanted = policy.topk_log_probs if topk else policy.log_probs
        assert wanted is not None
        log_probs.append(wanted.float())
        faults.append(policy.faults)
        zero = torch.zeros((), device=logits.device)
        return zero, zero.int(), {}

    _run_schedule(chunks, batches, keep, replay, forward_only=True)
    return log_probs, faults


def _run_schedule(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    loss_of: Callable[[PackedBatch, Tensor], tuple[Tensor, Tensor, dict[str, Any]]],
    replay: ModelReplay | None,
    *,
    forward_only: bool,
) -> None:
    def forward_step(
        numbered: Iterator[tuple[int, PackedBatch]], model: DistributedDataParallel
    ) -> tuple:
        number, batch = next(numbered)
        inputs = model_inputs(batch)
        if model.config.bf16:
            inputs["fp32_output"] = False
        run = partial(model, **inputs)
        output = replay.forward(chunks.index(model), number, run) if replay else run()
        return output, partial(loss_of, batch)

    iterators = [iter(enumerate(batches)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        # All are equal in an interleaved pipeline; in a plain one shapes travel with the tensors.
        seq_length=max(b.num_tokens for b in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if replay:
        replay.unload()


def _sequences_of(batch: PackedBatch, tokens: Tensor) -> list[int]:
    positions = tokens.nonzero().squeeze(1).to(batch.cu_seqlens.dtype)
    rows = torch.searchsorted(batch.cu_seqlens, positions, right=True) - 1
    return sorted(set(batch.sequence_index[rows].tolist()))
