"""Count a rank's memory that grows with a micro-batch: activations of layers and head, and working memory of passes.

Activations are the bytes per token that a layer's kernels keep for the backward pass: Transformer Engine's kernels on
GPUs, torch's on CPUs. Legend: h = hidden size, q = query size, kv = key (or value) size, f = MLP size, k = experts of
a token, E = experts, b = bytes of an activation; all sizes are those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.cluster.planner.facts import TrainerFacts
from megatron_dppo.cluster.planner.head_memory import head_bytes, logits_bytes
from megatron_dppo.cluster.planner.schedules import chunks_in_flight
from megatron_dppo.model.adapters import AdaptedLinear, adapted_linears
from megatron_dppo.model.families import has_layer_parameter
from megatron_dppo.model.layout import layers_of_stage

_FLOAT = 4
_INDEX = 8


@dataclass(frozen=True)
class LocalSizes:
    """The sizes of a layer on one rank.

    ``rows``: share of a micro-batch's tokens whose hidden states the rank holds (1 / TP with sequence parallelism).
    ``assignments``: (token, expert) pairs on the rank for each token of the micro-batch, with balanced experts.
    """

    hidden: int
    query: float
    kv: float
    heads: float
    ffn: float
    expert_ffn: float
    shared_ffn: float
    gates_shared_expert: bool
    head_dim: int
    qk_norm: bool
    norms_all_heads: bool
    rows: float
    assignments: float
    experts: int
    experts_per_token: int
    item: int

    @classmethod
    def of(cls, trainer: TrainerFacts, qk_norm: bool) -> LocalSizes:
        """Return the sizes on a rank of ``trainer``.

        With expert tensor parallelism, a rank computes its slice of an expert for the tokens of its whole group.
        """
        shape = trainer.shape
        layout = trainer.layout
        sizes = shape.sizes()
        tensor = layout.tensor
        rows = 1 / tensor if trainer.sequence_parallel else 1.0
        return cls(
            hidden=shape.hidden_size,
            query=sizes["query"] / tensor,
            kv=sizes["kv"] / tensor,
            heads=shape.num_attention_heads / tensor,
            ffn=shape.ffn_hidden_size / tensor,
            expert_ffn=shape.moe_ffn_hidden_size / layout.expert_tensor,
            shared_ffn=shape.shared_ffn_hidden_size / tensor,
            gates_shared_expert=shape.gates_shared_expert,
            head_dim=shape.head_dim,
            qk_norm=qk_norm,
            norms_all_heads=shape.norms_all_heads,
            rows=rows,
            assignments=shape.experts_per_token * rows * layout.expert_tensor,
            experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            item=trainer.item_bytes,
        )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer keeps for each token of a micro-batch.

    ``input``: the bytes that full recomputation keeps. ``projections``: the bytes of the query and key norms, of the
    rotary embedding (torch) and of the attention output. ``core``: the bytes of the core attention's other tensors.
    ``recomputed``: the part of the sum that selective recomputation drops.
    """

    input: float
    norms: float
    projections: float
    core: float
    mlp: float
    router: float
    recomputed: float

    def kept(self, recompute: str) -> float:
        """Return the bytes per token between forward and backward under ``training.recompute`` = ``recompute``."""
        if recompute == "full":
            return self.input
        total = self.norms + self.projections + self.core + self.mlp + self.router
        return total - (self.recomputed if recompute == "selective" else 0)

    @property
    def whole(self) -> float:
        """Bytes per token without recomputation."""
        return self.kept("none")


def transformer_engine(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Return the bytes of a layer of ``get_gpt_decoder_block_spec`` with Transformer Engine.

    The formulas are derived from the use of Transformer Engine in megatron-core 0.16.1, not measured.

    - A norm that is fused into a linear, and the norm before the router, keep their input and output, b each, and 4
      bytes.
    - Attention keeps queries and keys before their norms (where the family has these) and after the rotary embedding,
      and values: b each.
    - Flash attention keeps its output (which the projection shares) and a fp32 log-sum-exp for each head.
    - SwiGLU keeps its fused input, 2f, and the second linear keeps its input, f; experts also keep their permuted
      input, h.
    - Selective recomputation drops the experts' f and the output of the norm before the router in an MoE model
      (``moe_act``, ``layernorm``), and the log-sum-exp in a dense model (``core_attn``).
    """
    norm = (2 * s.hidden * s.item + _FLOAT) * s.rows
    attention_inputs = (s.query + 2 * s.kv) * s.item
    norm_scales = 1 if s.norms_all_heads else s.heads
    qk_norm = 0.0
    if s.qk_norm:
        qk_norm = (s.query + s.kv) * s.item + 2 * _FLOAT * norm_scales
    output = s.query * s.item
    mlp = 3 * s.ffn * s.item
    recomputed = _FLOAT * s.heads
    if is_moe:
        recomputed = s.assignments * s.expert_ffn * s.item + s.hidden * s.item * s.rows
        mlp = s.assignments * ((s.hidden + 3 * s.expert_ffn) * s.item + _FLOAT)
        mlp += 3 * s.shared_ffn * s.item + _gate(s)
    return LayerBytes(
        input=s.hidden * s.rows * s.item,
        norms=2 * norm,
        projections=qk_norm + output,
        core=attention_inputs + _FLOAT * s.heads,
        mlp=mlp,
        router=_router(s, row_id_map=_FLOAT * (2 * s.experts + 1)) if is_moe else 0.0,
        recomputed=recomputed,
    )


def torch_modules(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Return the bytes of a layer of ``trainer/cpu``, measured by ``tests/distributed/test_planner_memory.py``.

    - ``rms_norm`` keeps two fp32 tensors of its size and one fp32 number for each row; the next module keeps the
      output, b.
    - The rotary embedding keeps a cosine and a sine for queries and for keys: 4 head sizes, b.
    - scaled_dot_product_attention keeps padded queries, keys, values and output, b each, a fp32 log-sum-exp for each
      head, and three int64 rows of indices. Selective recomputation instead keeps queries, keys and the fused
      projection.
    - SwiGLU keeps 2f (the fused input) + 2f (activation, linear part) + f (product); with routing weights another f.
    """
    norm = (s.hidden * (2 * _FLOAT + s.item) + _FLOAT) * s.rows
    qk_size = s.query + s.kv
    fused_projection = (s.query + 2 * s.kv) * s.item
    qk_norm = 0.0
    if s.norms_all_heads:
        # The inputs are views, which keep the whole fused projection.
        qk_norm = fused_projection + 2 * _FLOAT
    elif s.qk_norm:
        qk_norm = qk_size * 2 * _FLOAT + qk_size / s.head_dim * _FLOAT
        # In fp32, the norms of queries and keys also keep their inputs, which are views of the fused projection.
        if s.item == _FLOAT:
            qk_norm += qk_size * s.item
    rotary = 4 * s.head_dim * s.item
    core = 2 * (s.query + s.kv) * s.item + _FLOAT * s.heads + 2 * _INDEX
    mlp = 5 * s.ffn * s.item
    if is_moe:
        mlp = s.assignments * ((s.hidden + 6 * s.expert_ffn) * s.item + _FLOAT + _INDEX)
        mlp += 5 * s.shared_ffn * s.item + _gate(s)
    return LayerBytes(
        input=s.hidden * s.rows * s.item,
        norms=2 * norm,
        projections=qk_norm + rotary + s.query * s.item,
        core=core,
        mlp=mlp,
        router=_router(s, row_id_map=0) if is_moe else 0.0,
        recomputed=core - (qk_size * s.item + fused_projection),
    )


def with_delta_net(layer: LayerBytes, trainer: TrainerFacts) -> LayerBytes:
    """Convert ``layer``, the bytes of a layer with attention, to those of a layer with a delta net.

    The formula counts the tensors that ``trainer/delta_net.py`` keeps, and was not measured: the convolution's input,
    sums and selected sums in fp32, and its output; queries and keys before their norms in fp32, and after them for each
    value head; values, output, and the gated norm's input, output and gates, of which one copy is fp32. Selective
    recomputation of attention does not apply.
    """
    delta = trainer.shape.delta
    assert delta is not None
    item = trainer.item_bytes
    key_heads = 2 * delta.value_heads * delta.key_size
    elements = delta.convolved_width + key_heads + 4 * delta.value_width
    floats = 3 * delta.convolved_width + 4 * delta.key_width + delta.value_width
    kept = (elements * item + floats * _FLOAT) / trainer.layout.tensor
    recomputed = layer.recomputed if trainer.transformer_engine else 0.0
    return replace(layer, projections=0.0, core=kept, recomputed=recomputed)


def _gate(s: LocalSizes) -> float:
    """Return the bytes that the gate of a shared expert keeps for each token: its input, the sigmoid of its output."""
    if s.gates_shared_expert:
        return (s.hidden + 2) * s.item * s.rows
    return 0.0


def _router(s: LocalSizes, row_id_map: float) -> float:
    """Return the bytes that a router keeps for each token.

    The router keeps the probabilities (fp32) and the map (1 byte) of all experts, the ids (int64) and probabilities
    (fp32) of the selected experts, and the int32 map of the fused permutation.
    """
    topk_bytes = s.experts_per_token * (_INDEX + _FLOAT)
    return (s.experts * (_FLOAT + 1) + topk_bytes + row_id_map) * s.rows


def with_adapters(
    trained: LayerBytes,
    s: LocalSizes,
    trainer: TrainerFacts,
    number: int = 0,
) -> LayerBytes:
    """Convert ``trained``, the bytes of layer ``number`` with trained weights, to those of a frozen layer with them.

    - A frozen norm of torch keeps one fp32 tensor of its size less. A norm that is fused into an adapted linear is
      computed a second time for the adapter, and this second norm keeps its input in fp32 where the model is bfloat16.
      A frozen norm of Transformer Engine keeps as much as a trained one (assumed), and the second norm keeps its input
      and output.
    - An adapter keeps its inner products, ``rank`` values for each of its matrices. Where several matrices are fused,
      it also keeps A and B as concatenated tensors, once for each micro-batch.
    - An adapter keeps the input that its frozen linear does not keep. For linears without adapters, the formula counts
      that input although nothing keeps it.
    """
    assert trainer.trained is not None
    adapters = trainer.trained.adapters
    layout = trainer.layout
    stages = range(layout.pipeline)
    stage = next(i for i in stages if number in layers_of_stage(trainer.shape, layout, i))
    linears = adapted_linears(adapters, trainer.shape, layout, stage * layout.stage_ranks)
    layer = [linear for linear in linears if linear.layer == number]
    fused_norms = sum(_has_norm(linear) for linear in layer)
    if trainer.transformer_engine:
        norms = fused_norms * (2 * s.hidden * s.item + _FLOAT) * s.rows
        heads = 0.0
    else:
        second_norms = fused_norms if s.item < _FLOAT else 0
        norms = (second_norms - 2) * s.hidden * _FLOAT * s.rows
        has_torch_norms = s.qk_norm and not s.norms_all_heads
        heads = 0.0
        if has_torch_norms:
            heads = -_FLOAT * (s.query + s.kv)
    # Key: whether the adapter belongs to attention.
    adapter_bytes = {True: 0.0, False: 0.0}
    for linear in layer:
        rows = s.assignments if linear.of_experts else 1.0
        products = len(linear.parts) * adapters.rank * s.item * rows
        fused_factors = _laid_out(linear, adapters.rank) * s.item / trainer.rank_tokens
        adapter_bytes[_is_attention(linear)] += products + fused_factors
    return replace(
        trained,
        norms=trained.norms + norms,
        projections=trained.projections + heads + adapter_bytes[True],
        mlp=trained.mlp + adapter_bytes[False],
    )


def _laid_out(linear: AdaptedLinear, rank: int) -> int:
    """Return the elements of the concatenated A and B of a linear in which several matrices are fused."""
    if linear.axis == 1:
        return 0
    width = len(linear.parts) * rank
    return max(1, len(linear.experts)) * width * (linear.rows + linear.parts[0].dims[1])


def _is_attention(linear: AdaptedLinear) -> bool:
    return ".self_attention." in linear.path


def _has_norm(linear: AdaptedLinear) -> bool:
    """Return whether the linear is fused with the norm before it: column-parallel linears, except those of experts and
    the queries of latent attention, whose norm the latent shares."""
    is_shared_expert = ".shared_experts." in linear.path
    is_fused_column = linear.axis == 0 and not linear.is_whole
    has_own_norm = not linear.path.endswith(".linear_q_proj")
    return is_fused_column and has_own_norm and not linear.of_experts and not is_shared_expert


BUSIEST_RANK = 1.25
"""Tokens on the busiest expert-parallel rank over the mean. Assumption: routing is not balanced by a loss here."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations on one rank at the peak of a step.

    ``layers``: tensors of all micro-batches in flight. ``head``: final norm and statistics of one micro-batch;
    ``logits``: logits of one chunk of it. ``recomputed``: all tensors of one layer that full recomputation runs again;
    they and the head do not exist at the same time, so that the larger of the two counts. ``working``: gradients and
    temporaries.
    """

    layers: int
    head: int
    logits: int
    recomputed: int
    working: int

    @property
    def saved(self) -> int:
        """Peak bytes that autograd keeps; the kept chunk of logits is not autograd's."""
        return self.layers + max(self.head, self.recomputed)

    @property
    def total(self) -> int:
        """Peak bytes of all activations, with logits and working memory."""
        return self.layers + max(self.head + self.logits, self.recomputed) + self.working


def layer_bytes(trainer: TrainerFacts, busiest: float = 1.0, number: int = 0) -> LayerBytes:
    """Return the bytes that layer ``number`` keeps for each token of a micro-batch.

    ``busiest``: tokens of the rank's experts / the mean over ranks.
    """
    sizes = LocalSizes.of(
        trainer, has_layer_parameter(trainer.shape, "self_attention.q_layernorm.weight")
    )
    routes = number in trainer.shape.moe_layers
    kernels = torch_modules
    if trainer.transformer_engine:
        kernels = transformer_engine
    layer = kernels(sizes, routes)
    if number in trainer.shape.delta_layers:
        layer = with_delta_net(layer, trainer)
    if trainer.trained is not None:
        layer = with_adapters(layer, sizes, trainer, number)
    if not routes:
        return layer
    return LayerBytes(**{**vars(layer), "mlp": layer.mlp * busiest})


def activation_bytes(
    trainer: TrainerFacts,
    stage: int,
    topk: int = 0,
    busiest: float = BUSIEST_RANK,
) -> ActivationBytes:
    """Return the bytes of activations on each rank of ``stage``, for micro-batches of ``trainer.tokens`` tokens.

    layers = chunks in flight x layers of a chunk x tokens / CP x bytes that a layer keeps under the recompute setting.
    Layers that route and dense layers are counted apart, as are layers with delta nets and with attention; a stage's
    chunks are assumed to have equal parts of each kind.
    Full recomputation runs each layer's forward again before its backward (``uniform``, one layer), so that all tensors
    of one layer exist in addition to the kept inputs. The working memory holds the gradients with respect to the widest
    tensors of a layer's backward pass: the input and the fused product of the experts (or of the MLP).
    """
    shape = trainer.shape
    # Key: whether a layer routes, and whether it has a delta net.
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for number in layers_of_stage(shape, trainer.layout, stage):
        kind = number in shape.moe_layers, number in shape.delta_layers
        kinds.setdefault(kind, []).append(number)
    in_flight = chunks_in_flight(trainer.layout, stage, trainer.micro_batches)
    layer_tensors = whole_layer = working = 0.0
    for (routes, _), numbers in kinds.items():
        layer = layer_bytes(trainer, busiest, numbers[0])
        layers = len(numbers) / trainer.layout.chunks
        layer_tensors += in_flight * layers * trainer.rank_tokens * layer.kept(trainer.recompute)
        whole_layer = max(whole_layer, layer.whole)
        working = max(working, _working(trainer, busiest, routes=routes))
    is_last = stage == trainer.layout.pipeline - 1
    return ActivationBytes(
        layers=round(layer_tensors),
        head=head_bytes(trainer, topk) if is_last else 0,
        logits=logits_bytes(trainer) if is_last else 0,
        recomputed=round(trainer.rank_tokens * whole_layer) if trainer.recompute == "full" else 0,
        working=round(trainer.rank_tokens * working),
    )


def _exchanged(trainer: TrainerFacts, sizes: LocalSizes) -> float:
    """Return the elements that context parallelism exchanges for each of a rank's own tokens.

    A ring (``AttnFuncWithCPAndKVP2P`` of Transformer Engine 2.11) holds the keys and values of all C ranks. It also
    holds an output for each of its C steps until it adds them up; the outputs after the first have half of the tokens.
    An all-to-all holds the tensors that it sends and those that it receives.
    """
    ranks = trainer.layout.context
    if ranks == 1:
        return 0.0
    if trainer.exchange == "a2a":
        return 2 * (sizes.query + 2 * sizes.kv)
    return 2 * sizes.kv * ranks + sizes.query * (ranks + 1) / 2


def _working(trainer: TrainerFacts, busiest: float, *, routes: bool) -> float:
    """Return the bytes of working memory for each token of a context-parallel rank.

    The working memory holds the gradients of the widest layer (for experts: 2h + 2f for each (token, expert) pair),
    those of the hidden states that tensor-parallel ranks gather (2h), and the tensors that attention exchanges between
    context-parallel ranks. ``routes``: whether the layer's MLP is a mixture of experts.
    """
    sizes = LocalSizes.of(trainer, False)
    gathered_elements = 2 * sizes.hidden + _exchanged(trainer, sizes)
    gradients = 2 * sizes.ffn
    if routes:
        gradients = sizes.assignments * busiest * (2 * sizes.hidden + 2 * sizes.expert_ffn)
    return (gathered_elements + gradients) * sizes.item
