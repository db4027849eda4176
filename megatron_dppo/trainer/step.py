"""Forward and backward over a mini-batch of packed micro-batches, on Megatron's pipeline schedules, and its sums.

T = tokens of a micro-batch, V = vocabulary, TP = tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dppo.data.columns import declared
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.metrics.sums import (
    MaskedToken,
    MaskedTokenCounts,
    MetricNames,
    MetricSums,
    most_masked,
)
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import broadcast_json
from megatron_dppo.trainer.context_parallel import own_batch, whole_stats
from megatron_dppo.trainer.model import head_factors
from megatron_dppo.trainer.router_replay import ModelReplay
from megatron_dppo.trainer.token_loss import TokenLoss
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.vocab_parallel.head import HeadOptions, head_stats
from megatron_dppo.vocab_parallel.policy_stats import PolicyStats


def model_inputs(batch: PackedBatch, rank_batch: PackedBatch | None = None) -> dict[str, Any]:
    """Arguments of ``GPTModel.forward``: one row of T tokens, sequences told apart by cu_seqlens. ``rank_batch``: of
    this rank under context parallelism; cu_seqlens and positions tell of the whole ``batch``.

    No labels: the last stage returns its hidden states, [1, T, H] in the model's dtype (``leave_out_logits``).
    """
    rank_batch = rank_batch or batch
    longest = _table_length(batch.max_seqlen, batch.num_tokens)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        # Where Transformer Engine is told the padding apart from the tokens, it computes wrongly under context
        # parallelism; as tokens that nothing attends to, padding does no harm.
        cu_seqlens_q_padded=batch.cu_seqlens,
        cu_seqlens_kv_padded=batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {
        "input_ids": rank_batch.token_ids[None],
        "position_ids": rank_batch.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }


def _table_length(longest: int, tokens: int) -> int:
    """Positions of the rotary embedding's table: a power of two not below ``longest``.

    Megatron-Core keeps the tables of 32 lengths, 64 MiB each at 128k tokens. A table as long as the micro-batch would
    be taken for one of all its sequences, end to end.
    """
    length = 1 << (longest - 1).bit_length()
    return 2 * length if length == tokens != longest else length


def pad_to(batch: PackedBatch, tokens: int) -> PackedBatch:
    """``batch`` made ``tokens`` long by one more sequence at its end, of token 0, without loss."""
    missing = tokens - batch.num_tokens
    if missing == 0:
        return batch

    def longer(value: Tensor, fill: int = 0) -> Tensor:
        return F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing), value=fill)

    return replace(
        batch,
        token_ids=longer(batch.token_ids),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing)]),
        target_ids=longer(batch.target_ids),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=tokens),
        max_seqlen=max(batch.max_seqlen, missing),
        loss_mask=longer(batch.loss_mask),
        advantages=longer(batch.advantages),
        sequence_index=F.pad(batch.sequence_index, (0, 1), value=-1),
        columns={n: longer(x, declared(n).fill) for n, x in batch.columns.items()},
        valid={n: longer(x) for n, x in batch.valid.items()},
    )


def check_micro_batches(
    batches: list[PackedBatch],
    *,
    pad_multiple: int,
    count_multiple: int,
    sequence_multiple: int = 1,
) -> None:
    """Raise ValueError unless the batches fit context and sequence parallelism and the pipeline's schedule."""
    if not batches or len(batches) % count_multiple:
        raise ValueError(
            f"{len(batches)} micro-batches, expected a positive multiple of {count_multiple}"
        )
    for i, batch in enumerate(batches):
        if batch.num_tokens % pad_multiple:
            raise ValueError(
                f"micro-batch {i} has {batch.num_tokens} tokens, expected a multiple of "
                f"{pad_multiple}: pack with pad_multiple={pad_multiple}"
            )
        if (batch.cu_seqlens % sequence_multiple).any():
            raise ValueError(
                f"micro-batch {i} has sequences of {batch.cu_seqlens.diff().tolist()} tokens, expected multiples "
                f"of {sequence_multiple}: pack with sequence_multiple={sequence_multiple}"
            )


class NonFiniteLossError(RunError, ValueError):
    """A loss or the gradient norm is not finite; raised on every rank before the optimiser step.

    ``culprits``: for each micro-batch with a non-finite loss {"dp_rank", "micro_batch",
    "sequences"} (positions in the batch); empty if only the gradient norm is not finite.
    """

    def __init__(self, grad_norm: float, culprits: list[dict[str, Any]]) -> None:
        culprit_texts = [
            f"data-parallel rank {c['dp_rank']}, micro-batch {c['micro_batch']}, "
            f"sequences {c['sequences']}"
            for c in culprits
        ]
        where = "; ".join(culprit_texts) or "every micro-batch's loss is finite"
        super().__init__(
            f"loss or gradient is not finite (gradient norm {grad_norm}), nothing was updated: "
            f"{where}"
        )


class NonFiniteLogProbsError(RunError, ValueError):
    """Log-probabilities asked for without training come from logits that are no distribution: NaN,
    +inf, or nothing but -inf. Raised on every rank alike.
    """


@dataclass(frozen=True)
class StatsSpec:
    """Which policy statistics a loss needs beside the sampled tokens' log-probabilities.

    ``topk``: log-probabilities at the batch's ``topk_ids``, ``topk_gradient``: with gradient. ``entropy``: of each
    token's distribution. ``squares``: sum of its squared probabilities.
    """

    topk: bool = False
    entropy: bool = False
    topk_gradient: bool = False
    squares: bool = False


@dataclass(frozen=True)
class StatsFunction:
    """``head_stats`` with all that stays the same in a run. ``last_chunk``: this rank's last model chunk."""

    last_chunk: GPTModel
    topology: Topology
    vocab_size: int
    temperature: float
    spec: StatsSpec
    options: HeadOptions

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, spec: StatsSpec | None = None
    ) -> PolicyStats:
        """Statistics of the trained tokens, 0 elsewhere, from hidden states [1, T, H]; ``spec`` replaces the run's
        own.

        Raises ValueError where it wants TopK(mu) and the batch has none.
        """
        spec = spec or self.spec
        stats = head_stats(
            head_factors(self.last_chunk, hidden.squeeze(0)),
            batch.target_ids,
            self.topology.tensor_group if self.topology.tp_size > 1 else None,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            topk_ids=batch.column("topk_ids").long() if spec.topk else None,
            with_entropy=spec.entropy,
            with_squares=spec.squares,
            counted=batch.loss_mask,
            options=self.options,
        )
        if spec.topk_gradient or stats.topk_log_probs is None:
            return stats
        return replace(stats, topk_log_probs=stats.topk_log_probs.detach())


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
        sequences = []
        for i, loss in enumerate(self.losses):
            if not torch.isfinite(loss):
                bad = ~torch.isfinite(self.log_probs[i]) & batches[i].loss_mask
                tokens = bad if bool(bad.any()) else batches[i].loss_mask
                sequences.append((i, _sequences_of(batches[i], tokens)))
        return sequences


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
    topology = stats.topology

    def loss_of(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        policy = whole_stats(stats(hidden, own_batch(batch, topology)), batch, topology)
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

    _run_schedule(chunks, batches, loss_of, topology, replay, forward_only=False)
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
    """log pi of each batch's trained targets, fp32 [T], 0 elsewhere, and its ``PolicyStats.faults``; on the last stage
    only, empty lists elsewhere.

    ``topk``: at its ``topk_ids`` instead, fp32 [T, K]. An id outside the vocabulary or a NaN in
    the logits gives NaN and is counted among the faults, for the caller to stop on.
    """
    log_probs: list[Tensor] = []
    faults: list[Tensor] = []
    topology = stats.topology

    def keep(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        own_stats = stats(hidden, own_batch(batch, topology), StatsSpec(topk=topk))
        policy = whole_stats(own_stats, batch, topology)
        wanted = policy.topk_log_probs if topk else policy.log_probs
        assert wanted is not None
        log_probs.append(wanted.float())
        faults.append(policy.faults)
        zero = torch.zeros((), device=hidden.device)
        return zero, zero.int(), {}

    _run_schedule(chunks, batches, keep, topology, replay, forward_only=True)
    return log_probs, faults


def _run_schedule(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    loss_of: Callable[[PackedBatch, Tensor], tuple[Tensor, Tensor, dict[str, Any]]],
    topology: Topology,
    replay: ModelReplay | None,
    *,
    forward_only: bool,
) -> None:
    def forward_step(
        numbered: Iterator[tuple[int, PackedBatch]], model: DistributedDataParallel
    ) -> tuple:
        number, batch = next(numbered)
        inputs = model_inputs(batch, own_batch(batch, topology))
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
        # All are equal in an interleaved pipeline; in a plain one shapes travel with the tensors. Megatron-Core
        # divides it by the sizes of context and sequence parallelism.
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


def reduce_metrics(metrics: MetricSums | None, topology: Topology) -> MetricSums:
    """Reduce sums, maxima and minima over all replicas; returned on every rank. Collective.

    One all-reduce over the replicas; with PP > 1 also two broadcasts of the names (JSON) and one of
    the result to the other stages. ``metrics``: of this replica on the last stage, else None.
    """
    names, vector = MetricNames(), torch.empty(0)
    device = platform.current().device
    if metrics is not None:
        names = metrics.names
        vector = metrics.to_vector(topology.dp_rank, topology.dp_size, device)
        dist.all_reduce(vector, group=topology.data_group)
    if topology.pp_size > 1:
        source, group = topology.last_stage_rank, topology.pipeline_group
        received = broadcast_json(asdict(names), source, group)
        names = MetricNames(**{kind: tuple(keys) for kind, keys in received.items()})
        if metrics is None:
            size = names.vector_size(topology.dp_size)
            vector = torch.empty(size, dtype=torch.float64, device=device)
        dist.broadcast(vector, source, group)
    return MetricSums.from_vector(names, vector, topology.dp_size)


def reduce_masked_tokens(counts: MaskedTokenCounts, topology: Topology) -> list[MaskedToken]:
    """The ids that the mask blocked most often over all replicas; on every rank. Collective.

    ``counts``: of this replica on the last stage (the same on all ranks of its tensor group); unused
    on other stages.
    """
    tokens: list[MaskedToken] = []
    if topology.is_last_stage and counts.counts is not None:
        total = counts.counts.clone()
        dist.all_reduce(total, group=topology.data_group)
        tokens = most_masked(total)
    if topology.pp_size > 1:
        tokens = broadcast_json(tokens, topology.last_stage_rank, topology.pipeline_group)
    return tokens
