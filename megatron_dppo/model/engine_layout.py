"""The parallel layout of an engine, and its validation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.shape import ModelShape


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of an SGLang server: ``--tp-size`` and ``--ep-size``. Experts' tensor parallelism is tensor / expert."""

    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.expert < 1 or self.tensor % self.expert:
            raise LayoutError(
                f"engine: tensor {self.tensor} is not a positive multiple of expert {self.expert}"
            )

    @property
    def expert_tensor(self) -> int:
        """Ranks that share one expert."""
        return self.tensor // self.expert

    def describe(self) -> str:
        """Short text, as ``TP8 EP4``."""
        return f"TP{self.tensor} EP{self.expert}"


def check_engine_sizes(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError if the sizes of ``engine`` do not divide those of ``shape``."""
    heads, groups, tensor = shape.num_attention_heads, shape.num_query_groups, engine.tensor
    checks = [
        (heads % tensor == 0, f"{heads} attention heads into tensor {tensor}"),
        (groups % tensor == 0 or tensor % groups == 0, f"{groups} key/value heads into tensor {tensor}"),
    ]  # fmt: skip
    if shape.delta is not None:
        key_heads = shape.delta.key_heads
        checks.append(
            (key_heads % tensor == 0, f"{key_heads} key heads of delta nets into tensor {tensor}")
        )
    if shape.is_moe:
        experts, width = shape.num_experts, shape.moe_ffn_hidden_size
        checks += [
            (experts % engine.expert == 0, f"{experts} experts into expert {engine.expert}"),
            (width % engine.expert_tensor == 0, f"expert width {width} into {engine.expert_tensor} ranks"),
            (
                shape.shared_ffn_hidden_size % tensor == 0,
                f"shared expert's width {shape.shared_ffn_hidden_size} into tensor {tensor}",
            ),
        ]  # fmt: skip
    else:
        checks.append((engine.expert == 1, f"a dense model into expert {engine.expert}"))
    if len(shape.moe_layers) < shape.num_layers:
        width = shape.ffn_hidden_size
        checks.append((width % tensor == 0, f"MLP width {width} into tensor {tensor}"))
    uneven = [text for divides, text in checks if not divides]
    if uneven:
        raise LayoutError(f"the engine's layout does not divide the model: {'; '.join(uneven)}")
