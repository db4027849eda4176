"""Memory of a rank that grows with a micro-batch: what layers and head keep for backward, and what passes work in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.cluster.planner.facts import TrainerFacts
from megatron_dppo.model.adapters import AdaptedLinear, adapted_linears
from megatron_dppo.model.families import family_of
from megatron_dppo.model.layout import Layout, padded_vocab_size

# What the layers' kernels keep for the backward pass, per token: Transformer Engine's on GPUs,
# torch's on CPUs.
# Legend: h = hidden size, q = query size, kv = key (or value) size, f = MLP size, k = experts of
# a token, E = experts, b = bytes of an activation; all of this rank.

_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True)
class LocalSizes:
    """Sizes on one rank. ``rows``: share of a micro-batch's tokens in which the rank holds hidden states (1 / TP with
    sequence parallelism). ``assignments``: (token, expert) pairs on the rank for each token of the micro-batch, when
    all experts are asked alike."""

    hidden: int
    query: float
    kv: float
    heads: float
    ffn: float
    expert_ffn: float
    head_dim: int
    qk_norm: bool
    rows: float
    assignments: float
    experts: int
    experts_per_token: int
    item: int

    @classmethod
    def of(cls, trainer: TrainerFacts, qk_norm: bool) -> LocalSizes:
        """Of a rank of ``facts``. With expert tensor parallelism a rank computes a slice for the tokens of its whole
        group."""
        shape, layout = trainer.shape, trainer.layout
        sizes, tensor = shape.sizes(), layout.tensor
        rows = 1 / tensor if trainer.sequence_parallel else 1.0
        return cls(
            hidden=shape.hidden_size,
            query=sizes["query"] / tensor,
            kv=sizes["kv"] / tensor,
            heads=shape.num_attention_heads / tensor,
            ffn=shape.ffn_hidden_size / tensor,
            expert_ffn=shape.moe_ffn_hidden_size / layout.expert_tensor,
            head_dim=shape.head_dim,
            qk_norm=qk_norm,
            rows=rows,
            assignments=shape.experts_per_token * rows * layout.expert_tensor,
            experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            item=trainer.item_bytes,
        )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a micro-batch that one layer keeps. ``input``: what full recomputation keeps of the layer.
    ``core``: what the core attention keeps beside its inputs and output. ``recomputed``: what selective recomputation
    drops of everything."""

    input: float
    norms: float
    projections: float
    core: float
    mlp: float
    router: float
    recomputed: float

    def kept(self, recompute: str) -> float:
        """Bytes per token between forward and backward under a setting of ``training.recompute``."""
        if recompute == "full":
            return self.input
        everything = self.norms + self.projections + self.core + self.mlp + self.router
        return everything - (self.recomputed if recompute == "selective" else 0)

    @property
    def whole(self) -> float:
        """Bytes per token without recomputation."""
        return self.kept("none")


def transformer_engine(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Layers of ``get_gpt_decoder_block_spec`` with Transformer Engine (derived from megatron-core 0.16.1's use of it,
    not measured).

    - Norms fused into linears, and the one before the router, keep input and output of the norm, b each, and 4 bytes.
    - Queries and keys before their norms (where the family has them) and after the rotary embedding, values: b each.
    - Flash attention: its output (which the projection shares) and a fp32 log-sum-exp a head.
    - SwiGLU keeps its fused input, 2f, and the second linear its input, f; experts also their permuted input, h.
    - Selective recomputation drops of a mixture the experts' f and the output of the norm before the router
      (``moe_act``, ``layernorm``), of a dense model the log-sum-exp (``core_attn``).
    """
    norm = (2 * s.hidden * s.item + _FLOAT) * s.rows
    rotated = (s.query + 2 * s.kv) * s.item
    raw = ((s.query + s.kv) * s.item + 2 * _FLOAT * s.heads) if s.qk_norm else 0.0
    output = s.query * s.item
    mlp, recomputed = 3 * s.ffn * s.item, _FLOAT * s.heads
    if is_moe:
        recomputed = s.assignments * s.expert_ffn * s.item + s.hidden * s.item * s.rows
        mlp = s.assignments * ((s.hidden + 3 * s.expert_ffn) * s.item + _FLOAT)
    return LayerBytes(
        input=s.hidden * s.rows * s.item,
        norms=2 * norm,
        projections=raw + output,
        core=rotated + _FLOAT * s.heads,
        mlp=mlp,
        router=_router(s, row_id_map=_FLOAT * (2 * s.experts + 1)) if is_moe else 0.0,
        recomputed=recomputed,
    )


def torch_modules(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Layers of ``trainer/cpu``, measured by ``tests/distributed/test_planner_memory.py``.

    - ``rms_norm`` keeps two fp32 tensors of its size and a fp32 number a row; its consumer keeps the output, b.
    - The rotary embedding keeps a cosine and a sine for queries and for keys: 4 head sizes, b.
    - scaled_dot_product_attention keeps padded queries, keys, values and output, b, a fp32 log-sum-exp a head, and
      three int64 rows of indices; selective recomputation keeps queries, keys and the fused projection instead.
    - SwiGLU keeps 2f (the fused input) + 2f (activation, linear part) + f (product); with routing weights another f.
    """
    norm = (s.hidden * (2 * _FLOAT + s.item) + _FLOAT) * s.rows
    heads = s.query + s.kv
    qk_norm = heads * 2 * _FLOAT + heads / s.head_dim * _FLOAT if s.qk_norm else 0.0
    fused = (s.query + 2 * s.kv) * s.item
    # The keys' norm keeps its input itself, a view of the fused projection.
    if s.item == _FLOAT:
        qk_norm += (s.query + s.kv) * s.item if s.qk_norm else 0.0
    rotary = 4 * s.head_dim * s.item
    core = 2 * (s.query + s.kv) * s.item + _FLOAT * s.heads + 2 * _INDEX
    mlp = 5 * s.ffn * s.item
    if is_moe:
        mlp = s.assignments * ((s.hidden + 6 * s.expert_ffn) * s.item + _FLOAT + _INDEX)
    return LayerBytes(
        input=s.hidden * s.rows * s.item,
        norms=2 * norm,
        projections=qk_norm + rotary + s.query * s.item,
        core=core,
        mlp=mlp,
        router=_router(s, row_id_map=0) if is_moe else 0.0,
        recomputed=core - (heads * s.item + fused),
    )


def _router(s: LocalSizes, row_id_map: float) -> float:
    """Probabilities (fp32) and map (1 byte) of all experts, of the chosen ones id (int64) and probability (fp32), and
    the fused permutation's int32 map."""
    chosen = s.experts_per_token * (_INDEX + _FLOAT)
    return (s.experts * (_FLOAT + 1) + chosen + row_id_map) * s.rows


# What frozen layers with adapters keep for the backward pass, beside or instead of what trained
# layers keep.


def with_adapters(trained: LayerBytes, s: LocalSizes, trainer: TrainerFacts) -> LayerBytes:
    """``trained``, of a layer whose weights are trained, as it is with adapters on frozen ones.

    - A frozen norm of torch's keeps one fp32 tensor of its size less. A norm that is fused into an adapted linear is
      computed a second time for the adapter, which keeps its input in fp32 where it is bfloat16; Transformer Engine
      keeps of a frozen one what it keeps of a trained one (assumed), and the second one's input and output.
    - An adapter keeps its inner products, rank for each of its matrices, and, where several are fused, A and B as it
      has laid them together: once for a micro-batch.
    - The input that a frozen linear doesn't keep, its adapter does; of linears without adapters this counts too much.
    """
    assert trainer.trained is not None
    adapters = trainer.trained.adapters
    linears = adapted_linears(adapters, trainer.shape, trainer.layout, 0)
    layer = [linear for linear in linears if linear.layer == 0]
    fused = sum(_has_norm(linear) for linear in layer)
    if trainer.transformer_engine:
        norms = fused * (2 * s.hidden * s.item + _FLOAT) * s.rows
        heads = 0.0
    else:
        again = fused if s.item < _FLOAT else 0
        norms = (again - 2) * s.hidden * _FLOAT * s.rows
        heads = -_FLOAT * (s.query + s.kv) if s.qk_norm else 0.0
    inner = {True: 0.0, False: 0.0}
    for linear in layer:
        rows = s.assignments if linear.of_experts else 1.0
        products = len(linear.parts) * adapters.rank * s.item * rows
        laid_out = _laid_out(linear, adapters.rank) * s.item / trainer.rank_tokens
        inner[_is_attention(linear)] += products + laid_out
    return replace(
        trained,
        norms=trained.norms + norms,
        projections=trained.projections + heads + inner[True],
        mlp=trained.mlp + inner[False],
    )


def _laid_out(linear: AdaptedLinear, rank: int) -> int:
    """Elements of A and B of a linear in which several matrices are fused."""
    if linear.axis == 1:
        return 0
    width = len(linear.parts) * rank
    return max(1, len(linear.experts)) * width * (linear.rows + linear.parts[0].dims[1])


def _is_attention(linear: AdaptedLinear) -> bool:
    return ".self_attention." in linear.path


def _has_norm(linear: AdaptedLinear) -> bool:
    """Whether the norm before it is part of the linear: column-parallel ones but the experts'."""
    return linear.axis == 0 and not linear.of_experts


# Megatron-Core's pipeline schedules: how many micro-batches a stage holds at once, and how long
# stages idle.


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Forward passes of a model chunk whose backward pass has not run yet, at most, on ``stage``.

    One more than the warm-up of ``get_pp_rank_microbatches`` (pipeline_parallel/schedules.py): P - p - 1 for 1F1B,
    2 (P - p - 1) + (v - 1) P for v interleaved chunks; never more than there are.
    """
    stages, chunks = layout.pipeline, layout.chunks
    if stages == 1:
        return 1
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * stages
    return min(warmup + 1, micro_batches * chunks)


def bubble(layout: Layout, micro_batches: int) -> float:
    """Idle over busy time of a pipeline: (P - 1) / (v M) (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return (layout.pipeline - 1) / (layout.chunks * micro_batches)


# Memory of the last stage's head: final norm, a chunk of logits, statistics of the policy.

_STATISTICS = 8 + 8 + 8 + 8 + 6 * 4
"""Bytes per token beside logits: log-sum-exp fp64, place, target id and its column int64, and fp32 rows (log pi, mu,
advantage, loss, mask, gradient)."""
_TOPK = 8 + 8 + 4 + 4 + 8 + 4 + 4
"""Bytes per token and Top-K id: ids and columns int64, owned and reduced logits fp32, log pi fp64 and fp32, mu."""


def logits_bytes(trainer: TrainerFacts) -> int:
    """Logits of one chunk of a micro-batch: tokens / CP x padded vocabulary / TP.

    ``vocab_parallel/head.py`` keeps one chunk's from the forward to the backward pass, and writes those of the others
    and all gradients over them; the kernels hold rows in registers. Of fp32 logits the products of the backward pass
    take a copy in the model's type.
    """
    tensor = trainer.layout.tensor
    columns = padded_vocab_size(trainer.shape.vocab_size, tensor) // tensor
    copied = trainer.item_bytes if trainer.logit_bytes > trainer.item_bytes else 0
    return min(trainer.rank_tokens, trainer.chunk_tokens) * columns * (trainer.logit_bytes + copied)


def statistics_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Statistics, and the packed row that tensor-parallel ranks reduce: 3 fp32 a rank (``vocab_parallel/wire.py``).
    Context-parallel ranks compute those of their own tokens and gather them: all have the loss of all tokens."""
    slots = 12 * trainer.layout.tensor if trainer.layout.tensor > 1 else 0
    return trainer.tokens * (_STATISTICS + slots + _TOPK * (topk + 1 if topk else 0))


def head_bytes(trainer: TrainerFacts, topk: int) -> int:
    """What the last stage keeps of one micro-batch between the last layer and its backward pass, beside logits.

    Final norm as layers count norms; with sequence parallelism its output is gathered, tokens x hidden.
    """
    hidden = trainer.shape.hidden_size
    rows = 1 / trainer.layout.tensor if trainer.sequence_parallel else 1.0
    norm_bytes = 2 * trainer.item_bytes if trainer.transformer_engine else 8 + trainer.item_bytes
    norm = trainer.rank_tokens * rows * (hidden * norm_bytes + 4)
    gathered = trainer.rank_tokens * hidden * trainer.item_bytes if trainer.sequence_parallel else 0
    return round(norm) + gathered + statistics_bytes(trainer, topk)


BUSIEST_RANK = 1.25
"""Tokens on the busiest expert-parallel rank over the mean. Assumption: routing is not balanced by a loss here."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one rank at the worst moment of a step.

    ``layers``: tensors of all micro-batches in flight. ``head``: final norm and statistics of one micro-batch,
    ``logits``: of one chunk of it. ``recomputed``: one layer in whole, beside what full recomputation kept; it never
    meets the head, so the larger of the two counts. ``working``: gradients and temporaries.
    """

    layers: int
    head: int
    logits: int
    recomputed: int
    working: int

    @property
    def saved(self) -> int:
        """What autograd holds at most; the kept chunk of logits is not its own."""
        return self.layers + max(self.head, self.recomputed)

    @property
    def total(self) -> int:
        """And what passes work in."""
        return self.layers + max(self.head + self.logits, self.recomputed) + self.working


def layer_bytes(trainer: TrainerFacts, busiest: float = 1.0) -> LayerBytes:
    """What one layer keeps per token of a micro-batch; ``busiest``: a rank's experts' tokens over the mean."""
    sizes = LocalSizes.of(
        trainer, family_of(trainer.shape).has_layer_parameter("self_attention.q_layernorm.weight")
    )
    kernels = transformer_engine if trainer.transformer_engine else torch_modules
    layer = kernels(sizes, trainer.shape.is_moe)
    if trainer.trained is not None:
        layer = with_adapters(layer, sizes, trainer)
    if not trainer.shape.is_moe:
        return layer
    return LayerBytes(**{**vars(layer), "mlp": layer.mlp * busiest})


def activation_bytes(
    trainer: TrainerFacts, stage: int, topk: int = 0, busiest: float = BUSIEST_RANK
) -> ActivationBytes:
    """Of each rank of ``stage``, for micro-batches of ``trainer.tokens`` tokens.

    kept = chunks in flight x layers of a chunk x tokens / CP x bytes that a layer keeps under the recompute setting.
    Full recomputation runs each layer's forward again before its backward (``uniform``, one layer), so
    one layer's whole set lives beside the kept inputs. Working memory: gradients with respect to the widest tensors of
    a layer's backward pass, the experts' (or the MLP's) input and fused product.
    """
    layer = layer_bytes(trainer, busiest)
    layers = trainer.shape.num_layers // (trainer.layout.pipeline * trainer.layout.chunks)
    in_flight = chunks_in_flight(trainer.layout, stage, trainer.micro_batches)
    layer_tensors = in_flight * layers * trainer.rank_tokens * layer.kept(trainer.recompute)
    is_last = stage == trainer.layout.pipeline - 1
    return ActivationBytes(
        layers=round(layer_tensors),
        head=head_bytes(trainer, topk) if is_last else 0,
        logits=logits_bytes(trainer) if is_last else 0,
        recomputed=round(trainer.rank_tokens * layer.whole) if trainer.recompute == "full" else 0,
        working=round(trainer.rank_tokens * _working(trainer, busiest)),
    )


def _exchanged(trainer: TrainerFacts, sizes: LocalSizes) -> float:
    """Elements per token of a rank's own. A ring (``AttnFuncWithCPAndKVP2P`` of Transformer Engine 2.11) has the keys
    and values of all C ranks and an output for each of its C steps, of which those after the first are of half the
    tokens, until it adds them up; an all-to-all has what it sends and what it receives."""
    ranks = trainer.layout.context
    if ranks == 1:
        return 0.0
    if trainer.exchange == "a2a":
        return 2 * (sizes.query + 2 * sizes.kv)
    return 2 * sizes.kv * ranks + sizes.query * (ranks + 1) / 2


def _working(trainer: TrainerFacts, busiest: float) -> float:
    """Per token of a context-parallel rank: gradients of the widest layer, h + 2f for each (token, expert) pair, of the
    hidden states gathered over tensor-parallel ranks, and what attention exchanges over context-parallel ones."""
    sizes = LocalSizes.of(trainer, False)
    gathered = 2 * sizes.hidden + _exchanged(trainer, sizes)
    if trainer.shape.is_moe:
        wide = sizes.assignments * busiest * (2 * sizes.hidden + 2 * sizes.expert_ffn)
    else:
        wide = 2 * sizes.ffn
    return (gathered + wide) * sizes.item
