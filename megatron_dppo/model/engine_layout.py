"""What each rank of an SGLang engine holds: its fused parameters, as blocks of Hugging Face tensors.

The families' tables, with SGLang's names and cuts (``Rule.in_engine``). The resharding proof reads it, and so do the
checksums that a weight update compares with the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import LocalParameter, segments_of, shard_of
from megatron_dppo.model.rules import Rule
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import replicated


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


def engine_parameters(shape: ModelShape, engine: EngineLayout, rank: int) -> list[LocalParameter]:
    """All parameters of engine ``rank``. Names are SGLang's; a local expert's slice is ``...w13_weight[i]``.

    ``is_primary`` marks the ranks that hold the first copy of what several hold. Raises LayoutError.
    """
    check_engine_layout(shape, engine)
    return list(_parameters(shape, engine, rank))


def keeps_untied_output(shape: ModelShape) -> bool:
    """Whether the engine holds a tied model's embedding a second time, as its output matrix."""
    return shape.tied_embeddings and family_of(shape).engine_keeps_output


def engine_inputs(shape: ModelShape, hf_name: str) -> list[str]:
    """Names under which the engine must be sent ``hf_name``'s tensor."""
    embedding, output = family_of(shape).vocabulary_tensors
    is_twice = hf_name == embedding and keeps_untied_output(shape)
    return [embedding, output] if is_twice else [hf_name]


def _parameters(shape: ModelShape, engine: EngineLayout, rank: int) -> Iterator[LocalParameter]:
    family = family_of(shape)
    ep_rank, etp_rank = divmod(rank, engine.expert_tensor)
    experts_here = shape.num_experts // engine.expert

    def made(rule: Rule, layer: int = 0) -> LocalParameter:
        return _parameter(rule, shape, (rank, engine.tensor), layer, 0, 0)

    yield made(family.embedding)
    for layer in range(shape.num_layers):
        for rule in family.layer:
            yield made(rule, layer)
        for local in range(experts_here):
            for rule in family.expert:
                expert = ep_rank * experts_here + local
                part = (etp_rank, engine.expert_tensor)
                yield _parameter(rule, shape, part, layer, expert, local)
    yield made(family.final_norm)
    if not shape.tied_embeddings:
        yield made(family.output)
    elif keeps_untied_output(shape):
        yield made(
            replace(family.output, sources=family.embedding.sources, engine=family.output.in_engine)
        )


def _parameter(
    rule: Rule, shape: ModelShape, part: tuple[int, int], layer: int, expert: int, local_expert: int
) -> LocalParameter:
    rank, size = part
    row = rule.in_engine
    shard = shard_of(row.split, rule.sources, shape, rank, size)
    names = [source.name.format(layer=layer, expert=expert) for source in rule.sources]
    return LocalParameter(
        chunk=0,
        name=row.name.format(layer=layer, expert=local_expert),
        shape=shard.shape,
        segments=segments_of(shard, names),
        is_primary=row.split is not replicated or rank == 0,
    )
