"""What the layers' kernels keep for the backward pass, per token: Transformer Engine's on GPUs, torch's on CPUs.

Legend: h = hidden size, q = query size, kv = key (or value) size, f = MLP size, k = experts of a token, E = experts,
b = bytes of an activation; all of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.job import TrainerJob

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
    def of(cls, job: TrainerJob, qk_norm: bool) -> LocalSizes:
        """Of a rank of ``job``. With expert tensor parallelism a rank computes a slice for the tokens of its whole
        group."""
        shape, layout = job.shape, job.layout
        sizes, tensor = shape.sizes(), layout.tensor
        rows = 1 / tensor if job.sequence_parallel else 1.0
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
            item=job.item_bytes,
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
    if s.item == _FLOAT:  # the keys' norm keeps its input itself, a view of the fused projection
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
