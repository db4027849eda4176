"""Models for the check: a small real one with its tokenizer, one of random weights of any shape, and a trainer's
configuration without a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import hf_tensors

if TYPE_CHECKING:
    import torch

    from megatron_dppo.data.packing import PackedBatch


def tiny_model(folder: Path) -> Path:
    """The demo's model with random weights, written into ``folder``: Qwen3-MoE, 2 layers, 8 experts, fp32."""
    from megatron_dppo.demo.material import make_model

    make_model(folder, seed=1)
    return folder


def random_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """A checkpoint of ``config`` (as in config.json) with small random weights in its dtype, tensor by tensor."""
    import torch

    from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint

    source = folder / "config"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(dict(config)))
    shape = load_model_shape(source)
    dtype = getattr(torch, shape.dtype)
    seeded = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dims in hf_tensors(shape).items():
            if len(dims) == 1:
                yield name, torch.ones(dims, dtype=dtype)
            else:
                yield name, torch.empty(dims, dtype=dtype).normal_(0, 0.02, generator=seeded)

    write_hf_checkpoint(folder / "model", shape, dtype, tensors(), side_files_from=source)
    return folder / "model"


def policy_config(checkpoint: Path, dtype: str, **sections: Mapping[str, Any]) -> PolicyConfig:
    """What one rank's trainer reads; ``sections`` add to it."""
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": str(checkpoint.parent), "steps": 1},
        "model": {"hf_checkpoint": str(checkpoint), "dtype": dtype},
        "training": {"micro_batch_tokens": 1024},
        "optimizer": {"lr": 1e-6},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return PolicyConfig.model_validate(values)


def random_batch(
    vocab: int, lengths: list[int], *, pad_multiple: int = 1, sequence_multiple: int = 1
) -> PackedBatch:
    """Sequences of random tokens as one micro-batch; all but their first token were sampled. The multiples are
    ``pack``'s."""
    from megatron_dppo.data.packing import pack
    from megatron_dppo.data.trajectory import Trajectory

    rng = random.Random(0)

    def sequence(number: int, length: int) -> Trajectory:
        tokens = [rng.randrange(vocab) for _ in range(length)]
        mu = {"rollout_log_probs": [-8.0] * (length - 1)}
        return Trajectory.of_response(
            tokens[:1], tokens[1:], problem_id=number, advantage=(-1.0) ** number, columns=mu
        )

    sequences = [sequence(i, length) for i, length in enumerate(lengths)]
    return pack(
        sequences,
        indices=range(len(lengths)),
        trains=[True] * len(lengths),
        pad_multiple=pad_multiple,
        sequence_multiple=sequence_multiple,
    )
