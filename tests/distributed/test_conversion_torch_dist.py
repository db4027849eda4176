"""Megatron-Core's own loader reads the converter's torch_dist checkpoints, and the converter reads Megatron's.

``megatron.core.dist_checkpointing.load`` fills a model of every layout from a folder written without Megatron. A
training run's checkpoint is converted back to the Hugging Face folder that the run began with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import TrainConfig
from tests.layouts import sizes_of
from tests.ranks import run_ranks
from tests.small_config import small_config

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layers": 4},
    "olmoe": {"layers": 4},
    "qwen2_moe": {"layers": 2},
    "qwen2": {"layers": 2},
    "qwen3": {"layers": 2, "tied": True},
}
LAYOUTS = {
    "qwen3_moe": ["TP2 ETP2", "TP2 EP2", "PP2 VPP2"],
    "olmoe": ["TP2 EP2", "PP2 VPP2"],
    "qwen2_moe": ["TP2 EP2", "PP2"],
    "qwen2": ["TP2", "PP2"],
    "qwen3": ["TP2", "PP2"],
}
RUNS = ("TP2 EP2", "PP2 VPP2")


def two_ranks(folder: str, model: str, layout: str) -> TrainConfig:
    parallel = {"world_size": 2, **sizes_of(layout)}
    return small_config(Path("unused"), Path(folder, model), parallel=parallel)


def megatron_loads(folder: str) -> list[str]:
    """Fill zeroed models by Megatron-Core's loader. Return the names of parameters that differ from the original."""
    from megatron_dppo.trainer.trainer import Trainer  # before megatron: it prepares the platform

    from megatron.core import dist_checkpointing, parallel_state  # isort: skip

    wrong = []
    for family, layouts in LAYOUTS.items():
        for layout in layouts:
            trainer = Trainer.read(two_ranks(folder, family, layout))
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            metadata = {"dp_cp_group": group}
            expected = [{n: p.clone() for n, p in c.named_parameters()} for c in trainer.chunks]
            for p in (p for chunk in trainer.chunks for p in chunk.parameters()):
                p.data.zero_()
            state = {
                str(number): chunk.sharded_state_dict(metadata=metadata)
                for number, chunk in enumerate(trainer.chunks)
            }
            loaded = dist_checkpointing.load(state, f"{folder}/{family} torch_dist/release")
            for number, chunk in enumerate(trainer.chunks):
                chunk.load_state_dict(loaded[str(number)], strict=True)
                wrong += [
                    f"{family} {layout} {n}"
                    for n, p in chunk.named_parameters()
                    if not torch.equal(p, expected[number][n])
                ]
            trainer.close()
    return wrong


def save_run(folder: str) -> None:
    """Save a run's checkpoint, weights and optimizer, in each layout of RUNS."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore
    from megatron_dppo.trainer.trainer import Trainer

    for name in RUNS:
        trainer = Trainer.read(two_ranks(folder, "qwen3_moe", name))
        CheckpointStore(f"{folder}/{name}", keep=1).save(trainer, 1, {})
        trainer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from megatron_dppo.convert.streaming import hf_to_megatron
    from tests.tiny_models import save_tiny_model

    root = Path(tmp_path_factory.mktemp("torch_dist"))
    for family, options in FAMILIES.items():
        hf = save_tiny_model(root / family, family, vocab_size=515, **options)
        hf_to_megatron(hf, root / f"{family} torch_dist")
    return root


@pytest.mark.distributed
def test_megatron_core_loads_what_was_written_without_it(folder):
    worker = "tests.distributed.test_conversion_torch_dist:megatron_loads"
    assert run_ranks(worker, 2, str(folder), timeout=600) == [[], []]


@pytest.mark.distributed
def test_a_checkpoint_of_a_training_run_becomes_hugging_faces(folder):
    from safetensors.torch import load_file

    from megatron_dppo.convert.streaming import megatron_to_hf

    run_ranks("tests.distributed.test_conversion_torch_dist:save_run", 2, str(folder), timeout=600)
    original = load_file(folder / "qwen3_moe" / "model.safetensors")
    for name in RUNS:
        (metadata,) = (folder / name).rglob(".metadata")
        back = folder / f"{name} back"
        megatron_to_hf(metadata.parent, back, hf_config=folder / "qwen3_moe")
        found = load_file(back / "model.safetensors")
        assert found.keys() == original.keys()
        assert all(torch.equal(found[k], original[k]) for k in original)
