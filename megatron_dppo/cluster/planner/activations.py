"""Count a rank's memory that grows with a micro-batch: activations of layers and head, and working memory of passes.

A layer's activations are the tensors that its kernels keep for the backward pass, in bytes per token of a micro-batch:
Transformer Engine's kernels on GPUs, torch's on CPUs. Legend: h = hidden size, f = MLP size on one rank, b = bytes of
an element of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.cluster.planner.facts import TrainerFacts
from megatron_dppo.model.adapters import AdaptedLinear, Adapters, adapted_linears
from megatron_dppo.model.families import has_layer_parameter
from megatron_dppo.model.layout import Layout, layers_of_stage
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import padded_vocab_size

_FLOAT = 4
"""Bytes of an fp32 element."""
_INT32 = 4
"""Bytes of an int32 index."""
_INDEX = 8
"""Bytes of an int64 index."""


@dataclass(frozen=True)
class LocalSizes:
    """The sizes of a layer on one rank.

    Attributes:
        shape: the model.
        hidden: the hidden size.
        query: elements of all query heads.
        kv: elements of all key heads; all value heads have as many.
        heads: number of query heads.
        ffn, expert_ffn, shared_ffn: width of a dense MLP, of an expert and of the shared expert.
        qk_norm: whether queries and keys have norms.
        hidden_share: share of a micro-batch's tokens whose hidden states the rank holds (1 / TP with sequence
            parallelism).
        assignments: (token, expert) pairs on the rank for each token of the micro-batch, with balanced experts.
        item_bytes: bytes of an element of an activation (b).
    """

    shape: ModelShape
    hidden: int
    query: float
    kv: float
    heads: float
    ffn: float
    expert_ffn: float
    shared_ffn: float
    qk_norm: bool
    hidden_share: float
    assignments: float
    item_bytes: int

    @classmethod
    def of(cls, trainer: TrainerFacts) -> LocalSizes:
        """Return the sizes on a rank of ``trainer``.

        A rank sends as many (token, expert) pairs to the other expert-parallel ranks as it receives, so EP does not
        appear in ``assignments``. With expert tensor parallelism, a rank computes its slice of an expert for the tokens
        of its whole expert-tensor-parallel group.
        """
        shape = trainer.shape
        layout = trainer.layout
        sizes = shape.sizes()
        tensor = layout.tensor
        hidden_share = 1 / tensor if trainer.sequence_parallel else 1.0
        return cls(
            shape=shape,
            hidden=shape.hidden_size,
            query=sizes["query"] / tensor,
            kv=sizes["kv"] / tensor,
            heads=shape.num_attention_heads / tensor,
            ffn=shape.ffn_hidden_size / tensor,
            expert_ffn=shape.moe_ffn_hidden_size / layout.expert_tensor,
            shared_ffn=shape.shared_ffn_hidden_size / tensor,
            qk_norm=has_layer_parameter(shape, "self_attention.q_layernorm.weight"),
            hidden_share=hidden_share,
            assignments=shape.experts_per_token * hidden_share * layout.expert_tensor,
            item_bytes=trainer.item_bytes,
        )


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer keeps for each token of a micro-batch.

    Without recomputation, the layer keeps ``norms`` + ``projections`` + ``core`` + ``mlp`` + ``router``.

    Attributes:
        input: the layer's input. Full recomputation keeps nothing else.
        norms: the norms of hidden states.
        projections: the norms of queries and keys, the output of the core attention, and in torch's layers the rotary
            embedding.
        core: the tensors of the core attention without its output.
        mlp: the dense MLP, or the experts.
        router: the router and the permutation of tokens.
        dropped: the part of these bytes that selective recomputation does not keep.
    """

    input: float
    norms: float
    projections: float
    core: float
    mlp: float
    router: float
    dropped: float

    def kept(self, recompute: str) -> float:
        """Return the bytes per token between forward and backward under ``training.recompute`` = ``recompute``."""
        if recompute == "full":
            return self.input
        total = self.norms + self.projections + self.core + self.mlp + self.router
        if recompute == "selective":
            return total - self.dropped
        return total

    @property
    def whole(self) -> float:
        """Bytes per token without recomputation."""
        return self.kept("none")


def transformer_engine(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Return the bytes of a layer of ``get_gpt_decoder_block_spec`` with Transformer Engine.

    The formulas are derived from the use of Transformer Engine in megatron-core 0.16.1, not measured.

    - A norm that is fused into a linear, and the norm before the router, keep their input and output, b each, and the
      inverse RMS of each row, fp32.
    - Attention keeps values, and queries and keys after the rotary embedding: b each.
    - If the family has norms of queries and keys, these norms keep their inputs, b each, and an inverse RMS, fp32, for
      each head (or one for all heads). Keys are counted with as many heads as queries.
    - Flash attention keeps its output and an fp32 log-sum-exp for each head. The output is also the projection's input,
      and counts once.
    - SwiGLU keeps its fused input, 2f, and the second linear keeps its input, f. Experts also keep their permuted
      input, h, and the routing probability of each (token, expert) pair, fp32.
    - The fused permutation of tokens keeps an int32 map, [tokens, 2 x experts + 1].
    - In an MoE model, selective recomputation drops the experts' f and the output of the norm before the router
      (``moe_act``, ``layernorm``). In a dense model, it drops the log-sum-exp (``core_attn``). A dense layer of an MoE
      model is counted like a layer of a dense model.
    """
    h = s.hidden
    b = s.item_bytes
    norm = (2 * h * b + _FLOAT) * s.hidden_share
    attention_inputs = (s.query + 2 * s.kv) * b
    log_sum_exp = _FLOAT * s.heads
    qk_norm = 0.0
    if s.qk_norm:
        norms_per_token = 1 if s.shape.norms_all_heads else s.heads
        qk_norm = (s.query + s.kv) * b + 2 * _FLOAT * norms_per_token
    output = s.query * b
    if is_moe:
        pair_bytes = (h + 3 * s.expert_ffn) * b + _FLOAT
        mlp = s.assignments * pair_bytes + 3 * s.shared_ffn * b + _gate(s)
        router = _router(s) + _INT32 * (2 * s.shape.num_experts + 1) * s.hidden_share
        norm_output = h * b * s.hidden_share
        dropped = s.assignments * s.expert_ffn * b + norm_output
    else:
        mlp = 3 * s.ffn * b
        router = 0.0
        dropped = log_sum_exp
    return LayerBytes(
        input=h * s.hidden_share * b,
        norms=2 * norm,
        projections=qk_norm + output,
        core=attention_inputs + log_sum_exp,
        mlp=mlp,
        router=router,
        dropped=dropped,
    )


def torch_modules(s: LocalSizes, is_moe: bool) -> LayerBytes:
    """Return the bytes of a layer of ``cpu/``, measured by ``tests/distributed/test_planner_memory.py``.

    - ``rms_norm`` keeps two fp32 tensors as large as its input and one fp32 number for each row; the next module keeps
      the output, b.
    - The rotary embedding keeps a cosine and a sine for queries and for keys: 4 head sizes, b.
    - scaled_dot_product_attention keeps padded queries, keys, values and output, b each, and a log-sum-exp for each
      head, fp32. The padding and its removal keep two int64 indices for each token (``padded_batches.py``). Selective
      recomputation drops all of these tensors. It keeps the inputs of attention instead: queries, keys and, for the
      values, the fused projection.
    - SwiGLU keeps 2f (the fused input) + 2f (activation, linear part) + f (product). Experts keep another f, because
      they also multiply by routing weights. Experts also keep their permuted input, h, and for each (token, expert)
      pair the routing probability, fp32, and the token's index, int64.
    """
    h = s.hidden
    b = s.item_bytes
    norm = (h * (2 * _FLOAT + b) + _FLOAT) * s.hidden_share
    qk_size = s.query + s.kv
    qk_bytes = qk_size * b
    fused_projection_bytes = (s.query + 2 * s.kv) * b
    qk_norm = 0.0
    if s.shape.norms_all_heads:
        # The norms' inputs are views, and a view keeps the whole fused projection. Each of the two norms also keeps its
        # scale, fp32.
        qk_norm = fused_projection_bytes + 2 * _FLOAT
    elif s.qk_norm:
        # The norms have one row for each head.
        qk_heads = qk_size / s.shape.head_dim
        qk_norm = qk_size * 2 * _FLOAT + qk_heads * _FLOAT
        # In fp32, the norms of queries and keys also keep their inputs: parts of the fused projection.
        if b == _FLOAT:
            qk_norm += qk_bytes
    rotary = 4 * s.shape.head_dim * b
    # The output is as large as the queries, and the values are as large as the keys.
    padded_bytes = 2 * qk_bytes
    core = padded_bytes + _FLOAT * s.heads + 2 * _INDEX
    if is_moe:
        pair_bytes = (h + 6 * s.expert_ffn) * b + _FLOAT + _INDEX
        mlp = s.assignments * pair_bytes + 5 * s.shared_ffn * b + _gate(s)
        router = _router(s)
    else:
        mlp = 5 * s.ffn * b
        router = 0.0
    return LayerBytes(
        input=h * s.hidden_share * b,
        norms=2 * norm,
        projections=qk_norm + rotary + s.query * b,
        core=core,
        mlp=mlp,
        router=router,
        dropped=core - (qk_bytes + fused_projection_bytes),
    )


def with_delta_net(layer: LayerBytes, trainer: TrainerFacts) -> LayerBytes:
    """Convert ``layer`` from the bytes of a layer with attention to the bytes of a layer with a delta net.

    The formula counts the tensors that ``families/shared/delta_net`` keeps. It was not measured.

    - In fp32: the convolution's input, its output, and this output without the zeros between sequences; queries and
      keys before their norms, each twice; the input of the gated norm.
    - With b bytes: queries, keys and values after the convolution; the normed queries and keys, repeated for each value
      head; the values, the output, the gates and the gated output.
    """
    delta = trainer.shape.delta
    assert delta is not None
    repeated_qk_width = 2 * delta.value_heads * delta.key_size
    elements = delta.convolved_width + repeated_qk_width + 4 * delta.value_width
    floats = 3 * delta.convolved_width + 2 * (2 * delta.key_width) + delta.value_width
    kept = (elements * trainer.item_bytes + floats * _FLOAT) / trainer.layout.tensor
    # Selective recomputation of the core attention does not apply to delta nets. With Transformer Engine,
    # ``layer.dropped`` is the part of the experts: all families with delta nets have experts.
    dropped = layer.dropped if trainer.transformer_engine else 0.0
    return replace(layer, projections=0.0, core=kept, dropped=dropped)


def _gate(s: LocalSizes) -> float:
    """Return the bytes that the gate of a shared expert keeps for each token.

    The gate multiplies the expert's output by the sigmoid of a score. It keeps the output and the sigmoid.
    """
    if s.shape.gates_shared_expert:
        return (s.hidden + 1) * s.item_bytes * s.hidden_share
    return 0.0


def _router(s: LocalSizes) -> float:
    """Return the bytes that a router keeps for each token.

    The router keeps the probabilities (fp32) and the map (1 byte) of all experts, and the ids (int64) and probabilities
    (fp32) of the selected experts.
    """
    topk_bytes = s.shape.experts_per_token * (_INDEX + _FLOAT)
    return (s.shape.num_experts * (_FLOAT + 1) + topk_bytes) * s.hidden_share


def with_adapters(
    trained_layer: LayerBytes, s: LocalSizes, trainer: TrainerFacts, number: int
) -> LayerBytes:
    """Return the bytes of layer ``number`` with frozen weights and adapters.

    ``trained_layer`` has the bytes of the layer with trained weights. The two layers differ in:

    - Frozen norms. A norm of torch keeps one fp32 tensor of its input's size instead of two. A norm of Transformer
      Engine keeps as much as a trained norm (assumed).
    - Second norms. If a norm is fused into an adapted linear, the adapter computes the norm a second time. torch's
      second norm keeps its input in fp32 if the model is bfloat16. Transformer Engine's second norm keeps its input,
      its output and the inverse RMS.
    - Adapters. An adapter keeps A x, ``rank`` values for each of its matrices. Except in row-parallel linears, it also
      keeps A and B as concatenated tensors, once for each micro-batch.

    A frozen linear does not keep its input, but its adapter does, so that the sum does not change. The input of a
    linear without an adapter is counted too, although nothing keeps it.
    """
    assert trainer.trained is not None
    adapters = trainer.trained.adapters
    linears = _linears_of_layer(trainer, adapters, number)
    fused_norms = sum(_has_norm(linear) for linear in linears)
    qk_norm_change = 0.0
    if trainer.transformer_engine:
        norm_change = fused_norms * (2 * s.hidden * s.item_bytes + _FLOAT) * s.hidden_share
    else:
        fp32_tensor = s.hidden * _FLOAT * s.hidden_share
        # A layer has two norms of hidden states.
        norm_change = -2 * fp32_tensor
        if s.item_bytes < _FLOAT:
            norm_change += fused_norms * fp32_tensor
        has_attention = number not in trainer.shape.delta_layers
        has_torch_norms = s.qk_norm and not s.shape.norms_all_heads and has_attention
        if has_torch_norms:
            qk_norm_change = -_FLOAT * (s.query + s.kv)
    attention_adapters = mlp_adapters = 0.0
    for linear in linears:
        rows_per_token = s.assignments if linear.of_experts else 1.0
        products = len(linear.parts) * adapters.rank * s.item_bytes * rows_per_token
        factors = _fused_factor_elements(linear, adapters.rank) * s.item_bytes / trainer.rank_tokens
        if ".self_attention." in linear.path:
            attention_adapters += products + factors
        else:
            mlp_adapters += products + factors
    return replace(
        trained_layer,
        norms=trained_layer.norms + norm_change,
        projections=trained_layer.projections + qk_norm_change + attention_adapters,
        mlp=trained_layer.mlp + mlp_adapters,
    )


def _linears_of_layer(
    trainer: TrainerFacts, adapters: Adapters, number: int
) -> list[AdaptedLinear]:
    """Return the adapted linears of layer ``number`` on the first rank of its stage.

    The first rank stands for the others: all ranks of a stage hold equally many elements.
    """
    layout = trainer.layout
    for stage in range(layout.pipeline):
        if number in layers_of_stage(trainer.shape, layout, stage):
            first_rank = stage * layout.stage_ranks
            linears = adapted_linears(adapters, trainer.shape, layout, first_rank)
            return [linear for linear in linears if linear.layer == number]
    raise AssertionError(f"layer {number} is in no stage")


def _fused_factor_elements(linear: AdaptedLinear, rank: int) -> int:
    """Return the elements of a linear's concatenated A and B, 0 if they are not concatenated."""
    # A row-parallel linear has one matrix: its A and B are not concatenated.
    if linear.axis == 1:
        return 0
    width = len(linear.parts) * rank
    inputs = linear.parts[0].dims[1]
    return max(1, len(linear.experts)) * width * (linear.rows + inputs)


def _has_norm(linear: AdaptedLinear) -> bool:
    """Return whether the linear is fused with the norm before it.

    Column-parallel linears are fused, with two exceptions: the linears of experts, and ``linear_q_proj`` of latent
    attention. The norm before ``linear_q_proj`` is a separate module, because the linear of the latent also uses the
    norm's output. The linear of the latent is not column-parallel: every rank computes it whole.
    """
    is_shared_expert = ".shared_experts." in linear.path
    is_column_parallel = linear.axis == 0 and not linear.is_whole
    shares_norm = linear.path.endswith(".linear_q_proj")
    if linear.of_experts or is_shared_expert:
        return False
    return is_column_parallel and not shares_norm


_STATISTICS = 8 + 8 + 8 + 8 + 6 * 4
"""Bytes of statistics per token: log-sum-exp, fp64; the token's position, the target's id and the target's column,
int64; and six fp32 values (log pi, mu, advantage, loss, mask, gradient)."""


_TOPK = 8 + 8 + 4 + 4 + 8 + 4 + 4
"""Bytes per token and Top-K id: id and column, int64; the rank's own logit and the reduced logit, fp32; log pi, fp64
and fp32; mu, fp32."""


def logits_bytes(trainer: TrainerFacts) -> int:
    """Return the bytes of the logits of one chunk: tokens of the chunk x padded vocabulary / TP x bytes of a logit.

    A chunk has ``head.chunk_tokens`` tokens, or all of the rank's tokens of a micro-batch if these are fewer.
    ``vocab_parallel/head.py`` has one buffer for logits, and keeps it from the forward to the backward pass. The logits
    and gradients of all chunks are written to this buffer. The kernels hold rows in registers, so they need no second
    buffer. The matrix products of the backward pass copy fp32 logits to the model's dtype, unless the model is fp32.
    """
    tensor = trainer.layout.tensor
    columns = padded_vocab_size(trainer.shape.vocab_size, tensor) // tensor
    bytes_per_logit = trainer.logit_bytes
    if trainer.logit_bytes > trainer.item_bytes:
        bytes_per_logit += trainer.item_bytes
    chunk_tokens = min(trainer.rank_tokens, trainer.config.head.chunk_tokens)
    return chunk_tokens * columns * bytes_per_logit


def statistics_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes of the statistics of a micro-batch; ``topk``: K of TopK(mu), 0 for none.

    Tensor-parallel ranks also reduce a packed row for each token: 3 fp32 values for each rank
    (``vocab_parallel/wire.py``). A context-parallel rank computes the statistics of its own tokens. It then gathers the
    statistics of all tokens, because each rank needs the loss of all tokens. With Top-K, the target counts as one more
    id.
    """
    bytes_per_token = _STATISTICS
    if trainer.layout.tensor > 1:
        bytes_per_token += 3 * 4 * trainer.layout.tensor
    if topk:
        bytes_per_token += _TOPK * (topk + 1)
    return trainer.tokens * bytes_per_token


def head_bytes(trainer: TrainerFacts, topk: int) -> int:
    """Return the bytes that the last stage keeps between the last layer and its backward pass, without the logits.

    Only one micro-batch counts. The final norm keeps the same tensors as a layer's norm. With
    sequence parallelism, the norm's output is gathered: tokens x hidden.
    """
    hidden = trainer.shape.hidden_size
    # Transformer Engine keeps input and output. torch keeps two fp32 tensors and the output. Both also keep an fp32
    # scale for each row.
    bytes_per_element = 8 + trainer.item_bytes
    if trainer.transformer_engine:
        bytes_per_element = 2 * trainer.item_bytes
    norm: float = trainer.rank_tokens * (hidden * bytes_per_element + 4)
    gathered = 0
    if trainer.sequence_parallel:
        norm /= trainer.layout.tensor
        gathered = trainer.rank_tokens * hidden * trainer.item_bytes
    return round(norm) + gathered + statistics_bytes(trainer, topk)


BUSIEST_RANK = 1.25
"""Tokens on the busiest expert-parallel rank / the mean over ranks. Assumption: no loss balances the routing."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations on one rank at the peak of a step.

    Attributes:
        layers: tensors that the layers keep for all micro-batches in flight.
        head: final norm and statistics of one micro-batch.
        logits: logits of one chunk of a micro-batch's tokens.
        recomputed: all tensors of one layer that full recomputation runs again. These tensors and the head's tensors do
            not exist at the same time, so that only the larger number counts.
        working: gradients and temporaries.
    """

    layers: int
    head: int
    logits: int
    recomputed: int
    working: int

    @property
    def saved(self) -> int:
        """Peak bytes that autograd keeps. The head keeps its chunk of logits itself, outside of autograd."""
        return self.layers + max(self.head, self.recomputed)

    @property
    def total(self) -> int:
        """Peak bytes of all activations, with logits and working memory."""
        return self.layers + max(self.head + self.logits, self.recomputed) + self.working


def layer_bytes(trainer: TrainerFacts, busiest: float = 1.0, number: int = 0) -> LayerBytes:
    """Return the bytes that layer ``number`` keeps for each token of a micro-batch.

    ``busiest``: tokens of the rank's experts / the mean over ranks.
    """
    sizes = LocalSizes.of(trainer)
    is_moe = number in trainer.shape.moe_layers
    bytes_of = transformer_engine if trainer.transformer_engine else torch_modules
    layer = bytes_of(sizes, is_moe)
    if number in trainer.shape.delta_layers:
        layer = with_delta_net(layer, trainer)
    if trainer.trained is not None:
        layer = with_adapters(layer, sizes, trainer, number)
    if is_moe:
        return replace(layer, mlp=layer.mlp * busiest)
    return layer


def activation_bytes(
    trainer: TrainerFacts, stage: int, topk: int = 0, busiest: float = BUSIEST_RANK
) -> ActivationBytes:
    """Return the bytes of activations on each rank of ``stage``, for micro-batches of ``trainer.tokens`` tokens.

    layers = model chunks in flight x layers of a model chunk x tokens / CP x bytes that a layer keeps under the
    recompute setting. Each kind of layer is counted separately: dense or MoE, with attention or with a delta net. All
    model chunks of a stage are assumed to have the same number of layers of each kind.

    Full recomputation runs each layer's forward again before its backward (``uniform``, one layer), so that all tensors
    of one layer exist in addition to the kept inputs. The working memory holds the gradients with respect to the widest
    tensors of a layer's backward pass: the input and the fused product of the experts (or of the MLP).

    Args:
        trainer: facts of the trainer.
        stage: pipeline stage.
        topk: K of TopK(mu), 0 for none.
        busiest: tokens on the busiest expert-parallel rank / the mean over ranks.
    """
    shape = trainer.shape
    # Key: whether a layer has experts, and whether it has a delta net.
    layers_by_kind: dict[tuple[bool, bool], list[int]] = {}
    for number in layers_of_stage(shape, trainer.layout, stage):
        kind = number in shape.moe_layers, number in shape.delta_layers
        layers_by_kind.setdefault(kind, []).append(number)
    in_flight = chunks_in_flight(trainer.layout, stage, trainer.micro_batches)
    layer_tensors = whole_layer = working = 0.0
    for (is_moe, _), numbers in layers_by_kind.items():
        layer = layer_bytes(trainer, busiest, numbers[0])
        chunk_layers = len(numbers) / trainer.layout.chunks
        kept_bytes = layer.kept(trainer.recompute)
        layer_tensors += in_flight * chunk_layers * trainer.rank_tokens * kept_bytes
        whole_layer = max(whole_layer, layer.whole)
        working = max(working, _working(trainer, busiest, is_moe=is_moe))
    recomputed = 0
    if trainer.recompute == "full":
        recomputed = round(trainer.rank_tokens * whole_layer)
    is_last = stage == trainer.layout.pipeline - 1
    return ActivationBytes(
        layers=round(layer_tensors),
        head=head_bytes(trainer, topk) if is_last else 0,
        logits=logits_bytes(trainer) if is_last else 0,
        recomputed=recomputed,
        working=round(trainer.rank_tokens * working),
    )


def _exchanged_elements(trainer: TrainerFacts, sizes: LocalSizes) -> float:
    """Return the elements that context parallelism exchanges for each of a rank's own tokens.

    A ring (``AttnFuncWithCPAndKVP2P`` of Transformer Engine 2.11) holds the keys and values of all C ranks. The ring
    also holds an output for each of its C steps until it adds up the outputs; each output after the first has half of
    the tokens. An all-to-all holds the tensors that it sends and the tensors that it receives.
    """
    ranks = trainer.layout.context
    if ranks == 1:
        return 0.0
    if trainer.exchange == "a2a":
        return 2 * (sizes.query + 2 * sizes.kv)
    # One output has all tokens, and C - 1 outputs have half of the tokens: 1 + (C - 1) / 2 = (C + 1) / 2.
    return 2 * sizes.kv * ranks + sizes.query * (ranks + 1) / 2


def _working(trainer: TrainerFacts, busiest: float, *, is_moe: bool) -> float:
    """Return the bytes of working memory for each token of a context-parallel rank.

    The working memory holds:

    - the gradients of a layer's widest tensors: 2f, or 2h + 2f for each (token, expert) pair with experts;
    - the gradients of the hidden states that tensor-parallel ranks gather: 2h;
    - the tensors that attention exchanges between context-parallel ranks.

    ``is_moe``: whether the layer has experts.
    """
    sizes = LocalSizes.of(trainer)
    gathered_elements = 2 * sizes.hidden
    gradients = 2 * sizes.ffn
    if is_moe:
        gradients = sizes.assignments * busiest * (2 * sizes.hidden + 2 * sizes.expert_ffn)
    exchanged_elements = _exchanged_elements(trainer, sizes)
    return (gathered_elements + gradients + exchanged_elements) * sizes.item_bytes


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return the largest number of model chunks' forward passes on ``stage`` that wait for their backward pass.

    The number is the warm-up of ``get_pp_rank_microbatches`` (pipeline_parallel/schedules.py) + 1, at most all forward
    passes of a step. On stage p of P, the warm-up is P - p - 1 for 1F1B, and 2 (P - p - 1) + (v - 1) P for v
    interleaved chunks.
    """
    stages = layout.pipeline
    chunks = layout.chunks
    if stages == 1:
        return 1
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * stages
    return min(warmup + 1, micro_batches * chunks)
