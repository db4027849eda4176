"""Alternatives: changes to the reference model. Each alternative simulates one cause of a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from megatron_dppo.block_fp8 import BlockFp8
from megatron_dppo.data.columns import usable_rows
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.reference import BlocksOf, Change, Reference
from megatron_dppo.diagnostics.doctor.rounding import float8
from megatron_dppo.diagnostics.explain.explanation import as_int64
from megatron_dppo.model.quantization import BLOCK

Sampling = Callable[[Tensor], Tensor]
"""Logits [N, V] -> log-probabilities [N, V] of the sampled distribution; -inf for excluded tokens."""


def at_temperature(temperature: float) -> Sampling:
    """Return the transform softmax(logits / temperature)."""
    return lambda logits: (logits.double() / temperature).log_softmax(-1)


def nucleus(temperature: float, top_p: float) -> Sampling:
    """Return the top-p transform: keep the fewest tokens whose mass is at least ``top_p``, and renormalise."""
    return partial(_warped, warper=TopPLogitsWarper(top_p), temperature=temperature)


def most_probable(temperature: float, count: int) -> Sampling:
    """Return the top-k transform: keep the ``count`` most probable tokens, and renormalise."""
    return partial(_warped, warper=TopKLogitsWarper(count), temperature=temperature)


def _warped(logits: Tensor, warper: LogitsProcessor, temperature: float) -> Tensor:
    # A warper reads no earlier tokens.
    no_ids: Any = None
    return warper(no_ids, logits.double() / temperature).log_softmax(-1)


def normaliser_of_first(temperature: float, count: int) -> Sampling:
    """Return a transform whose normaliser sums over the first ``count`` ids only, as if a shard were missing."""

    def sampling(logits: Tensor) -> Tensor:
        scaled_logits = logits.double() / temperature
        return scaled_logits - scaled_logits[:, :count].logsumexp(-1, keepdim=True)

    return sampling


def first_tokens(temperature: float, count: int) -> Sampling:
    """Return the transform that samples from the first ``count`` ids of the vocabulary only."""
    normalise = normaliser_of_first(temperature, count)

    def sampling(logits: Tensor) -> Tensor:
        log_probs = normalise(logits)
        log_probs[:, count:] = -torch.inf
        return log_probs

    return sampling


TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


TOP_P = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)


TOP_K = (10, 20, 50, 100)


STRETCHES = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
"""Factors of the positions of tokens."""


THETAS = (1e4, 5e5, 1e6, 1e7)
"""Bases of the rotary embedding."""


ROUNDED = "all in bfloat16"


EIGHT_BITS = "all in 8 bits (E4M3)"


BLOCK_FP8 = "linear layers and experts in block FP8"


ROUNDINGS = (ROUNDED, EIGHT_BITS, BLOCK_FP8)
"""Names of the alternatives that only round. Rounding is no fault: a healthy side may round in the same way."""


NAME_PARTS = ("embed_tokens", "self_attn", "norm", "mlp.gate.", ".experts.", "mlp.", "lm_head")
"""Parts of tensor names. An alternative simulates that a weight update missed all tensors with one of these parts."""


WEIGHT_AXES = ("staleness", "weights", "cache", "quantisation")
"""The axes (``Alternative.axis``) whose causes lie in the weights, in their scales, or in the cache."""


@dataclass(frozen=True)
class SampledRun:
    """The part of a run's configuration that its probabilities depend on.

    ``temperature`` divides the logits. ``tensor`` ranks split the tensors, and ``expert`` ranks split the experts.
    ``quantized``: whether the engine's weights are block FP8.
    """

    temperature: float
    tensor: int
    expert: int
    quantized: bool = False


def unchanged(_: Reference) -> AbstractContextManager[None]:
    """Leave the reference as it is."""
    return nullcontext()


@dataclass(frozen=True)
class Alternative:
    """A possible cause of a gap, and its simulation by the reference.

    The reference computes logits while ``change`` is in effect, and ``sampling`` turns the logits into probabilities.
    ``axis`` is the kind of the cause, and ``name`` describes the cause in words.
    """

    axis: str
    name: str
    sampling: Sampling
    change: Change = field(default=unchanged)


def alternatives(run: SampledRun, reference: Reference, *, is_recorded: bool) -> list[Alternative]:
    """Return the alternatives that are possible in this run, except those that need weights of another version.

    ``is_recorded``: whether responses of the batch have recorded routing.
    """
    sampling = at_temperature(run.temperature)
    transforms = [*samplers(run, reference.vocab_size)]
    for shards, count in _without_last(run, reference.vocab_size):
        name = f"normaliser without the last of {shards} shards of the vocabulary"
        transforms.append((name, normaliser_of_first(run.temperature, count)))
    causes = [Alternative("sampling transform", name, transform) for name, transform in transforms]

    def add_cause(axis: str, name: str, change: Change) -> None:
        causes.append(Alternative(axis, name, sampling, change))

    add_cause("precision", ROUNDED, Reference.in_bfloat16)
    rounded_head = partial(Reference.rounded, part="lm_head")
    add_cause("precision", "output layer in bfloat16", rounded_head)
    name = "inputs and weights of the output layer in bfloat16"
    add_cause("precision", name, partial(rounded_head, results=False))
    # A matrix product of 8-bit inputs and weights has results of more bits.
    add_cause("precision", EIGHT_BITS, partial(Reference.rounded, results=False, to=float8))
    if run.quantized:
        add_cause("precision", BLOCK_FP8, Reference.in_block_fp8)
        for name, blocks_of in BLOCK_FAULTS:
            add_cause("quantisation", name, partial(Reference.in_block_fp8, blocks_of=blocks_of))
    name = "keys and values in bfloat16"
    add_cause("cache", name, partial(Reference.cached_in_bfloat16, prompts=True))
    name = "keys and values in bfloat16, except in the pass over the prompt"
    add_cause("cache", name, partial(Reference.cached_in_bfloat16, prompts=False))
    for name, frequencies in _frequencies(reference):
        add_cause("positions", name, partial(Reference.frequencies, change=frequencies))
    for first_norm, second_norm in (
        ("input_layernorm", "post_attention_layernorm"),
        ("q_norm", "k_norm"),
    ):
        if any(first_norm in name for name in reference.tensors):
            name = f"{first_norm} and {second_norm} exchanged"
            add_cause(
                "weights",
                name,
                partial(Reference.exchanged, first_module=first_norm, second_module=second_norm),
            )
    for n in _ranks(run, reference):
        name = f"each of {n} ranks has the experts of the next"
        add_cause("weights", name, partial(Reference.experts_moved, ranks=n))
    if is_recorded:
        for name, layers, tokens in ROUTINGS:
            rows = partial(_recorded_rows, layers=layers, tokens=tokens)
            add_cause("routing", name, partial(Reference.routed, rows_of=rows))
    return causes


def _with_scales(change: Callable[[Tensor], Tensor]) -> BlocksOf:
    """Return a function that applies ``change`` to the scales of a tensor's blocks."""
    return lambda _, __, blocks: BlockFp8(blocks.values, change(blocks.scales))


def _with_values(change: Callable[[Tensor], Tensor]) -> BlocksOf:
    """Return a function that applies ``change`` to the values of a tensor's blocks."""
    return lambda _, __, blocks: BlockFp8(change(blocks.values), blocks.scales)


BLOCK_FAULTS: tuple[tuple[str, BlocksOf], ...] = (
    ("scales of FP8 weights doubled", _with_scales(lambda scales: 2.0 * scales)),
    ("scales of FP8 weights halved", _with_scales(lambda scales: 0.5 * scales)),
    (
        "each FP8 block has the scale of the block below",
        _with_scales(lambda scales: scales.roll(-1, 0)),
    ),
    (
        "each FP8 block has the scale of the block to its right",
        _with_scales(lambda scales: scales.roll(-1, 1)),
    ),
    (
        "each FP8 block has the values of the block below",
        _with_values(lambda values: values.roll(-BLOCK, 0)),
    ),
    (
        "each FP8 block has the values of the block to its right",
        _with_values(lambda values: values.roll(-BLOCK, 1)),
    ),
)
"""Name of a fault, and the function that returns the blocks of an engine with this fault."""


def alternatives_of_version(
    run: SampledRun, reference: Reference, version: int, other: Reference
) -> list[Alternative]:
    """Return the alternatives that need weights of another version; ``other`` is the model of ``version``."""
    all_weights = partial(Reference.tensors_from, other=other, part="")
    prompts = partial(Reference.prompts_cached_by, other=other)
    changes: list[tuple[str, str, Change]] = [
        ("staleness", "weights", all_weights),
        ("cache", "prompts' keys and values", prompts),
    ]
    if run.quantized:
        stale_scales = partial(
            Reference.in_block_fp8,
            blocks_of=lambda name, expert, blocks: BlockFp8(
                blocks.values, other.block_scales(name, expert)
            ),
        )
        changes.append(("quantisation", "scales of FP8 weights", stale_scales))
    for part in NAME_PARTS:
        if any(part in name for name in reference.tensors):
            change_of_part = partial(Reference.tensors_from, other=other, part=part)
            changes.append(("weights", part.strip("."), change_of_part))
    for n in _ranks(run, reference):
        for rank in range(n):
            change = partial(Reference.experts_from, other=other, rank=rank, ranks=n)
            changes.append(("weights", f"experts of rank {rank} of {n}", change))
    sampling = at_temperature(run.temperature)
    return [
        Alternative(axis, f"{name} of version {version}", sampling, change)
        for axis, name, change in changes
    ]


def _ranks(run: SampledRun, reference: Reference) -> list[int]:
    """Return the numbers of ranks over which the experts may have been split."""
    if reference.gates:
        return [n for n in sorted({2, run.expert}) if n > 1]
    return []


RECORDED, NATURAL = "experts as recorded", "experts as the router chooses"


ROUTINGS = (
    (RECORDED, 0, 0),
    ("recorded experts of the layer before", 1, 0),
    ("recorded experts of the layer after", -1, 0),
    ("recorded experts of the token before", 0, 1),
    ("recorded experts of the token after", 0, -1),
)
"""Name of the alternative, the shift of the recorded rows in layers, and their shift in tokens."""


MOVED_RECORDINGS = tuple(name for name, layers, tokens in ROUTINGS if layers or tokens)
"""Names of the alternatives whose recorded rows are shifted."""


SHIFTS = (
    ("log-probabilities of the token before", 1),
    ("log-probabilities of the token after", -1),
)
"""Name of the alternative that a side's numbers belong to other tokens, and the shift in tokens."""


RECORDING = "recording"
"""Name of a third side, next to engine and trainer: the reference with the experts that the router chooses. The side is
compared with the reference with the recorded experts. If they differ, the recordings are wrong."""


def is_decisive(alternative: Alternative) -> bool:
    """Return whether the alternative is scored for every side.

    An alternative is scored for every side in two cases: it decides whether the side is healthy, or it changes only the
    sampling, so that it costs no forward pass of its own. The other alternatives are scored only for a side that
    differs.
    """
    changes_only_sampling = alternative.change is unchanged
    # A healthy side may round. A healthy trainer that replays routing uses the recorded experts.
    decides_health = alternative.name in (*ROUNDINGS, RECORDED)
    return changes_only_sampling or decides_health


def samplers(run: SampledRun, size: int) -> Iterator[tuple[str, Sampling]]:
    """Yield name and transform of each sampler except the configured one. ``size``: number of ids in the vocabulary."""
    configured = run.temperature
    # 1 / configured simulates logits that were multiplied by the temperature instead of divided.
    # ``dict.fromkeys`` drops repeated temperatures and keeps the order.
    for temperature in dict.fromkeys((1.0, 1 / configured, *TEMPERATURES)):
        if temperature != configured:
            yield f"temperature {temperature:g}, not {configured:g}", at_temperature(temperature)
    for top_p in TOP_P:
        yield f"top_p {top_p:g}", nucleus(configured, top_p)
    for count in TOP_K:
        if count < size:
            yield f"top_k {count}", most_probable(configured, count)
    for shards, count in _without_last(run, size):
        yield f"vocabulary without the last of {shards} shards", first_tokens(configured, count)


def _without_last(run: SampledRun, size: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of shards of the vocabulary, each with the number of token ids before the last shard."""
    for shards in sorted({2, 4, 8, run.tensor} - {1}):
        yield shards, size - size // shards


def _frequencies(reference: Reference) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the name and function of every change of the rotary frequencies."""
    for stretch in STRETCHES:
        yield f"positions times {stretch:g}", partial(torch.mul, other=stretch)
    frequencies = reference.rotary_frequencies
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    for theta in THETAS:
        unscaled = theta**-exponents
        if not torch.allclose(unscaled, frequencies, rtol=1e-4):
            yield f"rotary base {theta:g}, unscaled", partial(_replaced, values=unscaled)


def _replaced(tensor: Tensor, *, values: Tensor) -> Tensor:
    """Return ``values`` with the dtype and device of ``tensor``."""
    return values.to(tensor)


def _recorded_rows(trajectory: Trajectory, layers: int, tokens: int) -> Tensor | None:
    """Return the recorded experts, shifted by ``tokens`` and ``layers``; None if the trajectory has none.

    A row that was recorded with other weights is -1, so that the router chooses. The trainer does not replay such a row
    either.
    """
    if "routed_experts" not in trajectory.columns:
        return None
    rows = as_int64(trajectory.column("routed_experts"))
    rows[torch.from_numpy(~usable_rows(trajectory.loss_mask, trajectory.columns))] = -1
    return rows.roll((tokens, layers), (0, 1))
