"""The parallel layout of an engine, and its validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.shape import ModelShape


def current_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's options, ``table``, with the number of attention replicas as ``attn_dp_size``.

    SGLang's older form of this option, ``enable_dp_attention`` with ``dp_size``, is not accepted in a file of options.
    """
    options = dict(table)
    has_older_form = options.pop("enable_dp_attention", None)
    if has_older_form and options.get("attn_dp_size") in (None, 0, 1):
        options["attn_dp_size"] = options.pop("dp_size", None)
    return options


def attention_replicas(options: Mapping[str, Any]) -> int:
    """Return the number of attention replicas in SGLang's ``options``, in its current or its older form."""
    return int(current_names(options).get("attn_dp_size") or 1)


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of an SGLang server: ``--tp-size``, ``--ep-size`` and ``--attn-dp-size``.

    The experts' tensor parallelism is tensor / expert. An attention replica is a group of neighbouring ranks that
    computes attention for requests of its own: the group divides the attention's weights and the embedding among its
    ranks. Other weights are divided among all ranks.

    ``output_per_replica``: whether each attention replica divides the output matrix among its ranks, as it does
    attention's weights (``--enable-dp-lm-head``); otherwise all ranks divide the output matrix.
    """

    tensor: int = 1
    expert: int = 1
    attention_replicas: int = 1
    output_per_replica: bool = False

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.expert < 1 or self.tensor % self.expert:
            raise LayoutError(
                f"engine: tensor {self.tensor} is not a positive multiple of expert {self.expert}"
            )
        if self.attention_replicas < 1 or self.tensor % self.attention_replicas:
            raise LayoutError(
                f"engine: tensor {self.tensor} is not a positive multiple of the {self.attention_replicas} attention "
                "replicas"
            )

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the layout in SGLang's ``options``, or in a server's ``/server_info``; raises LayoutError."""
        replicas = attention_replicas(options)
        return cls(
            int(options.get("tp_size") or 1),
            int(options.get("ep_size") or 1),
            replicas,
            replicas > 1 and bool(options.get("enable_dp_lm_head")),
        )

    @property
    def expert_tensor(self) -> int:
        """Ranks that share one expert."""
        return self.tensor // self.expert

    @property
    def attention_tensor(self) -> int:
        """Ranks of one attention replica."""
        return self.tensor // self.attention_replicas

    def describe(self) -> str:
        """Return a short text, such as ``TP8 EP4``, or ``TP8 EP4 attention DP2``."""
        text = f"TP{self.tensor} EP{self.expert}"
        if self.attention_replicas > 1:
            text += f" attention DP{self.attention_replicas}"
        return text


def check_engine_sizes(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError if the sizes of ``engine`` do not divide those of ``shape``."""
    heads = shape.num_attention_heads
    groups = shape.num_query_groups
    tensor = engine.tensor
    attention = engine.attention_tensor
    subject = "attention tensor" if engine.attention_replicas > 1 else "tensor"
    checks = [
        (heads % attention == 0, f"{heads} attention heads into {subject} {attention}"),
        (groups % attention == 0 or attention % groups == 0, f"{groups} key/value heads into {subject} {attention}"),
    ]  # fmt: skip
    if shape.delta is not None:
        key_heads = shape.delta.key_heads
        checks.append(
            (
                key_heads % attention == 0,
                f"{key_heads} key heads of delta nets into {subject} {attention}",
            )
        )
    if shape.is_moe:
        experts = shape.num_experts
        width = shape.moe_ffn_hidden_size
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
    failed_checks = [text for is_even, text in checks if not is_even]
    if failed_checks:
        raise LayoutError(
            f"the engine's layout does not divide the model: {'; '.join(failed_checks)}"
        )
