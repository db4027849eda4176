"""Qwen3.5: its configuration, whose ``text_config`` is the table of the language model, its tensors' names in
checkpoints and in the engine, and faults planted in the engine's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from megatron_dppo.checkpoint_conversion.hf_folder import copy_side_files
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.data.problems import embedding_rows
from megatron_dppo.model.errors import UnsupportedModelError
from megatron_dppo.model.families import load_model_shape, missing_engine_keys, unknown_key_warnings
from megatron_dppo.model.layout import Layout, LayoutSizes, model_faults
from megatron_dppo.model.mapping import EngineLayout, carried_names, engine_parameters
from megatron_dppo.model.resharding import prove_resharding
from megatron_dppo.model.shape import ModelShape
from tests.engine_digests import Fault, expected_digests, mismatched_tensors, random_weights
from tests.tiny_models import save_tiny_model, tensors_of
from tests.unit.families.test_qwen3_next import tiny_shape
from tests.unit.published_configs import CONFIGS, published, refused_keys, written

NAME = "qwen3.5-35b-a3b"
PUBLISHED = CONFIGS / NAME
LAYER = "model.language_model.layers.{}."


def test_the_table_of_the_language_model_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    ours, theirs = load_model_shape(PUBLISHED), AutoConfig.from_pretrained(PUBLISHED)
    text = theirs.get_text_config()
    kinds = [i for i, kind in enumerate(text.layer_types) if kind == "linear_attention"]
    assert list(ours.delta_layers) == kinds
    assert (ours.num_experts, ours.rope_theta) == (
        text.num_experts,
        text.rope_parameters["rope_theta"],
    )
    assert ours.rotary_fraction == text.rope_parameters["partial_rotary_factor"]
    assert unknown_key_warnings(PUBLISHED) == []
    # The missing key tells SGLang not to build the vision tower.
    assert missing_engine_keys(PUBLISHED) == {"language_model_only": True}
    assert embedding_rows(PUBLISHED) == text.vocab_size
    # A file that transformers 5 saves lacks keys that SGLang reads in the table.
    theirs.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["text_config"]["full_attention_interval"]
    assert load_model_shape(written(tmp_path, values)) == ours
    assert unknown_key_warnings(tmp_path) == []
    assert missing_engine_keys(tmp_path)["text_config"]["full_attention_interval"] == 4


def test_the_language_model_alone_is_read_too(tmp_path: Path) -> None:
    AutoConfig.from_pretrained(PUBLISHED).get_text_config().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["full_attention_interval"]
    written(tmp_path, {**values, "architectures": ["Qwen3_5MoeForCausalLM"]})
    alone = load_model_shape(tmp_path)
    assert replace(alone, family="qwen3_5_moe") == load_model_shape(PUBLISHED)
    assert unknown_key_warnings(tmp_path) == []
    assert missing_engine_keys(tmp_path)["full_attention_interval"] == 4


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"layer_types": ["full_attention"] * 40}, "layer_types"),
        ({"model_type": "qwen3_5_text"}, "text_config.model_type"),
        ({"clip_qkv": 8}, "clip_qkv"),
    ],
)
def test_keys_of_the_table_are_refused_by_their_names(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    values = published(NAME)
    values["text_config"] |= changes
    assert refused_keys(tmp_path, values) == [key]


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="text_config"):
        load_model_shape(written(tmp_path, published(NAME) | {"text_config": None}))


def test_the_vision_tower_and_the_layer_of_further_tokens_are_carried() -> None:
    names = ["model.visual.pos_embed.weight", "mtp.fc.weight", "model.language_model.norm.weight"]
    assert set(carried_names(tiny_shape(PUBLISHED), names)) == set(names[:2])


def test_context_parallelism_is_refused_by_its_key() -> None:
    shape = load_model_shape(PUBLISHED)
    faults = model_faults(LayoutSizes(world_size=2, context=2), shape)
    assert "context" in {fault.key for fault in faults}


def test_a_written_config_says_the_type_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    copy_side_files(written(tmp_path / "from", published(NAME)), tmp_path / "to", "float32")
    assert load_model_shape(tmp_path / "to").dtype == "float32"


def test_a_float32_decay_of_a_bfloat16_checkpoint_is_kept_by_conversion(tmp_path: Path) -> None:
    hf = save_tiny_model(tmp_path / "hf", "qwen3_5_moe", dtype=torch.bfloat16)
    tensors = tensors_of(hf)
    for name in tensors:
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(hf) as reader:
        reader.check(load_model_shape(hf))
    hf_to_megatron(hf, tmp_path / "m")
    verify(hf, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    found = tensors_of(tmp_path / "back")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_element_moves_once_into_the_engine(ranks: int) -> None:
    report = prove_resharding(
        tiny_shape(PUBLISHED), Layout.smallest(2, 1, None, 2, 1), EngineLayout(ranks)
    )
    assert sum(report.holds) == report.model_bytes


def test_a_rank_of_the_engine_has_its_sections() -> None:
    parameters = {p.name: p for p in engine_parameters(tiny_shape(PUBLISHED), EngineLayout(2), 1)}
    inputs = parameters["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    rows = [(s.hf_name.split(".")[-2], s.hf_start, s.length) for s in inputs.segments]
    # Queries and keys have 8 rows each, values and their gates 24. Rank 1 has the second half of each.
    assert rows == [
        ("in_proj_qkv", 4, 4),
        ("in_proj_qkv", 8 + 4, 4),
        ("in_proj_qkv", 16 + 12, 12),
        ("in_proj_z", 12, 12),
    ]
    # SGLang builds this norm in the dtype of its weights.
    assert parameters["model.layers.0.linear_attn.norm.weight"].dtype is None
    assert parameters["model.layers.0.linear_attn.A_log"].dtype == "float32"


# --- planted faults


def weights(shape: ModelShape) -> dict[str, Tensor]:
    return random_weights(shape, float32_ends=("linear_attn.norm.weight",))


def stack_experts(hf: Mapping[str, Tensor], layer: int = 0) -> tuple[Tensor, Tensor]:
    """Return the tensors of all experts of a layer, in the form of files and SGLang."""
    prefix = LAYER.format(layer) + "mlp.experts."
    ups = [
        torch.cat([hf[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")])
        for expert in range(4)
    ]
    downs = [hf[f"{prefix}{expert}.down_proj.weight"] for expert in range(4)]
    return torch.stack(ups), torch.stack(downs)


def engine_tensors(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of layer 0, a delta net, and the embedding, as SGLang's loader builds them in bfloat16."""
    source = LAYER.format(0)
    delta = source + "linear_attn."
    found = {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": torch.cat(
            [hf[f"{delta}in_proj_{part}.weight"] for part in ("qkv", "z")]
        ),
        "model.layers.0.linear_attn.in_proj_ba.weight": torch.cat(
            [hf[f"{delta}in_proj_{part}.weight"] for part in "ba"]
        ),
        "model.layers.0.linear_attn.A_log": hf[f"{delta}A_log"].float(),
        "model.layers.0.linear_attn.norm.weight": hf[f"{delta}norm.weight"].bfloat16(),
        "model.embed_tokens.weight": hf["model.language_model.embed_tokens.weight"],
        "model.layers.0.input_layernorm.gemma_weight": hf[f"{source}input_layernorm.weight"] + 1,
    }
    w13, w2 = stack_experts(hf)
    found["model.layers.0.mlp.experts.w13_weight"] = w13
    found["model.layers.0.mlp.experts.w2_weight"] = w2
    return found


def with_earlier_gate(held: Tensor, hf: Mapping[str, Tensor]) -> Tensor:
    """Keep earlier values, here zeros, in the rows of the gate."""
    rows = len(hf[LAYER.format(0) + "linear_attn.in_proj_z.weight"])
    return torch.cat([held[:-rows], torch.zeros_like(held[-rows:])])


EXPERTS = "model.layers.0.mlp.experts."
DELTA = "model.layers.0.linear_attn."
FAULTS: dict[str, Fault] = {
    "halves of the packed tensor swapped": (
        f"{EXPERTS}w13_weight", lambda held, hf: torch.cat(held.chunk(2, 1)[::-1], 1),
    ),
    "another expert": (f"{EXPERTS}w2_weight", lambda held, hf: held[[0, 2, 1, 3]]),
    "an expert of another layer": (
        f"{EXPERTS}w13_weight", lambda held, hf: torch.cat([held[:3], stack_experts(hf, 1)[0][3:]]),
    ),
    "a norm without its 1": (
        "model.layers.0.input_layernorm.gemma_weight",
        lambda held, hf: hf[LAYER.format(0) + "input_layernorm.weight"],
    ),
    "two numbers of a head swapped": (
        f"{DELTA}in_proj_ba.weight", lambda held, hf: torch.cat(held.chunk(2)[::-1]),
    ),
    "the gate of the update before": (f"{DELTA}in_proj_qkvz.weight", with_earlier_gate),
}  # fmt: skip


def test_the_checksums_are_those_of_what_sglang_builds() -> None:
    hf = weights(tiny_shape(PUBLISHED))
    assert mismatched_tensors(tiny_shape(PUBLISHED), hf, engine_tensors(hf)) == []
    (digests,) = expected_digests(tiny_shape(PUBLISHED), hf)
    assert not [name for name in digests if "language_model" in name or ".self_attn." in name]


@pytest.mark.parametrize(("name", "change"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(name: str, change: Any) -> None:
    hf = weights(tiny_shape(PUBLISHED))
    engine = engine_tensors(hf)
    engine[name] = change(engine[name], hf)
    assert mismatched_tensors(tiny_shape(PUBLISHED), hf, engine) == [name]
