"""Forward and backward passes over a mini-batch of packed micro-batches on Megatron's schedules, and their metrics.

``trainer.py`` makes the optimiser step after these passes. T = tokens of a micro-batch, H = hidden size.
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

from megatron_dppo.data.columns import declared_column
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.metrics.masked_tokens import MaskedToken, MaskedTokenCounts, most_masked
from megatron_dppo.metrics.sums import MetricNames, MetricSums
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
    """Return the arguments of ``GPTModel.forward``: one row of T tokens, divided into sequences by cu_seqlens.

    ``rank_batch`` has this rank's tokens under context parallelism (None: all tokens of ``batch``); cu_seqlens
    describes the whole ``batch``.

    There are no labels: the last stage returns its hidden states, [1, T, H] in the model's dtype, because
    ``model.leave_out_logits`` has taken the output layer's matrix product out of the model.
    """
    rank_batch = rank_batch or batch
    # cu_seqlens_*_padded with context parallelism: pass the bounds of cu_seqlens_* again. With other bounds Transformer
    # Engine computes wrong results. With these bounds padding counts as ordinary tokens, but no other token attends to
    # padding.
    # cu_seqlens_*_padded without context parallelism: pass None. Otherwise Transformer Engine would compare the bounds
    # on the device, with two syncs in each layer.
    is_split = rank_batch.num_tokens != batch.num_tokens
    padded_bounds = batch.cu_seqlens if is_split else None
    # max_seqlen_*: attention needs only an upper bound of the lengths. Megatron-Core uses this bound as the length of
    # the rotary table.
    table_length = _table_length(batch.max_seqlen, batch.num_tokens)
    packed_params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=padded_bounds,
        cu_seqlens_kv_padded=padded_bounds,
        max_seqlen_q=table_length,
        max_seqlen_kv=table_length,
    )
    return {
        "input_ids": rank_batch.token_ids[None],
        "position_ids": rank_batch.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": packed_params,
    }


def _table_length(longest_sequence: int, tokens: int) -> int:
    """Return the number of positions in the rotary embedding's table: a power of two, at least ``longest_sequence``.

    Powers of two keep the number of lengths small: Megatron-Core caches the tables of 32 lengths, 64 MiB each at 128k
    tokens. If a table is as long as the micro-batch (``tokens``), Megatron-Core treats the micro-batch as one sequence.
    So the length is doubled if it equals ``tokens`` and the micro-batch has several sequences.
    """
    length = 1 << (longest_sequence - 1).bit_length()
    has_several_sequences = longest_sequence < tokens
    if has_several_sequences and length == tokens:
        return 2 * length
    return length


def pad_to(batch: PackedBatch, tokens: int) -> PackedBatch:
    """Pad ``batch`` to ``tokens`` tokens: append one sequence of tokens 0 without loss."""
    padding_tokens = tokens - batch.num_tokens
    if padding_tokens == 0:
        return batch

    def pad_rows(value: Tensor, fill: int = 0) -> Tensor:
        # F.pad lists (before, after) from the last dimension to the first. Pad only the first dimension.
        no_padding = (0, 0) * (value.dim() - 1)
        return F.pad(value, (*no_padding, 0, padding_tokens), value=fill)

    columns: dict[str, Tensor] = {}
    for name, values in batch.columns.items():
        columns[name] = pad_rows(values, declared_column(name).fill)
    valid = {name: pad_rows(rows) for name, rows in batch.valid.items()}
    return replace(
        batch,
        token_ids=pad_rows(batch.token_ids),
        position_ids=torch.cat([batch.position_ids, torch.arange(padding_tokens)]),
        target_ids=pad_rows(batch.target_ids),
        cu_seqlens=F.pad(batch.cu_seqlens, (0, 1), value=tokens),
        max_seqlen=max(batch.max_seqlen, padding_tokens),
        loss_mask=pad_rows(batch.loss_mask),
        advantages=pad_rows(batch.advantages),
        sequence_index=F.pad(batch.sequence_index, (0, 1), value=-1),
        columns=columns,
        valid=valid,
    )


def check_micro_batches(
    batches: list[PackedBatch],
    *,
    pad_multiple: int,
    count_multiple: int,
    sequence_multiple: int = 1,
) -> None:
    """Raise ValueError unless the micro-batches fit context and sequence parallelism and the pipeline schedule.

    The number of micro-batches must be a multiple of ``count_multiple``. The number of tokens must be a multiple of
    ``pad_multiple`` in each micro-batch, and a multiple of ``sequence_multiple`` in each sequence.
    """
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

    ``culprits`` has an entry {"dp_rank", "micro_batch", "sequences"} for each micro-batch with a non-finite loss
    (sequences are positions in the batch); it is empty if only the gradient norm is not finite.
    """

    def __init__(self, grad_norm: float, culprits: list[dict[str, Any]]) -> None:
        culprit_texts = [
            f"data-parallel rank {c['dp_rank']}, micro-batch {c['micro_batch']}, "
            f"sequences {c['sequences']}"
            for c in culprits
        ]
        culprits_text = "; ".join(culprit_texts) or "every micro-batch's loss is finite"
        super().__init__(
            f"loss or gradient is not finite (gradient norm {grad_norm}), nothing was updated: "
            f"{culprits_text}"
        )


class NonFiniteLogProbsError(RunError, ValueError):
    """A row of logits in a forward-only pass has NaN or +inf, or only -inf. Raised on every rank."""


@dataclass(frozen=True)
class StatsSpec:
    """The policy statistics that a loss needs in addition to the sampled tokens' log-probabilities.

    ``topk``: log-probabilities at the batch's ``topk_ids``. ``topk_gradient``: keep the gradient of the ``topk``
    log-probabilities. ``entropy``: the entropy of each token's distribution. ``squares``: the sum of the
    distribution's squared probabilities. ``teacher_topk``: log-probabilities, with gradient, at the batch's
    ``teacher_topk_ids``.
    """

    topk: bool = False
    entropy: bool = False
    topk_gradient: bool = False
    squares: bool = False
    teacher_topk: bool = False


@dataclass(frozen=True)
class StatsFunction:
    """Calls ``head_stats`` with the arguments that are constant in a run. ``last_chunk``: this rank's last model chunk,
    which on the last stage has the output layer.
    """

    last_chunk: GPTModel
    topology: Topology
    vocab_size: int
    temperature: float
    spec: StatsSpec
    options: HeadOptions

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, spec: StatsSpec | None = None
    ) -> PolicyStats:
        """Compute the statistics of the trained tokens; they are 0 at other tokens.

        Args:
            hidden: hidden states of the last stage, [1, T, H].
            batch: the micro-batch; with context parallelism, only this rank's tokens.
            spec: the statistics to compute; None: the ``spec`` of this object.

        Raises:
            ValueError: the batch lacks ``topk_ids`` or ``teacher_topk_ids``, which ``spec`` needs.
        """
        spec = spec or self.spec
        group = None
        if self.topology.tp_size > 1:
            group = self.topology.tensor_group
        ids = _QueriedIds.of(batch, spec)
        stats = head_stats(
            # The factors' products (states times weight) add up to the logits.
            head_factors(self.last_chunk, hidden.squeeze(0)),
            batch.target_ids,
            group,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            topk_ids=ids.queried,
            with_entropy=spec.entropy,
            with_squares=spec.squares,
            counted=batch.loss_mask,
            options=self.options,
        )
        log_probs, teacher_log_probs = ids.parts(stats.topk_log_probs)
        if log_probs is not None and not spec.topk_gradient:
            log_probs = log_probs.detach()
        return replace(stats, topk_log_probs=log_probs, teacher_topk_log_probs=teacher_log_probs)


@dataclass(frozen=True)
class _QueriedIds:
    """The ids of TopK(mu) and TopK(p_T) that one call of ``head_stats`` computes log-probabilities at.

    The ids that a call computes must differ. So a teacher's id that TopK(mu) has too is computed once, and copied.

    Attributes:
        topk: int64 [T, K]; None if the loss does not need TopK(mu).
        teacher: int64 [T, K']; None if the loss does not need TopK(p_T).
        place: int64 [T, K'], the column of ``topk`` that has the teacher's id, or -1. None unless both are needed.
    """

    topk: Tensor | None
    teacher: Tensor | None
    place: Tensor | None

    @classmethod
    def of(cls, batch: PackedBatch, spec: StatsSpec) -> _QueriedIds:
        topk = batch.column("topk_ids").long() if spec.topk else None
        teacher = batch.column("teacher_topk_ids").long() if spec.teacher_topk else None
        place = None
        if topk is not None and teacher is not None:
            place = columns_of(teacher, topk)
        return cls(topk, teacher, place)

    @property
    def queried(self) -> Tensor | None:
        """The ids of the call, int64 [T, K], [T, K'] or [T, K + K']; None if no ids are needed."""
        if self.topk is None or self.teacher is None:
            return self.teacher if self.topk is None else self.topk
        assert self.place is not None
        return torch.cat([self.topk, self.teacher.masked_fill(self.place >= 0, -1)], 1)

    def parts(self, log_probs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Divide the log-probabilities at ``queried`` into those at ``topk`` and those at ``teacher``."""
        if log_probs is None or self.teacher is None:
            return log_probs, None
        if self.topk is None:
            return None, log_probs
        assert self.place is not None
        topk, teacher = log_probs.split([self.topk.shape[1], self.teacher.shape[1]], dim=1)
        copied = topk.gather(1, self.place.clamp(min=0))
        return topk, torch.where(self.place >= 0, copied, teacher)


def columns_of(ids: Tensor, among: Tensor) -> Tensor:
    """Return for each of ``ids`` [T, K'] the column of ``among`` [T, K] with the same id; -1 without one. int64.

    An id of -1 stands for "none" and has no column. The ids of a row of ``among`` differ.
    """
    sorted_ids, order = among.sort(dim=1)
    place = torch.searchsorted(sorted_ids, ids).clamp(max=among.shape[1] - 1)
    is_there = (sorted_ids.gather(1, place) == ids) & (ids >= 0)
    return torch.where(is_there, order.gather(1, place), -1)


@dataclass
class MicroBatchResults:
    """Results of the last stage; empty on other stages.

    Attributes:
        metrics: the metrics summed over micro-batches; None before the first micro-batch.
        losses: the loss of each micro-batch, a scalar without gradient.
        log_probs: log pi of each micro-batch's tokens, [T] without gradient.
        fault_counts: ``PolicyStats.fault_counts`` of each micro-batch, float32 [3].
    """

    metrics: MetricSums | None = None
    losses: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    fault_counts: list[Tensor] = field(default_factory=list)

    def nonfinite(self, batches: list[PackedBatch]) -> list[tuple[int, list[int]]]:
        """Return (micro-batch, sequences) for each loss that is not finite.

        A sequence is returned if one of its trained tokens has a log-probability that is not finite. If all
        log-probabilities are finite, the loss function itself produced the value: then all sequences with trained
        tokens are returned.
        """
        culprits = []
        for i, loss in enumerate(self.losses):
            if not torch.isfinite(loss):
                trained_tokens = batches[i].loss_mask
                bad_tokens = ~torch.isfinite(self.log_probs[i]) & trained_tokens
                if not bool(bad_tokens.any()):
                    bad_tokens = trained_tokens
                culprits.append((i, _sequences_of(batches[i], bad_tokens)))
        return culprits


def forward_backward(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    stats: StatsFunction,
    token_loss: TokenLoss,
    denominator: float,
    replay: ModelReplay | None = None,
) -> MicroBatchResults:
    """Accumulate the gradient of (summed loss / denominator) in DDP's buffers, then reduce the buffers. Collective.

    On return the gradients are summed over tokens, micro-batches and replicas.

    Args:
        chunks: this rank's model chunks in Megatron's DDP wrappers.
        batches: the micro-batches of this replica.
        stats: computes the policy statistics of a micro-batch.
        token_loss: computes the summed loss of a micro-batch.
        denominator: divides the loss.
        replay: has loaded the recorded routing of ``batches``; None without router replay.
    """
    results = MicroBatchResults()
    topology = stats.topology

    def loss_of(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        own_stats = stats(hidden, own_batch(batch, topology))
        batch_stats = whole_stats(own_stats, batch, topology)
        sums = token_loss(batch_stats, batch)
        loss = sums.loss / denominator
        if not loss.requires_grad:
            raise ValueError("the token loss has no gradient: it does not depend on log_probs")
        if results.metrics is None:
            results.metrics = sums.metrics
        else:
            results.metrics += sums.metrics
        results.losses.append(loss.detach())
        results.log_probs.append(batch_stats.log_probs.detach())
        results.fault_counts.append(batch_stats.fault_counts)
        return loss, _no_scaling(loss.device), {}

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
    """Return log pi of the trained targets and ``PolicyStats.fault_counts``, both for each micro-batch.

    log pi is fp32 [T], with 0 at other tokens. With ``topk`` log pi is computed at the ``topk_ids`` instead, fp32
    [T, K]. Stages before the last stage return empty lists.

    An id outside the vocabulary or a NaN in the logits makes log pi NaN and adds to the fault counts. The caller must
    check the counts.
    """
    log_probs: list[Tensor] = []
    fault_counts: list[Tensor] = []
    topology = stats.topology

    def keep_log_probs(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        own_stats = stats(hidden, own_batch(batch, topology), StatsSpec(topk=topk))
        batch_stats = whole_stats(own_stats, batch, topology)
        batch_log_probs = batch_stats.topk_log_probs if topk else batch_stats.log_probs
        assert batch_log_probs is not None
        log_probs.append(batch_log_probs.float())
        fault_counts.append(batch_stats.fault_counts)
        no_loss = torch.zeros((), device=hidden.device)
        return no_loss, _no_scaling(hidden.device), {}

    _run_schedule(chunks, batches, keep_log_probs, topology, replay, forward_only=True)
    return log_probs, fault_counts


def _no_scaling(device: torch.device) -> Tensor:
    """Return 0, int, in place of the token count that Megatron's schedules expect beside a loss.

    Under ``calculate_per_token_loss`` Megatron-Core divides the gradients by the sum of these counts, and leaves them
    unscaled if the sum is 0. Here the loss has its own denominator.
    """
    return torch.zeros((), dtype=torch.int, device=device)


def _run_schedule(
    chunks: list[DistributedDataParallel],
    batches: list[PackedBatch],
    loss_of: Callable[[PackedBatch, Tensor], tuple[Tensor, Tensor, dict[str, Any]]],
    topology: Topology,
    replay: ModelReplay | None,
    *,
    forward_only: bool,
) -> None:
    """Run Megatron's pipeline schedule over ``batches``, with ``loss_of(batch, hidden states)`` on the last stage.

    ``loss_of`` returns what Megatron's schedules take: the loss, the token count (``_no_scaling``), and an unused dict
    of values to report.
    """

    def forward_step(
        numbered_batches: Iterator[tuple[int, PackedBatch]], model: DistributedDataParallel
    ) -> tuple:
        number, batch = next(numbered_batches)
        inputs = model_inputs(batch, own_batch(batch, topology))
        if model.config.bf16:
            # Float16Module wraps a bfloat16 model, and by default converts its output to fp32.
            inputs["fp32_output"] = False
        run = partial(model, **inputs)
        output = run() if replay is None else replay.forward(chunks.index(model), number, run)
        return output, partial(loss_of, batch)

    # The interleaved schedule takes an iterator for each chunk, the plain schedule a single iterator.
    iterators = [iter(enumerate(batches)) for _ in chunks]
    run_forward_backward = get_forward_backward_func()
    run_forward_backward(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        # Only an interleaved pipeline uses this length. Its micro-batches have equal lengths, and Megatron-Core divides
        # the length by the sizes of context and sequence parallelism. A plain pipeline sends shapes with the tensors.
        seq_length=max(b.num_tokens for b in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if replay is not None:
        replay.unload()


def _sequences_of(batch: PackedBatch, tokens: Tensor) -> list[int]:
    """Return the positions, in the whole batch, of the sequences with at least one True in ``tokens`` [T]."""
    positions = tokens.nonzero().squeeze(1).to(batch.cu_seqlens.dtype)
    sequences = torch.searchsorted(batch.cu_seqlens, positions, right=True) - 1
    return sorted(set(batch.sequence_index[sequences].tolist()))


def reduce_metrics(metrics: MetricSums | None, topology: Topology) -> MetricSums:
    """Reduce sums, maxima and minima over all replicas and return them on every rank. Collective.

    The function does one all-reduce over the replicas. With PP > 1 it also broadcasts to the other stages: two
    broadcasts for the names (JSON) and one for the result. ``metrics``: this replica's metrics on the last stage, None
    on other stages.
    """
    names = MetricNames()
    vector = torch.empty(0)
    device = platform.current().device
    if metrics is not None:
        names = metrics.names
        vector = metrics.to_vector(topology.dp_rank, topology.dp_size, device)
        dist.all_reduce(vector, group=topology.data_group)
    if topology.pp_size > 1:
        source = topology.last_stage_rank
        group = topology.pipeline_group
        names_by_kind = broadcast_json(asdict(names), source, group)
        names = MetricNames(**{kind: tuple(keys) for kind, keys in names_by_kind.items()})
        if metrics is None:
            size = names.vector_size(topology.dp_size)
            vector = torch.empty(size, dtype=torch.float64, device=device)
        dist.broadcast(vector, source, group)
    return MetricSums.from_vector(names, vector, topology.dp_size)


def reduce_masked_tokens(counts: MaskedTokenCounts, topology: Topology) -> list[MaskedToken]:
    """Return the token ids that the mask blocked most often over all replicas, on every rank. Collective.

    ``counts``: this replica's counts on the last stage (equal on all ranks of the replica's tensor group). On earlier
    stages the argument is ignored.
    """
    tokens: list[MaskedToken] = []
    if topology.is_last_stage and counts.counts is not None:
        total = counts.counts.clone()
        dist.all_reduce(total, group=topology.data_group)
        tokens = most_masked(total)
    if topology.pp_size > 1:
        tokens = broadcast_json(tokens, topology.last_stage_rank, topology.pipeline_group)
    return tokens
