"""The map of parameters against an independent library: mbridge loads a Hugging Face checkpoint into the trainer's own
Megatron modules.

mbridge reads whole tensors, fuses them and scatters them by ranks of Megatron's groups; our map copies segments. Both
must give the same value to every parameter of every rank, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts import sizes_of
from tests.ranks import run_ranks
from tests.small_config import small_config

Case = tuple[str, dict[str, Any], list[str]]
CASES: dict[str, Case] = {
    "qwen3_moe": ("qwen3_moe", {"layers": 4}, ["TP2 ETP2", "TP2 EP2", "EP2", "PP2 VPP2"]),
    "qwen2_moe": ("qwen2_moe", {"layers": 4}, ["TP2 EP2", "PP2"]),
    "qwen3": ("qwen3", {}, ["TP2", "PP2"]),
    "qwen2": ("qwen2", {}, ["TP2", "PP2"]),
    "llama": ("llama", {}, ["TP2", "PP2"]),
    "glm4_moe": ("glm4_moe", {"layers": 4}, ["TP2 EP2", "PP2 VPP2"]),
    "deepseek_v3": ("deepseek_v3", {"layers": 4}, ["TP2 ETP2", "EP2"]),
    "deepseek_v3 with a latent of queries": (
        "deepseek_v3", {"layers": 4, "q_lora_rank": 48}, ["TP2 EP2", "PP2"],
    ),
    # This case is last: mbridge marks a tied model in a table of its class, which affects all later models.
    "qwen2 tied": ("qwen2", {"tied": True}, ["TP2", "PP2"]),
}  # fmt: skip
FOUR_RANKS: dict[str, Case] = {
    "qwen3_moe": ("qwen3_moe", {"layers": 4}, ["TP2 PP2 EP2", "EP4"]),
    "qwen2": ("qwen2", {}, ["TP4"]),
}


def differing_parameters(folder: str, world_size: int, cases: dict[str, Case]) -> list[str]:
    """Return the parameters of this rank that mbridge and the map fill differently, in all ``cases``."""
    from megatron_dppo.trainer.trainer import Trainer  # before megatron: it prepares the platform

    from megatron_dppo.trainer.model import named_parameters  # isort: skip

    wrong = []
    for case, (_, _, layouts) in cases.items():
        for layout in layouts:
            parallel = {"world_size": world_size, **sizes_of(layout)}
            trainer = Trainer.read(
                small_config(Path("unused"), Path(folder, case), parallel=parallel)
            )
            expected = fill_by_map(trainer, f"{folder}/{case}")
            load_by_mbridge(trainer, f"{folder}/{case}")
            for (chunk, name), parameter in named_parameters(trainer.chunks).items():
                if not torch.equal(parameter, expected.pop((chunk, name))):
                    wrong.append(f"{case} {layout}: {name} of chunk {chunk}")
            wrong += [f"{case} {layout}: the model has no {name}" for name in expected]
            trainer.close()
    return wrong


def fill_by_map(trainer: Any, hf: str) -> dict[tuple[int, str], torch.Tensor]:
    """Return every parameter of this rank, filled by the segments of ``local_parameters``."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron_dppo.model.mapping import local_parameters

    original, filled = load_file(f"{hf}/model.safetensors"), {}
    for p in local_parameters(trainer.shape, trainer.layout, dist.get_rank()):
        local = torch.zeros(p.shape)
        for segment in p.segments:
            segment.of_local(local).copy_(segment.of_hf(original[segment.hf_name]))
        filled[(p.chunk, p.name)] = local
    return filled


def load_by_mbridge(trainer: Any, hf: str) -> None:
    """Overwrite the model's parameters, and the biases of its routers, through mbridge."""
    from mbridge import AutoBridge
    from mbridge.core import LLMBridge
    from mbridge.models import DeepseekV3Bridge
    from transformers import AutoConfig

    from megatron_dppo.trainer.model import named_parameters

    # mbridge reads DeepSeek's checkpoints as FP8 ones; those of this test are float32.
    DeepseekV3Bridge._get_safetensor_io = LLMBridge._get_safetensor_io
    DeepseekV3Bridge.TransformerConfigClass = staticmethod(latent_attention_config)
    config = AutoConfig.from_pretrained(hf)
    # mbridge reads keys of transformers 4.
    config.rope_theta = config.rope_parameters["rope_theta"]
    with torch.no_grad():
        for parameter in named_parameters(trainer.chunks).values():
            parameter.fill_(torch.nan)
        bridge = AutoBridge.from_config(config, dtype=torch.float32)
        bridge.load_weights(trainer.chunks, hf)


def latent_attention_config(max_position_embeddings: int, **settings: Any) -> Any:
    """Build Megatron-Core's configuration from the settings of mbridge 0.15. One setting has an earlier name there."""
    from megatron.core.transformer import MLATransformerConfig

    return MLATransformerConfig(
        original_max_position_embeddings=max_position_embeddings, **settings
    )


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES), (4, FOUR_RANKS)])
def test_mbridge_fills_every_rank_as_the_map_does(tmp_path: Path, world_size, cases) -> None:
    from tests.tiny_models import save_tiny_model

    for case, (family, options, _) in cases.items():
        save_tiny_model(tmp_path / case, family, **options)
    worker = "tests.distributed.test_conversion_mbridge:differing_parameters"
    assert run_ranks(worker, world_size, str(tmp_path), world_size, cases) == [[]] * world_size
