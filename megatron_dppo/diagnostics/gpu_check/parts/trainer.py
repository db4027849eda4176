"""Check the trainer in three parts.

``layers`` runs a tiny model with Transformer Engine's layers and with torch's layers, and compares the logits and
gradients. ``full_layer`` trains one layer of Qwen3-30B-A3B in full size, and compares its memory and time with the
plan. ``context`` compares a step of two context-parallel ranks with the same step of one rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo import EXAMPLES
from megatron_dppo.cluster.planner.activations import activation_bytes
from megatron_dppo.cluster.planner.devices import CONTEXT, gib
from megatron_dppo.cluster.planner.facts import TrainerFacts, trainer_facts
from megatron_dppo.cluster.planner.step_time import MOE_UTILISATION
from megatron_dppo.cluster.planner.trainer_state import state_bytes
from megatron_dppo.config.layout import EXCHANGES
from megatron_dppo.demo.material import WORDS
from megatron_dppo.diagnostics.gpu_check import (
    Bench,
    CheckRow,
    LackingError,
    at_most,
    logits_of_transformers,
    part,
    policy_config,
    random_batch,
    random_model,
    tiny_model,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import BACKWARD_PRODUCTS, forward_flops
from megatron_dppo.spec import TrainerSpec
from megatron_dppo.system.ports import free_port

if TYPE_CHECKING:
    import torch

    from megatron_dppo.data.packing import PackedBatch
    from megatron_dppo.trainer.trainer import Trainer

LENGTHS = [5, 17, 40, 64]
FP32_LIMIT = 1e-4
"""Largest difference between logits of size 1 from two float32 kernels."""
BF16_LIMIT = 0.1
"""Largest relative difference in bfloat16: the routers of two implementations may choose different experts."""
_NO_FUSION = {
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "bias_activation_fusion": False,
}


@dataclass(frozen=True)
class PassResult:
    """Logits, float32 [T, V] on the CPU, and the gradient of the summed log-probabilities, by parameter."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def logit_error(self, other: PassResult) -> float:
        """Return the norm of the difference of the logits / the norm of the logits of ``other``."""
        return float((self.logits - other.logits).norm() / other.logits.norm())

    def gradient_error(self, other: PassResult) -> float:
        """Return the norm of the difference of all gradients / the norm of all gradients of ``other``."""
        pairs = [(self.gradients[name], value) for name, value in other.gradients.items()]
        difference = sum(float((a - b).square().sum()) for a, b in pairs)
        whole = sum(float(b.square().sum()) for _, b in pairs)
        return (difference / whole) ** 0.5


@part("Transformer Engine's layers against torch's and transformers', logits and gradients", 240.0)
def layers(bench: Bench) -> Iterator[CheckRow]:
    """Compare torch's layers in float32 with transformers, then both kinds of layers in bfloat16 with float32."""
    import torch

    from megatron_dppo.trainer import platform

    folder = tiny_model(bench.folder / "model")
    batch = random_batch(len(WORDS), LENGTHS)
    exact = _run_pass(folder, "float32", batch, torch_layers=True)
    sequences = [batch.token_ids[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    expected = torch.cat(list(logits_of_transformers(folder, sequences)))
    difference = (exact.logits - expected).abs().max()
    yield at_most(
        "torch layers, float32: logits against transformers'", float(difference), FP32_LIMIT
    )
    by_torch = _run_pass(folder, "bfloat16", batch, torch_layers=True)
    yield from _against("torch layers, bfloat16", by_torch, exact, BF16_LIMIT, BF16_LIMIT)
    if not bench.gpus or not platform.has_transformer_engine():
        why = "it is not installed" if bench.gpus else "it needs a GPU"
        yield CheckRow("Transformer Engine's layers", f"not here: {why}")
        return
    by_engine = _run_pass(folder, "bfloat16", batch, torch_layers=False)
    # Each limit is twice the error of torch's layers in bfloat16, plus a margin of 1e-3.
    logit_limit = 2 * by_torch.logit_error(exact) + 1e-3
    gradient_limit = 2 * by_torch.gradient_error(exact) + 1e-3
    label = "Transformer Engine's layers, bfloat16"
    yield from _against(label, by_engine, exact, logit_limit, gradient_limit)


def _against(
    label: str, result: PassResult, exact: PassResult, logit_limit: float, gradient_limit: float
) -> Iterator[CheckRow]:
    logit_error = result.logit_error(exact)
    gradient_error = result.gradient_error(exact)
    yield at_most(f"{label}: logits against float32", logit_error, logit_limit)
    yield at_most(f"{label}: gradients against float32", gradient_error, gradient_limit)


def _run_pass(folder: Path, dtype: str, batch: PackedBatch, *, torch_layers: bool) -> PassResult:
    """Run a forward and a backward pass of the model in ``folder`` on one rank."""
    from megatron_dppo.cpu.torch_layers import decoder_spec
    from megatron_dppo.trainer import platform
    from megatron_dppo.trainer.hf_loading import load_hf
    from megatron_dppo.trainer.megatron_config import transformer_config
    from megatron_dppo.trainer.model import build_chunks
    from megatron_dppo.trainer.step import model_inputs
    from megatron_dppo.trainer.topology import destroy_topology, init_distributed, init_topology
    from megatron_dppo.vocab_parallel import policy_stats

    layout = Layout()
    # Disable apex's kernel: it adds gradients to main_grad, and parameters without DDP have no main_grad.
    megatron_options = {"gradient_accumulation_fusion": False}
    if torch_layers:
        megatron_options |= _NO_FUSION
    config = policy_config(folder, dtype, megatron=megatron_options)
    shape = config.model.read_shape()
    init_distributed(1)
    init_topology(layout)
    platform.seed_everything(0)
    transformer = transformer_config(config, shape, layout)
    chunks = build_chunks(transformer, shape, decoder_spec if torch_layers else None)
    load_hf(chunks, shape, layout, 0, folder)
    placed = batch.to(platform.current().device)
    logits = chunks[0](**model_inputs(placed))[0]
    # Copy: the backward pass of the statistics overwrites the logits with their gradient.
    logits_before = logits.detach().clone().float().cpu()
    stats = policy_stats(logits, placed.target_ids, vocab_size=shape.vocab_size)
    stats.log_probs[placed.loss_mask].sum().backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in chunks[0].named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.float().cpu()
    destroy_topology()
    return PassResult(logits_before[:, : shape.vocab_size], gradients)


MODEL = EXAMPLES / "model_configs" / "qwen3-30b-a3b" / "config.json"
"""The check trains one layer of this model in full size."""
FULL_LENGTHS = [16_384, 1_024]
SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 96,
    "num_experts": 16,
    "vocab_size": 4096,
}
SMALL_LENGTHS = [192, 64]
STATE_TOLERANCE = 0.01
"""Largest relative error of the plan for the bytes of weights, gradients and optimizer."""
SAVED_TOLERANCE = 0.10
"""Largest relative error of the plan for the bytes that a step adds."""
STEPS = 3


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on the trainer's device.

    ``saved``: the most bytes that autograd kept for a backward pass. ``peak``: peak of a step in torch's allocator,
    None on a CPU.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int
    peak: int | None


@part("one layer of Qwen3-30B-A3B in full size: time and memory against the plan", 400.0)
def full_layer(bench: Bench) -> Iterator[CheckRow]:
    """Yield a row for each kind of memory, then rows of times."""
    config = json.loads(MODEL.read_bytes()) | {"num_hidden_layers": 1}
    lengths = FULL_LENGTHS
    if not bench.gpus:
        config |= SMALL
        lengths = SMALL_LENGTHS
        yield CheckRow("size", f"scaled down without a GPU: hidden 256, {sum(lengths)} tokens")
    from megatron_dppo.trainer import platform
    from megatron_dppo.trainer.trainer import Trainer

    checkpoint = random_model(bench.folder / "checkpoint", config)
    policy = policy_config(checkpoint, "bfloat16", training={"micro_batch_tokens": sum(lengths)})
    shape = policy.model.read_shape()
    spec = TrainerSpec.of(policy, shape)
    facts = trainer_facts(policy, spec, shape, 1, max(lengths), gpu=bench.gpus > 0)
    # The planner knows Transformer Engine's layers on GPUs and torch's layers on CPUs.
    is_planned = bench.gpus == 0 or platform.has_transformer_engine()
    if not is_planned:
        yield CheckRow("layers", "of torch modules: Transformer Engine is not installed")
    if bench.gpus:
        _require_memory(facts)
    trainer = Trainer.read(policy)
    batch = random_batch(trainer.shape.vocab_size, lengths)
    held_bytes = _held(trainer, batch, bench.gpus)
    yield from _memory(held_bytes, facts, is_planned=is_planned)
    yield _time(trainer, batch, lengths)
    yield from _state_times(trainer, held_bytes)
    for file in checkpoint.glob("*.safetensors"):
        # Do not leave gigabytes of random weights behind.
        file.unlink()


def _require_memory(facts: TrainerFacts) -> None:
    """Raise LackingError if the GPU has less free memory than the plan needs, with a reserve of 10%."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    planned = activation_bytes(facts, 0).total + state_bytes(facts, 0).total
    needed = CONTEXT + round(1.1 * planned)
    if free < needed:
        raise LackingError(f"GPU memory: {gib(free)} free, {gib(needed)} needed by the plan")


def take_step(
    trainer: Trainer,
    batch: PackedBatch,
    denominator: float | None = None,
    algorithm: str = "dppo-binary-tv",
) -> float:
    """Do an optimiser step, and return the unclipped norm of its gradient.

    ``denominator`` divides the loss; None: the number of tokens.
    """
    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.trainer.token_loss import make_token_loss

    loss = make_token_loss(build_algorithm(algorithm))
    return trainer.train_mini_batch([batch], loss, denominator or float(batch.num_tokens)).grad_norm


def _held(trainer: Trainer, batch: PackedBatch, gpus: int) -> HeldBytes:
    """Measure the trainer's memory in two optimiser steps, or in one without a GPU."""
    from megatron_dppo.diagnostics.gpu_check import held_memory
    from megatron_dppo.diagnostics.mask_benchmark.meters import peak_extra_bytes

    with held_memory.saved_for_backward(trainer.held_tensors()["weights"]) as saved:
        # This step is also the warm-up: it allocates Adam's state.
        take_step(trainer, batch)
    peak = None
    if gpus:
        peak = peak_extra_bytes("cuda", lambda: take_step(trainer, batch))
    tensors_by_part = trainer.held_tensors()
    sizes = {name: held_memory.storage_bytes(t) for name, t in tensors_by_part.items()}
    return HeldBytes(sizes["weights"], sizes["gradients"], sizes["optimizer"], saved.peak, peak)


def _memory(held_bytes: HeldBytes, facts: TrainerFacts, *, is_planned: bool) -> Iterator[CheckRow]:
    """Yield a row for each kind of memory.

    If ``is_planned`` is false, the planner does not know the layers, so the rows of a step's memory cannot fail.
    """
    state = state_bytes(facts, 0)
    # The trainer has one rank, which has all experts: no rank is busier than another.
    live = activation_bytes(facts, 0, busiest=1.0)
    yield compared("weights", held_bytes.weights, state.weights, STATE_TOLERANCE)
    yield compared("gradients", held_bytes.gradients, state.gradients, STATE_TOLERANCE)
    yield compared("optimizer", held_bytes.optimizer, state.optimizer, STATE_TOLERANCE)
    step_memory = {"kept for backward": (held_bytes.saved, live.saved)}
    if held_bytes.peak is not None:
        step_memory["peak of a step above its start"] = held_bytes.peak, live.total
    for label, (measured, planned) in step_memory.items():
        row = compared(label, measured, planned, SAVED_TOLERANCE)
        if not is_planned:
            row = replace(row, holds=None)
        yield row


def compared(label: str, measured: int, planned: int, tolerance: float) -> CheckRow:
    """Return a row that holds if ``planned`` bytes differ by at most the share ``tolerance`` from ``measured``."""
    difference = planned / measured - 1
    return CheckRow(
        label,
        gib(measured),
        f"{gib(planned)} by the plan ({difference:+.1%}), within {tolerance:.0%}",
        abs(difference) <= tolerance,
        {"measured": measured, "planned": planned},
    )


def _time(trainer: Trainer, batch: PackedBatch, lengths: list[int]) -> CheckRow:
    from megatron_dppo.trainer import platform

    cost = forward_flops(trainer.shape)
    flops = (1 + BACKWARD_PRODUCTS) * sum(cost(length) for length in lengths)
    start_time = time.perf_counter()
    for _ in range(STEPS):
        # The step reads the gradient's norm from the device, so it includes all of the GPU's work.
        take_step(trainer, batch)
    seconds = (time.perf_counter() - start_time) / STEPS
    rate = flops / seconds
    peak = platform.peak_flops()
    figures: dict[str, Any] = {"seconds": seconds, "flops_per_second": rate}
    text = f"{seconds:.3g} s, {rate / 1e12:.3g} TFLOP/s"
    if peak is None:
        return CheckRow("an optimiser step", text, figures=figures)
    text += f", MFU {rate / peak:.0%}"
    return CheckRow(
        "an optimiser step", text, f"the plan assumes {MOE_UTILISATION:.0%}", None, figures
    )


def _state_times(trainer: Trainer, held_bytes: HeldBytes) -> Iterator[CheckRow]:
    """Yield the speed of hashing the weights and of parking; the first parking also allocates host memory."""
    digest_seconds = _seconds(trainer.weights_digest), _seconds(trainer.weights_digest)
    yield _speed_row("the hash of the weights", held_bytes.weights, digest_seconds)
    parked_bytes = held_bytes.weights + held_bytes.optimizer
    parking_seconds: list[float] = []
    unparking_seconds: list[float] = []
    for _ in range(2):
        parking_seconds.append(_seconds(trainer.park))
        unparking_seconds.append(_seconds(trainer.unpark))
    yield _speed_row("parking", parked_bytes, parking_seconds)
    yield _speed_row("unparking", parked_bytes, unparking_seconds)


def _seconds(action: Callable[[], object]) -> float:
    start_time = time.perf_counter()
    action()
    return time.perf_counter() - start_time


def _speed_row(label: str, size: int, seconds: Sequence[float]) -> CheckRow:
    """Return a row of the ``seconds`` that ``size`` bytes took in a first and a second call."""
    first, second = seconds
    figures = {"first_seconds": first, "seconds": second, "bytes_per_second": size / second}
    text = f"{first:.3g} s at first, then {second:.3g} s, {size / second / 1e9:.3g} GB/s"
    return CheckRow(label, text, figures=figures)


DENSE_MODEL = EXAMPLES / "model_configs" / "qwen3-1.7b-base" / "config.json"
"""Model for the check of context parallelism. The model is dense: in a mixture of experts, bf16 rounding changes the
experts of some tokens."""
SMALL_DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "max_window_layers": 2,
}
CONTEXT_LENGTHS = [3, 500, 2041, 4096]
SMALL_CONTEXT = [1, 3, 50, 202]
RANKS = 2
LIMITS = {"bfloat16": (0.1, 1e-2), "float32": (1e-5, 1e-5)}
"""dtype -> bounds: difference of a log-probability in nats, relative difference of the gradient norm."""


@part(
    "context parallelism: log-probabilities, loss and gradient norm of two ranks against one", 300.0
)
def context(bench: Bench) -> Iterator[CheckRow]:
    """Yield a row for each way to exchange keys and values, then a row about the division of tokens among ranks."""
    if bench.gpus == 1:
        yield CheckRow("context parallel", "not here: one GPU only")
        return
    # Without GPUs there is only one exchange, and no option selects it.
    options_by_exchange: dict[str, dict[str, str]] = {"a2a over gloo": {}}
    dtype, lengths = "float32", SMALL_CONTEXT
    if bench.gpus:
        options_by_exchange = {exchange: {"cp_comm_type": exchange} for exchange in EXCHANGES}
        dtype, lengths = "bfloat16", CONTEXT_LENGTHS
    model_config = json.loads(DENSE_MODEL.read_bytes()) | SMALL_DENSE
    settings = {
        "checkpoint": str(random_model(bench.folder / "checkpoint", model_config)),
        "dtype": dtype,
        "lengths": lengths,
        "folder": str(bench.folder),
    }
    one = _ranks_step(1, {**settings, "name": "one", "megatron": {}})
    for name, megatron in options_by_exchange.items():
        two = _ranks_step(RANKS, {**settings, "name": name, "megatron": megatron})
        yield exchange_row(name, dtype, one, two)
    yield _layout_row(bench)


def exchange_row(exchange: str, dtype: str, one: dict[str, Any], two: dict[str, Any]) -> CheckRow:
    """Return a row that holds if a step of two ranks (``two``) agrees with the same step of one rank (``one``)."""
    log_prob_limit, norm_limit = LIMITS[dtype]
    pairs = zip(two["log_probs"], one["log_probs"], strict=True)
    figures = {
        "log_prob": max(abs(a - b) for a, b in pairs),
        "norm": abs(two["norm"] / one["norm"] - 1),
    }
    return CheckRow(
        f"CP{RANKS}, {exchange}, {dtype}",
        f"log-prob {figures['log_prob']:.1e} nats, gradient norm {figures['norm']:.1e}",
        f"at most {log_prob_limit:.0e} nats, {norm_limit:.0e}",
        figures["log_prob"] <= log_prob_limit and figures["norm"] <= norm_limit,
        figures,
    )


def _layout_row(bench: Bench) -> CheckRow:
    """Return a row that holds if ``own_rows`` gives each of four ranks the rows that Transformer Engine gives it."""
    from megatron_dppo.trainer import platform

    label = "own rows of each rank"
    if not bench.gpus or not platform.has_transformer_engine():
        return CheckRow(label, "not here: the comparison needs Transformer Engine and a GPU")
    import torch
    import transformer_engine.pytorch  # noqa: F401  # loads the extension, which is in no folder of sys.path
    import transformer_engine_torch

    from megatron_dppo.trainer.context_parallel import own_rows

    device = platform.current().device
    # Bounds of four sequences and an empty one; each length is a multiple of 2 x 4 ranks.
    bounds = torch.tensor([0, 8, 24, 24, 88, 152], dtype=torch.int32, device=device)
    is_same = True
    partitioned_indices = transformer_engine_torch.thd_get_partitioned_indices
    for rank in range(4):
        expected_rows = partitioned_indices(bounds, 152, 4, rank).long()
        if not torch.equal(own_rows(bounds, 152, 4, rank), expected_rows):
            is_same = False
    text = "as Transformer Engine's" if is_same else "different rows"
    return CheckRow(label, text, "as Transformer Engine's", is_same)


def _ranks_step(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train a step on ``ranks`` ranks and return the report of rank 0."""
    import torch

    torch.multiprocessing.spawn(_rank_step, (ranks, free_port(), settings), ranks)
    return dict(json.loads(_report(settings).read_bytes()))


def _report(settings: dict[str, Any]) -> Path:
    return Path(settings["folder"]) / f"{settings['name'].replace(' ', '_')}.json"


def _rank_step(rank: int, ranks: int, port: int, settings: dict[str, Any]) -> None:
    """Do a step on one rank; rank 0 writes the log-probabilities before the step and its unclipped gradient norm."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from megatron_dppo.trainer.trainer import Trainer

    config = policy_config(
        Path(settings["checkpoint"]),
        settings["dtype"],
        parallel={"world_size": ranks, "context": ranks},
        optimizer={"distributed": False},
        megatron=settings["megatron"],
    )
    trainer = Trainer.read(config)
    batch = random_batch(
        trainer.shape.vocab_size,
        settings["lengths"],
        pad_multiple=trainer.pad_multiple,
        sequence_multiple=trainer.share.sequence_multiple,
    )
    (log_probs,) = trainer.log_probs([batch])
    norm = take_step(trainer, batch, float(batch.loss_mask.sum()))
    if rank == 0:
        trained = log_probs.cpu()[batch.loss_mask].tolist()
        _report(settings).write_text(json.dumps({"log_probs": trained, "norm": norm}))
    trainer.close()
