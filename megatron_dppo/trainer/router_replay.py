"""R3: the routers choose the experts that the engine recorded (arXiv 2510.11370).

Megatron-Core's routers ask their ``router_replay`` for the top-k choice; here it answers with the
recording of the micro-batch at work. The weights of the chosen experts stay the trainer's own
scores at them, so the router keeps its gradient. Tokens without a recording route naturally.

Megatron-Core's own bookkeeping is one list of choices for each layer, which recomputation takes
from the front: one micro-batch that pops too often or not at all, and every later gradient is
wrong without an error. Here a micro-batch's forward pass leaves a hook on its output. The backward
pass meets it first and makes that micro-batch's recording current again, so recomputation of any
kind and under any schedule finds its own, and nothing is left to clear.

T = tokens of a micro-batch, t = those of this rank's routers (T / CP, and T / CP / TP under sequence parallelism),
L = mixture-of-experts layers of the model, E = experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_dppo.data.columns import ROUTED_EXPERTS
from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.context_parallel import TokenShare
from megatron_dppo.trainer.topology import Topology

RECORDING = ROUTED_EXPERTS.name
"""The column of a micro-batch that is replayed; the model itself never sees it."""


@dataclass(frozen=True)
class Recording:
    """One micro-batch's choices for one model chunk: experts [t, layers, E], valid bool [t]."""

    experts: Tensor
    valid: Tensor


class ChunkState:
    """The recording that the routers of one model chunk replay now (None: they route naturally).

    ``compares``: whether natural choices are compared with the recording, which only a first pass
    over the tokens does; ``counts`` int64 [2] on the device: agreed and compared.
    """

    def __init__(self, device: torch.device) -> None:
        self.recording: Recording | None = None
        self.compares = False
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def replay(self, recording: Recording | None, *, compares: bool) -> None:
        """Make ``recording`` the current one."""
        self.recording = recording
        self.compares = compares


class LayerReplay(RouterReplay):
    """Megatron-Core's replay of one router, fed from its chunk's current recording.

    ``column``: the layer's place among those of the chunk's recordings.
    """

    target_topk_idx: Tensor | None

    def __init__(self, chunk: ChunkState, column: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._column = column
        self.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts [t, E]: the recorded experts where there are any, else the top-k.

        ``scores`` [t, experts]; the gradient flows into them at the chosen experts.
        """
        assert default_compute_topk is not None
        recording = self._chunk.recording
        if recording is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        with torch.no_grad():
            _, natural = default_compute_topk(scores, topk, num_groups, group_topk)
            recorded = recording.experts[:, self._column].long()
            if self._chunk.compares:
                # Compare sets: the order of a token's experts changes nothing.
                is_equal = (natural.sort(1).values == recorded.sort(1).values).all(1)
                counted = torch.stack([is_equal & recording.valid, recording.valid])
                self._chunk.counts += counted.sum(1)
            self.target_topk_idx = torch.where(recording.valid[:, None], recorded, natural)
        probs_and_experts = super().get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        self.target_topk_idx = None
        return probs_and_experts


class ModelReplay:
    """Replays recordings through every router of this rank's model chunks.

    ``layers``: places, among the model's layers that route, of those of this rank. A recording has all
    of the model's layers or these alone, and all rows of its micro-batch or this rank's. ``share``: this rank's
    part of a micro-batch.

    Raises ValueError where the model routes nothing. Not collective but for ``agreement``.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        topology: Topology,
        *,
        share: TokenShare,
        device: torch.device,
    ) -> None:
        if not shape.is_moe:
            raise ValueError(f"rollout.router_replay: a {shape.family} model routes nothing")
        self._shape = shape
        self._device = device
        self._share = share
        # All tensor ranks route the same tokens, unless sequence parallelism divides them: then every rank counts.
        self._counts_here = share.sequence_size > 1 or topology.tp_rank == 0
        self._states = [ChunkState(device) for _ in chunks]
        self._columns: list[list[int]] = []
        for chunk, state in zip(chunks, self._states, strict=True):
            self._columns.append(attach(chunk, state, shape.moe_layers))
        self.layers = sorted(chain.from_iterable(self._columns))
        self._recordings: list[list[Recording | None]] = [[] for _ in chunks]
        # Remove the instances from Megatron-Core's registry, so that its global functions do not switch them.
        RouterReplay.clear_global_router_replay_instances()

    def load(self, batches: Sequence[PackedBatch]) -> None:
        """Take the recordings of the micro-batches that come next, this rank's part of each.

        Raises ValueError where a recording does not belong to this model.
        """
        for batch in batches:
            self._check(batch)
        self._recordings = []
        for columns in self._columns:
            self._recordings.append([self._local(batch, columns) for batch in batches])
        for state in self._states:
            state.counts.zero_()

    def unload(self) -> None:
        """Forget the recordings; the routers route naturally again."""
        self._recordings = [[] for _ in self._states]
        for state in self._states:
            state.replay(None, compares=False)

    def forward(self, chunk: int, micro_batch: int, run: Callable[[], Tensor]) -> Tensor:
        """``run()``, the forward pass of a chunk, under the micro-batch's recording.

        Its backward pass, and what that recomputes, replays the same recording.
        """
        state = self._states[chunk]
        recording = self._recordings[chunk][micro_batch]
        state.replay(recording, compares=True)
        output = run()

        def before_backward(_: Tensor) -> None:
            state.replay(recording, compares=False)

        if output.requires_grad:
            # A pipeline runs other micro-batches' forward passes before this one's backward pass.
            output.register_hook(before_backward)
        return output

    def agreement(self) -> MetricSums:
        """How often the loaded micro-batches' natural routing was the engine's. Collective."""
        counts = torch.stack([state.counts for state in self._states]).sum(0)
        counts = counts * int(self._counts_here)
        dist.all_reduce(counts)
        agreed, compared = counts.double()
        return MetricSums({names.ROUTING_AGREEMENT: agreed, names.COMPARED: compared})

    def _local(self, batch: PackedBatch, columns: Sequence[int]) -> Recording | None:
        if RECORDING not in batch.columns:
            return None
        recorded = batch.columns[RECORDING]
        valid = batch.valid[RECORDING]
        if len(recorded) == batch.num_tokens:
            rows = self._share.rows(batch.cu_seqlens)
            recorded = recorded[rows]
            valid = valid[rows]
        if recorded.shape[1] != len(self._shape.moe_layers):
            columns = [self.layers.index(column) for column in columns]
        experts = recorded[:, list(columns)]
        return Recording(experts.to(self._device), valid.to(self._device))

    def _check(self, batch: PackedBatch) -> None:
        if RECORDING not in batch.columns:
            return
        recorded = batch.columns[RECORDING]
        model_dims = (len(self._shape.moe_layers), self._shape.experts_per_token)
        dims = tuple(recorded.shape[1:])
        if dims not in (model_dims, (len(self.layers), model_dims[1])):
            raise ValueError(
                f"recorded routing of {dims} layers x experts a token, expected {model_dims}: "
                "it is another model's"
            )
        largest_expert = int(recorded.numpy().max(initial=0))
        if largest_expert >= self._shape.num_experts:
            raise ValueError(
                f"recorded routing to expert {largest_expert}, expected 0..{self._shape.num_experts - 1}"
            )


def attach(chunk: GPTModel, state: ChunkState, moe_layers: Sequence[int]) -> list[int]:
    """Give every router of ``chunk`` a LayerReplay; for each, its layer's place in ``moe_layers``.

    ``moe_layers``: the model's layers that route, from 0. Raises ValueError where the chunk's
    layers with a router are others.
    """
    columns: list[int] = []
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        router: Any = getattr(layer.mlp, "router", None)
        if (router is not None) != (number in moe_layers):
            raise ValueError(
                f"layer {number} of the model {'routes' if router is not None else 'is dense'}, "
                f"but the recording's layers are {list(moe_layers)}"
            )
        if router is not None:
            router.router_replay = LayerReplay(state, len(columns))
            columns.append(list(moe_layers).index(number))
    return columns
