"""Every element of a checkpoint is written by exactly one rank.

The tests build the real modules and optimizers of every rank. Torch's fake process group stands for the world, so that
one process can be each of its ranks, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.tiny_models import save_tiny_model

# The section ``parallel`` of the configuration, and the world size.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "DP3": ({}, 3),
    "EP2 of DP4": ({"expert": 2}, 4),
    # Dense parameters and experts have equally many replicas, but on different ranks.
    "TP2 EP2 of 4": ({"tensor": 2, "expert": 2}, 4),
    "TP2 ETP2 PP2 VPP2": ({"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, 4),
}


def test_groups_of_which_a_rank_has_nothing_count_no_steps():
    """Transformer Engine's FusedAdam does not count steps of empty groups, and a resumed run must be able to save."""
    from megatron_dppo.trainer.checkpoint.state import optimizer_steps, set_steps

    full: dict[str, Any]
    empty: dict[str, Any]
    full, empty = {"params": [torch.zeros(1)]}, {"params": []}
    inner = SimpleNamespace(param_groups=[full, empty], state={})
    optimizer: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    set_steps(optimizer, 5)
    full["step"] += 1
    assert optimizer_steps(optimizer) == {6}
    # The count that another layout saved for a group that is empty here does not matter.
    empty["step"] = 5
    assert optimizer_steps(optimizer) == {6}


@contextmanager
def as_rank(layout: Any, rank: int) -> Iterator[None]:
    """Make this process ``rank`` of a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_dppo.trainer import platform
    from megatron_dppo.trainer.topology import destroy_topology, init_topology

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        init_topology(layout)
        platform.seed_everything(0)
        yield
    finally:
        destroy_topology()
        dist.destroy_process_group()


def build(config: Any, shape: Any, layout: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the chunks and the optimizer of this process's rank. ``options`` are Megatron's optimizer options."""
    from megatron_dppo.trainer.megatron_config import DTYPES, transformer_config
    from megatron_dppo.trainer.model import build_chunks, wrap_chunks
    from megatron_dppo.trainer.optimizer import build_optimizer

    transformer = transformer_config(config, shape, layout)
    chunks = build_chunks(transformer, shape)
    distributed = config.distributed_optimizer
    wrapped = wrap_chunks(chunks, transformer, {}, distributed_optimizer=distributed)
    dtype = DTYPES[config.model.dtype]
    optimizer, _ = build_optimizer(
        config.optimizer, wrapped, dtype, options, distributed=distributed
    )
    return chunks, optimizer


def state_of(config: Any, shape: Any, layout: Any, rank: int) -> Any:
    """Return the blocks that ``rank`` has, and its share that it writes, of a model before its first step."""
    from megatron_dppo.trainer.checkpoint.state import model_state, rank_state

    with as_rank(layout, rank):
        chunks, optimizer = build(config, shape, layout, {})
        return rank_state(model_state(chunks), optimizer)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        save_tiny_model(
            tmp_path_factory.mktemp("held") / "hf", "qwen3_moe", layers=4, hidden=32, vocab_size=515
        )
    )


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_written_once(material: Path, name: str, distributed: bool) -> None:
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.layout import Layout
    from tests.distributed.test_trainer_parity import run_config

    parallel, world = LAYOUTS[name]
    config = run_config(
        str(material),
        {**parallel, "world_size": world},
        {"distributed": distributed, "dtype": "bfloat16"},
    )
    layout, shape = Layout.of(config.parallel.sizes), load_model_shape(material)
    written: dict[str, np.ndarray] = {}
    shares = []
    for rank in range(world):
        content = state_of(config, shape, layout, rank)
        assert {id(block) for block in content.share} <= {id(block) for block in content.blocks}
        for block, values in content.share:
            count = written.setdefault(block.key, np.zeros(block.dims, np.int8))
            box = tuple(
                slice(o, o + n) for o, n in zip(block.box.offsets, block.box.sizes, strict=True)
            )
            count[box] += 1
            assert values.shape == block.box.sizes
            assert values.is_contiguous()
        shares.append(sum(block.bytes for block, _ in content.share))
    prefixes = {key.rsplit(".", 1)[0].split(".decoder")[0] for key in written if "optimizer" in key}
    assert len(prefixes) > 2
    weights = [key for key in written if not key.startswith("optimizer.")]
    for key in weights:
        for part in ("exp_avg", "exp_avg_sq", "fp32_param"):
            assert f"optimizer.state.{part}.{key}" in written
    assert len(written) == 4 * len(weights)
    for key, count in written.items():
        assert (count == 1).all(), key
    assert max(shares) < 1.6 * min(shares)
    assert torch.is_tensor(content.blocks[0].values)


def hybrid_model(folder: Path, ranks: int = 1) -> tuple[Any, Any, Any]:
    """Configuration, shape and layout of a bfloat16 model whose delta nets have a float32 norm."""
    from megatron_dppo.config.schema import ParallelConfig
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.layout import Layout
    from tests.distributed.test_trainer_parity import run_config

    hf = save_tiny_model(folder / "hf", "qwen3_next", vocab_size=128)
    changes = {"distributed": True, "dtype": "bfloat16"}
    config = run_config(str(hf), {"world_size": ranks}, changes)
    return config, load_model_shape(hf), Layout.of(ParallelConfig(world_size=ranks).sizes)


def test_each_parameter_has_its_own_state_in_a_model_of_two_types(tmp_path: Path) -> None:
    """The norm of a delta net is float32 in a bfloat16 model, and shares a group of Adam with bfloat16 parameters."""
    config, shape, layout = hybrid_model(tmp_path)
    content = state_of(config, shape, layout, 0)
    values = {(block.key, block.box): tensor for block, tensor in content.blocks}
    weights = {key: tensor for key, tensor in values.items() if not key[0].startswith("optimizer.")}
    float32_keys = {key for (key, _), tensor in weights.items() if tensor.dtype is torch.float32}
    assert float32_keys == {"decoder.layers.0.self_attention.out_norm.weight"}
    states = 0
    for (key, box), weight in weights.items():
        state = {
            part: values.get((f"optimizer.state.{part}.{key}", box))
            for part in ("exp_avg", "exp_avg_sq", "fp32_param")
        }
        master = state["fp32_param"]
        assert state["exp_avg"] is not None, key
        assert state["exp_avg_sq"] is not None, key
        if key in float32_keys:
            assert master is None
            states += 2
            continue
        assert master is not None, key
        assert torch.equal(master.to(weight.dtype), weight), key
        states += 3
    assert len(values) == len(weights) + states


def test_an_offloaded_optimizer_steps_on_the_float32_weights_that_were_loaded(
    tmp_path: Path,
) -> None:
    from megatron_dppo.trainer.checkpoint.state import model_state, rank_state, synchronize_masters

    config, shape, layout = hybrid_model(tmp_path)
    with as_rank(layout, 0):
        chunks, optimizer = build(config, shape, layout, {"optimizer_cpu_offload": True})
        (norm,) = [
            p for name, p in chunks[0].named_parameters() if name.endswith("out_norm.weight")
        ]
        values = torch.arange(1.0, 1 + norm.numel())
        for block, tensor in rank_state(model_state(chunks), optimizer).blocks:
            if block.key.endswith("out_norm.weight") and not block.key.startswith("optimizer."):
                tensor.copy_(values)
        synchronize_masters(optimizer)
        (part,) = [p for p in optimizer.chained_optimizers if not p.is_stub_optimizer]
        copies = part.optimizer.param_to_inner_param
        (main,) = [main for main in copies if main.data_ptr() == norm.data_ptr()]
        assert torch.equal(norm, values)
        assert copies[main] is not main
        assert torch.equal(copies[main], values)


def test_an_offloaded_optimizer_copies_only_the_parameters_that_a_rank_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dppo.trainer.checkpoint.state import HybridDeviceOptimizer

    config, shape, layout = hybrid_model(tmp_path, ranks=2)
    copied_sizes: list[int] = []
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def count_copies(optimizer: HybridDeviceOptimizer, offload_fraction: float) -> Any:
        result = divide(optimizer, offload_fraction)
        copied_sizes.append(sum(copy.numel() for copy in result[3]))
        return result

    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", count_copies)
    with as_rank(layout, 0):
        chunks, optimizer = build(config, shape, layout, {"optimizer_cpu_offload": True})
        elements = sum(p.numel() for p in chunks[0].parameters())
        assert sum(copied_sizes) <= 0.51 * elements
        for part in optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                assert type(part.optimizer) is HybridDeviceOptimizer
