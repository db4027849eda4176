"""A router's bias, a buffer of Megatron-Core's, is loaded, kept in float32, checkpointed, sent and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.families import qwen3_moe
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.shape import ModelShape, Router
from tests.ranks import run_ranks


def worker(folder: str) -> dict[str, Any]:
    """Return the data type and the values of the bias of each layer after each operation."""
    from megatron_dppo.trainer.model import named_parameters
    from tests.distributed.test_checkpoint import make_trainer, train
    from tests.planted_families import biased_family, planted
    from tests.whole_tensors import whole_weights

    # The shape says that Megatron-Core's router has the bias, with the sigmoid that such routers have.
    def read(facts: ConfigFacts) -> ModelShape:
        return replace(qwen3_moe.read(facts), router=Router(score="sigmoid", has_bias=True))

    with planted(replace(biased_family(), read=read)):
        trainer = make_trainer(f"{folder}/hf", {"expert": 2}, False, "bfloat16", 2)

        def biases() -> list[Any]:
            held = named_parameters(trainer.chunks)
            names = [f"decoder.layers.{i}.mlp.router.expert_bias" for i in (0, 1)]
            return [[str(held[0, name].dtype), held[0, name].tolist()] for name in names]

        out: dict[str, Any] = {"loaded": biases()}
        trainer.export_hf(f"{folder}/export")
        train(trainer, 1)
        out["trained"] = biases()
        sent = {n: t for n, t in whole_weights(trainer).items() if n.endswith("correction_bias")}
        out["sent"] = [[str(t.dtype), t.tolist()] for _, t in sorted(sent.items())]
        from megatron_dppo.trainer.checkpoint.state import model_state, rank_state

        blocks = rank_state(model_state(trainer.chunks), trainer.optimizer).blocks
        out["stored"] = [
            [str(b.block.dtype), b.values.view(-1).tolist()]
            for b in blocks
            if b.block.key.endswith("router.expert_bias")
        ]
        trainer.close()
    return out


@pytest.mark.distributed
def test_the_bias_keeps_its_bits_on_every_way(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from tests.planted_families import add_router_bias
    from tests.tiny_models import save_tiny_model

    hf = save_tiny_model(tmp_path / "hf", "qwen3_moe", dtype=torch.bfloat16, vocab_size=515)
    tensors = add_router_bias(hf)
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]
    expected = [["torch.float32", tensors[name].tolist()] for name in names]
    assert any(
        tensors[name].bfloat16().float().tolist() != tensors[name].tolist() for name in names
    )
    first, second = run_ranks("tests.distributed.test_router_bias:worker", 2, str(tmp_path))
    for report in (first, second):
        assert report["loaded"] == report["trained"] == report["stored"] == expected
    assert first["sent"] == expected
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert all(exported[name].dtype == tensors[name].dtype for name in tensors)
