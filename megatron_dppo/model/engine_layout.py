"""The parallel layout of an engine, and the checks of the layout. The key of a fault is an SGLang option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_dppo.model.families import family_of
from megatron_dppo.model.layout import LayoutFault, raise_faults
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import engine_vocab_size

REPLICAS = "attn_dp_size"
"""SGLang's option for the number of attention replicas."""


def current_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SGLang options of ``table`` with the number of attention replicas as ``attn_dp_size``.

    A table may have this number in SGLang's older form, ``enable_dp_attention`` with ``dp_size``. SGLang rejects the
    older form in a file of options.
    """
    options = dict(table)
    has_older_form = options.pop("enable_dp_attention", None)
    if has_older_form and options.get(REPLICAS) in (None, 0, 1):
        options[REPLICAS] = options.pop("dp_size", None)
    return options


def attention_replicas(options: Mapping[str, Any]) -> int:
    """Return the number of attention replicas in SGLang's ``options``, in its current or its older form."""
    return _size(current_names(options), REPLICAS)


def server_ranks(options: Mapping[str, Any]) -> int:
    """Return the number of ranks of a server in SGLang's ``options``. Each rank has a device of its own.

    Attention replicas and experts are divided among these ranks. A server has no pipeline stages.
    """
    return _size(options, "tp_size")


def _size(options: Mapping[str, Any], name: str) -> int:
    """Return a size in SGLang's ``options``; a size that is absent or empty is 1."""
    return int(options.get(name) or 1)


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of an SGLang server: ``--tp-size``, ``--ep-size`` and ``--attn-dp-size``.

    The experts' tensor parallelism is tensor / expert. An attention replica is a group of neighbouring ranks. Each
    replica computes attention for its own requests, and its ranks divide the weights of attention and the embedding.
    All ranks of the engine divide the other weights.

    ``output_per_replica``: whether the ranks of each attention replica divide the output matrix
    (``--enable-dp-lm-head``). Otherwise all ranks of the engine divide it.
    """

    tensor: int = 1
    expert: int = 1
    attention_replicas: int = 1
    output_per_replica: bool = False

    def __post_init__(self) -> None:
        raise_faults(engine_size_faults(self.tensor, self.expert, self.attention_replicas), "")

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the layout in SGLang's ``options``, or in a server's ``/server_info``; raises LayoutError."""
        replicas = attention_replicas(options)
        return cls(
            server_ranks(options),
            _size(options, "ep_size"),
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
        """Return a short text, for example ``TP8 EP4`` or ``TP8 EP4 attention DP2``."""
        text = f"TP{self.tensor} EP{self.expert}"
        if self.attention_replicas > 1:
            text += f" attention DP{self.attention_replicas}"
        return text


def engine_size_faults(tensor: int, expert: int, replicas: int) -> Iterator[LayoutFault]:
    """Yield the faults of an engine's sizes for any model, with SGLang's option names as keys."""
    if tensor < 1:
        yield LayoutFault("tp_size", tensor, "at least 1")
        return
    for option, size in (("ep_size", expert), (REPLICAS, replicas)):
        if size < 1 or tensor % size:
            yield LayoutFault(option, size, f"a divisor of tp_size {tensor}")


def engine_faults(shape: ModelShape, engine: EngineLayout) -> Iterator[LayoutFault]:
    """Yield the reasons why an engine cannot hold ``shape``, or computes wrong results, with SGLang's option names as
    keys."""
    family = family_of(shape)
    tensor = engine.tensor
    yield from _attention_faults(shape, engine)
    most = family.most_engine_ranks
    if most is not None and tensor > most:
        expectation = (
            f"at most {most}: SGLang's model of the family {shape.family} is wrong on more ranks"
        )
        yield LayoutFault("tp_size", tensor, expectation)
    if engine.attention_replicas > 1 and not family.attention_replicas:
        expectation = (
            f"1: SGLang's model of the family {shape.family} divides attention among all ranks"
        )
        yield LayoutFault(REPLICAS, engine.attention_replicas, expectation)
    if engine.output_per_replica and not family.output_per_replica:
        expectation = f"false: SGLang's model of the family {shape.family} divides its output matrix among all ranks"
        yield LayoutFault("enable_dp_lm_head", "true", expectation)
    elif engine.output_per_replica:
        yield from _output_faults(shape, engine)
    widths: list[tuple[str, int]] = []
    if shape.is_moe:
        yield from _expert_faults(shape, engine)
        widths.append(("shared expert", shape.shared_ffn_hidden_size))
    elif engine.expert > 1:
        yield LayoutFault("ep_size", engine.expert, "1 for a model without experts")
    if len(shape.moe_layers) < shape.num_layers:
        widths.append(("MLP", shape.ffn_hidden_size))
    for part, width in widths:
        if width % tensor:
            expectation = f"a divisor of the width {width} of the model's {part}"
            yield LayoutFault("tp_size", tensor, expectation)


def _output_faults(shape: ModelShape, engine: EngineLayout) -> Iterator[LayoutFault]:
    """Yield the fault of an output matrix that each attention replica divides among several ranks.

    SGLang gathers ``vocab_size / ranks`` logits from each rank, but a rank computes its share of the padded vocabulary.
    """
    rows = engine_vocab_size(shape.vocab_size, engine.attention_tensor)
    if engine.attention_tensor > 1 and rows != shape.vocab_size:
        expectation = (
            f"false: SGLang pads the vocabulary of {shape.vocab_size} tokens to {rows}, and cannot gather the padded "
            "logits of an attention replica"
        )
        yield LayoutFault("enable_dp_lm_head", "true", expectation)


def _attention_faults(shape: ModelShape, engine: EngineLayout) -> Iterator[LayoutFault]:
    """Yield at most one fault. The ranks of an attention replica divide query, key-value and delta-net heads."""
    ranks = engine.attention_tensor
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % ranks:
        expectation = f"a divisor of the model's {heads} attention heads"
    elif groups % ranks and ranks % groups:
        expectation = f"a divisor or a multiple of the model's {groups} key-value heads"
    elif shape.delta is not None and shape.delta.key_heads % ranks:
        expectation = f"a divisor of the model's {shape.delta.key_heads} key heads of delta nets"
    else:
        return
    value = str(engine.tensor)
    if engine.attention_replicas > 1:
        value += f" with {engine.attention_replicas} attention replicas of {ranks} ranks"
        expectation = f"a number of ranks of a replica that is {expectation}"
    yield LayoutFault("tp_size", value, expectation)


def _expert_faults(shape: ModelShape, engine: EngineLayout) -> Iterator[LayoutFault]:
    if shape.num_experts % engine.expert:
        expectation = f"a divisor of the model's {shape.num_experts} experts"
        yield LayoutFault("ep_size", engine.expert, expectation)
    ranks, width = engine.expert_tensor, shape.moe_ffn_hidden_size
    if width % ranks:
        value = f"{engine.tensor} with ep_size {engine.expert}"
        expectation = f"tp_size / ep_size, here {ranks}, to divide the width {width} of an expert"
        yield LayoutFault("tp_size", value, expectation)


def check_engine_layout(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError if an engine with this layout cannot hold ``shape``, or computes wrong results."""
    raise_faults(engine_faults(shape, engine), "")
