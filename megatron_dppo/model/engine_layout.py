"""What each rank of an SGLang engine holds: its fused parameters, as blocks of Hugging Face tensors.

The same tables and splits as the trainer's, with the rows that SGLang 0.5.23 fuses otherwise: Q, K and V are stacked
(K and V heads repeated where there are fewer of them than ranks), experts are stacked into ``w13_weight`` and
``w2_weight``. Unquantised, with the canonical (Triton or native) layout of experts. The resharding proof reads it, and
so do the checksums that a weight update compares with the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.model import splits
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import LocalParameter, Segment, shard_of
from megatron_dppo.model.rules import Rule
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Block, Dims, Shard

VOCABULARY_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this, or of this times TP where TP does not divide the result."""


UNTIED_FAMILIES = frozenset({"qwen3_moe"})
"""Families whose SGLang model keeps an output matrix of its own whatever ``tie_word_embeddings`` says."""


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


def check_engine_layout(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError where the engine cannot hold ``shape``."""
    groups, tensor = shape.num_query_groups, engine.tensor
    checks = [
        (shape.num_attention_heads % tensor == 0, f"{shape.num_attention_heads} attention heads into tensor {tensor}"),
        (groups % tensor == 0 or tensor % groups == 0, f"{groups} key/value heads into tensor {tensor}"),
    ]  # fmt: skip
    if shape.is_moe:
        width = shape.moe_ffn_hidden_size
        checks += [
            (shape.num_experts % engine.expert == 0, f"{shape.num_experts} experts into expert {engine.expert}"),
            (width % engine.expert_tensor == 0, f"expert width {width} into {engine.expert_tensor} ranks"),
        ]  # fmt: skip
    else:
        checks += [
            (
                shape.ffn_hidden_size % tensor == 0,
                f"MLP width {shape.ffn_hidden_size} into tensor {tensor}",
            ),
            (engine.expert == 1, f"a dense model into expert {engine.expert}"),
        ]
    wrong = [text for divides, text in checks if not divides]
    if wrong:
        raise LayoutError(f"the engine's layout does not divide the model: {'; '.join(wrong)}")


def stacked_heads(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """``[q_r; k_r; v_r]`` by heads; with fewer K/V heads than ranks, neighbours hold the same one."""
    copies = max(1, size // shape.num_query_groups)
    kv_size, kv_rank = size // copies, rank // copies
    blocks, at = [], 0
    for index, dims in enumerate(sources):
        parts, part = (size, rank) if index == 0 else (kv_size, kv_rank)
        length = dims[0] // parts
        blocks.append(Block(index, 0, part * length, at, length))
        at += length
    return Shard((at, *sources[0][1:]), tuple(blocks))


def padded_vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Rows padded as VOCABULARY_PADDING says, then cut."""
    (dims,) = sources
    multiple = VOCABULARY_PADDING
    if -(-dims[0] // multiple) * multiple % size:
        multiple *= size
    rows = -(-dims[0] // multiple) * multiple // size
    start = rank * rows
    length = max(0, min(dims[0] - start, rows))
    blocks = (Block(0, 0, start, 0, length),) if length else ()
    return Shard((rows, *dims[1:]), blocks)


_LAYER = "model.layers.{layer}."
FUSED: dict[str, tuple[str, splits.Split]] = {
    "self_attention.linear_qkv.weight": (_LAYER + "self_attn.qkv_proj.weight", stacked_heads),
    "self_attention.linear_qkv.bias": (_LAYER + "self_attn.qkv_proj.bias", stacked_heads),
    "mlp.linear_fc1.weight": (_LAYER + "mlp.gate_up_proj.weight", splits.column_parallel),
    "mlp.experts.linear_fc1.weight{expert}": (
        _LAYER + "mlp.experts.w13_weight[{expert}]",
        splits.column_parallel,
    ),
    "mlp.experts.linear_fc2.weight{expert}": (
        _LAYER + "mlp.experts.w2_weight[{expert}]",
        splits.row_parallel,
    ),
}
"""Megatron's row (within a layer) -> SGLang's name and cut. Rows not named here keep their Hugging Face name."""


def engine_rule(rule: Rule) -> Rule:
    """SGLang's row for the sources of a family's row; ``megatron`` then holds SGLang's name."""
    fused = FUSED.get(rule.megatron.removeprefix("decoder.layers.{layer}."))
    if fused is not None:
        return Rule(fused[0], fused[1], rule.sources)
    split = padded_vocabulary if rule.split is splits.vocabulary else rule.split
    return Rule(rule.sources[0].name, split, rule.sources)


def engine_parameters(shape: ModelShape, engine: EngineLayout, rank: int) -> list[LocalParameter]:
    """All parameters of engine ``rank``. Names are SGLang's; a local expert's slice is ``...w13_weight[i]``.

    ``is_primary`` marks the ranks that hold the first copy of what several hold. Raises LayoutError.
    """
    check_engine_layout(shape, engine)
    return list(_parameters(shape, engine, rank))


def keeps_untied_output(shape: ModelShape) -> bool:
    """Whether the engine holds a tied model's embedding a second time, as its output matrix."""
    return shape.tied_embeddings and shape.family in UNTIED_FAMILIES


def engine_inputs(shape: ModelShape, hf_name: str) -> list[str]:
    """Names under which the engine must be sent ``hf_name``'s tensor."""
    family = family_of(shape)
    embedding, output = (rule.sources[0].name for rule in (family.embedding, family.output))
    is_twice = hf_name == embedding and keeps_untied_output(shape)
    return [embedding, output] if is_twice else [hf_name]


def _parameters(shape: ModelShape, engine: EngineLayout, rank: int) -> Iterator[LocalParameter]:
    family = family_of(shape)
    ep_rank, etp_rank = divmod(rank, engine.expert_tensor)
    experts_here = shape.num_experts // engine.expert

    def made(rule: Rule, layer: int = 0) -> LocalParameter:
        return _parameter(rule, shape, (rank, engine.tensor), layer, 0, 0)

    yield made(engine_rule(family.embedding))
    for layer in range(shape.num_layers):
        for rule in family.layer:
            yield made(engine_rule(rule), layer)
        for local in range(experts_here):
            for rule in family.expert:
                expert = ep_rank * experts_here + local
                part = (etp_rank, engine.expert_tensor)
                yield _parameter(engine_rule(rule), shape, part, layer, expert, local)
    yield made(engine_rule(family.final_norm))
    if not shape.tied_embeddings:
        yield made(engine_rule(family.output))
    elif keeps_untied_output(shape):
        yield made(Rule(family.output.sources[0].name, padded_vocabulary, family.embedding.sources))


def _parameter(
    rule: Rule, shape: ModelShape, part: tuple[int, int], layer: int, expert: int, local_expert: int
) -> LocalParameter:
    rank, size = part
    shard = shard_of(rule, shape, rank, size)
    names = [source.name.format(layer=layer, expert=expert) for source in rule.sources]
    segments = tuple(
        Segment(names[b.source], b.dim, b.source_start, b.local_start, b.length)
        for b in shard.blocks
    )
    return LocalParameter(
        chunk=0,
        name=rule.megatron.format(layer=layer, expert=local_expert),
        shape=shard.shape,
        segments=segments,
        is_primary=rule.tensor_parallel or rank == 0,
    )
