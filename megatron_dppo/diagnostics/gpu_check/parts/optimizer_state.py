"""Check the kinds of Adam's state that need less GPU memory: compare with plain Adam, and restart from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.forwarded import MOMENT_DTYPES, OFFLOAD, PRECISION_AWARE
from megatron_dppo.diagnostics.gpu_check import (
    Bench,
    CheckRow,
    at_most,
    part,
    policy_config,
    random_batch,
    tiny_model,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.trainer.trainer import Trainer

LENGTHS = [5, 17, 40, 64]
STEPS = 2
LIMIT = 0.1
"""Largest allowed difference from plain Adam's weights, relative to plain Adam's change of the weights.

bfloat16 weights and moments keep 8 bits, and Adam's first steps depend on the sign of small gradients. So rounding
matters: on one machine the difference is 0 with torch's plain kernels (ATEN_CPU_CAPABILITY=default), and 0.034 with its
AVX2 kernels. Another update rule differs by about 1.
"""
NARROW: Mapping[str, Any] = {PRECISION_AWARE: True, **dict.fromkeys(MOMENT_DTYPES, "bfloat16")}
"""Options of bfloat16 moments. They need Transformer Engine's FusedAdam."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "offloaded": {OFFLOAD: True},
    "offloaded, precision-aware": {OFFLOAD: True, PRECISION_AWARE: True},
    "bfloat16 moments": NARROW,
}
"""Kind of the state -> its options of Megatron-Core's optimizer."""


@part("Adam's state in host memory and with bfloat16 moments: steps and a restart", 240.0)
def optimizer_state(bench: Bench) -> Iterator[CheckRow]:
    """Yield two rows for each kind: the difference from plain Adam's weights, and the difference after a restart."""
    from megatron_dppo.trainer import platform

    folder = tiny_model(bench.folder / "model")
    plain = _trainer(folder, {})
    before = _weights(plain)
    _train(plain, 2 * STEPS)
    expected = _weights(plain)
    plain.close()
    for label, options in KINDS.items():
        if options is NARROW and not platform.has_transformer_engine():
            yield CheckRow(label, "not here: Transformer Engine is not installed")
            continue
        weights, resumed = _with_restart(folder, options, bench.folder / label.replace(" ", "_"))
        change = _norm(expected, before)
        difference = _norm(weights, expected) / change
        yield at_most(f"{label}: changes against plain Adam's", difference, LIMIT)
        yield at_most(f"{label}: weights after a restart", _norm(resumed, weights), 0.0)


def _with_restart(
    folder: Path, options: Mapping[str, Any], checkpoints: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of an uninterrupted trainer, and of a trainer that continues from its checkpoint."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    trainer = _trainer(folder, options)
    _train(trainer, STEPS)
    store = CheckpointStore(checkpoints, 1)
    store.save(trainer, STEPS, {})
    _train(trainer, STEPS)
    weights = _weights(trainer)
    trainer.close()
    resumed = _trainer(folder, options)
    store = CheckpointStore(checkpoints, 1)
    store.load(resumed, store.survey().complete[-1])
    _train(resumed, STEPS)
    resumed_weights = _weights(resumed)
    resumed.close()
    return weights, resumed_weights


def _trainer(folder: Path, options: Mapping[str, Any]) -> Trainer:
    from megatron_dppo.trainer.trainer import Trainer

    config = policy_config(
        folder, "bfloat16", optimizer={"lr": 1e-3, "distributed": True}, megatron_optimizer=options
    )
    return Trainer.read(config)


def _train(trainer: Trainer, steps: int) -> None:
    from megatron_dppo.diagnostics.gpu_check.parts.trainer import take_step

    batch = random_batch(trainer.shape.vocab_size, LENGTHS)
    for _ in range(steps):
        take_step(trainer, batch)


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {str(name): weight.detach().float().cpu() for name, weight in trainer.weights().items()}


def _norm(weights: Mapping[str, Tensor], other_weights: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all weights."""
    squares = [float((other_weights[n] - w).square().sum()) for n, w in weights.items()]
    return sum(squares) ** 0.5
