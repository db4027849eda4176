"""Megatron-Core with Transformer Engine's Python layers: parameters as the conversion's rules say, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from tests.gpu_evidence.te_sources import as_on_gpus
from tests.ranks import run_ranks

HERE = "tests.gpu_evidence.test_layers"
ROOT = Path(__file__).resolve().parents[2]
MOE = "qwen3_30b_a3b_base"
OTHER_LAYOUTS: dict[str, dict[str, int]] = {
    "TP2 PP2 EP8": {"tensor": 2, "pipeline": 2, "expert": 8, "expert_tensor": 1},
    "PP2 VPP2 EP8": {"tensor": 1, "pipeline": 2, "virtual_pipeline": 2, "expert": 8},
    "TP2 EP4 ETP2": {"tensor": 2, "expert": 4, "expert_tensor": 2},
}
"""Layouts of 16 GPUs, in addition to the recipe's TP4 EP8."""


def compare_recipes() -> dict[str, list[Any]]:
    """Return layout, number of parameters and faults of each recipe, and of the recipe MOE in OTHER_LAYOUTS."""
    with as_on_gpus("meta"):
        from megatron_dppo.config import load_config
        from megatron_dppo.model.families import load_model_shape
        from megatron_dppo.trainer.model import compare_with_rules

        recipes = ROOT / "examples" / "recipes"
        cases = {
            path.stem: (path, [])
            for path in sorted(recipes.glob("*.yaml"))
            if path.stem != "scaling"
        }
        for name, sizes in OTHER_LAYOUTS.items():
            changes = [f"parallel.{key}={value}" for key, value in sizes.items()]
            cases[name] = (recipes / f"{MOE}.yaml", changes)
        found: dict[str, list[Any]] = {}
        # Several recipes of the mixture of experts have the same layout: compare it once.
        result_by_layout: dict[str, list[Any]] = {}
        for name, (path, changes) in cases.items():
            config = load_config(path, changes)
            folder = Path(config.model.hf_checkpoint).name.lower()
            shape = load_model_shape(ROOT / "examples" / "model_configs" / folder)
            key = repr((shape, config.parallel, config.megatron))
            if key not in result_by_layout:
                done = compare_with_rules(config, shape)
                result_by_layout[key] = [done.layout, done.parameters, list(done.faults)]
            found[name] = result_by_layout[key]
    return found


def test_parameters_are_as_the_rules_say_in_every_recipes_layout() -> None:
    (found,) = run_ranks(f"{HERE}:compare_recipes", 1, own_interpreter=True)
    for name, (_, parameters, problems) in found.items():
        assert problems == [], name
        assert parameters > 100, name
    # 48 layers of 7 dense parameters and 2 for each of 16 experts; embedding, final norm, output; two ranks.
    assert found[MOE][:2] == ["TP4 EP8 DP4", 2 * (48 * (7 + 2 * 16) + 3)]
    assert found["PP2 VPP2 EP8"][1] == 2 * 24 * (7 + 2 * 16) + 3


CHECKPOINTED = {"expert": 2}
TE_LINEARS = {
    *("TELayerNormColumnParallelLinear", "TERowParallelLinear"),
    *("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"),
}
BFLOAT16_MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
ANOTHER = {"tensor": 2, "expert": 2, "expert_tensor": 1}


def load_narrow_moments(
    folder: str, expected: dict[Any, torch.Tensor], blocks: Any
) -> dict[str, Any]:
    """Load the checkpoint's fp32 values ``expected`` into bfloat16 moments; save and load these moments."""
    from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore
    from tests.distributed.test_offloaded_optimizer import make_trainer

    found: dict[str, Any] = {}
    trainer = make_trainer(f"{folder}/hf", CHECKPOINTED, BFLOAT16_MOMENTS)
    for step in (3, 4):
        store = CheckpointStore(f"{folder}/checkpoints", 1)
        (stored,) = CheckpointDirectory(f"{folder}/checkpoints", 1).survey().complete
        store.load(trainer, stored)
        held_blocks = blocks(trainer)
        rounded = [
            torch.equal(expected[h.block.key, h.block.box].to(h.values.dtype), h.values)
            for h in held_blocks
        ]
        found[f"narrow {step}"] = sum(rounded) == len(expected)
        moments = [h.values.dtype for h in held_blocks if "exp_avg" in h.block.key]
        found["types"] = sorted({str(dtype) for dtype in moments})
        store.save(trainer, 4, {"step": 4})
        for held in held_blocks:
            held.values.zero_()
    trainer.close()
    return found


def save_and_load(folder: str) -> dict[str, Any]:
    """Save a bf16 trainer of TE's layers with the distributed optimizer. Load it in the same and in ANOTHER layout."""
    with as_on_gpus("cpu"):
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory
        from megatron_dppo.trainer.checkpoint.state import model_state, rank_state
        from megatron_dppo.trainer.checkpoint.store import CheckpointStore
        from megatron_dppo.trainer.parking import drop_quantised_weights
        from tests.distributed.test_checkpoint import make_trainer
        from tests.whole_tensors import whole_weights

        found: dict[str, Any] = {}

        def trainer_of(parallel: dict[str, Any]) -> Any:
            return make_trainer(f"{folder}/hf", parallel, True, "bfloat16", 2)

        def blocks(trainer: Any) -> list[Any]:
            return rank_state(model_state(trainer.chunks), trainer.optimizer).blocks

        trainer = trainer_of(CHECKPOINTED)
        for held in blocks(trainer):  # equal values on all replicas
            draw = torch.Generator().manual_seed(
                crc32(f"{held.block.key} {held.block.box}".encode())
            )
            held.values.copy_(torch.randn(held.values.shape, generator=draw))
        modules = [
            m for m in trainer.chunks[0].modules() if isinstance(m, TransformerEngineBaseModule)
        ]
        found["modules"] = [type(module).__name__ for module in modules]
        for module in modules:
            module._fp8_workspaces["weight"] = torch.zeros(1)
        drop_quantised_weights(trainer.chunks)
        found["workspaces"] = [len(module._fp8_workspaces) for module in modules]
        store = CheckpointStore(f"{folder}/checkpoints", 1)
        expected = {(h.block.key, h.block.box): h.values.clone() for h in blocks(trainer)}
        weights = whole_weights(trainer)
        store.save(trainer, 3, {"step": 3})
        trainer.close()

        set_extra_state, restored = TransformerEngineBaseModule.set_extra_state, []

        def record_restored(module: Any, state: Any) -> None:
            restored.append(module)
            set_extra_state(module, state)

        TransformerEngineBaseModule.set_extra_state = record_restored
        for name, parallel in (("as it was", CHECKPOINTED), ("another layout", ANOTHER)):
            trainer = trainer_of(parallel)
            restored.clear()
            store = CheckpointStore(f"{folder}/checkpoints", 1)
            (stored,) = CheckpointDirectory(f"{folder}/checkpoints", 1).survey().complete
            before = whole_weights(trainer)
            loop = store.load(trainer, stored)
            now = whole_weights(trainer)
            found[name] = {
                "loop": loop,
                "restored": len({id(module) for module in restored}),
                "weights": len(weights),
                "wrong weights": sum(not torch.equal(now[key], weights[key]) for key in weights),
                "other weights before": sum(
                    not torch.equal(before[key], weights[key]) for key in weights
                ),
            }
            if parallel == CHECKPOINTED:
                found["blocks"] = len(expected)
                found["same blocks"] = sum(
                    torch.equal(expected[h.block.key, h.block.box], h.values)
                    for h in blocks(trainer)
                )
            trainer.close()

        found |= load_narrow_moments(folder, expected, blocks)
    return found


def test_a_checkpoint_with_extra_states_comes_back(tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny_model

    save_tiny_model(tmp_path / "hf")
    results = run_ranks(f"{HERE}:save_and_load", 2, str(tmp_path), own_interpreter=True)
    for found in results:
        assert set(found["modules"]) == TE_LINEARS | {"TEDotProductAttention"}
        linears = sum(name in TE_LINEARS for name in found["modules"])
        assert linears == 2 * len(TE_LINEARS)  # of two layers; attention has no state of its own
        for name in ("as it was", "another layout"):
            assert found[name]["loop"] == {"step": 3}
            assert found[name]["restored"] == linears
            assert found[name]["wrong weights"] == 0
        assert found["same blocks"] == found["blocks"] > 100
        assert not any(found["workspaces"])
        assert found["narrow 3"]
        assert found["narrow 4"]
        assert found["types"] == ["torch.bfloat16"]
    # Only rank 0 gathers weights. All of them differed before the load.
    assert (
        results[0]["as it was"]["weights"] == results[0]["as it was"]["other weights before"] > 60
    )
