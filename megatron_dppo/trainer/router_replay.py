"""Router replay (R3, arXiv 2510.11370): the routers choose the experts that the engine recorded.

Megatron-Core's routers call their ``router_replay`` for the top-k choice. Here the call returns the recording of the
current micro-batch. The experts' outputs are weighted by the trainer's own scores, so the router keeps its gradient.
The router chooses the experts of tokens without a recording (natural routing).

Megatron-Core's own replay keeps a list of choices for each layer, and recomputation pops from the list's front. If one
micro-batch pops a wrong number of times, all later gradients are wrong without an error. Here the forward pass of a
micro-batch registers a hook on its output. The backward pass runs this hook first, and the hook selects the
micro-batch's recording again. So recomputation of any kind, under any schedule, replays the right recording.

T = tokens of a micro-batch, t = tokens of this rank's routers (T / CP, and T / CP / TP under sequence parallelism),
E = experts of a token.
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
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.context_parallel import TokenShare
from megatron_dppo.trainer.topology import Topology

RECORDING = ROUTED_EXPERTS.name
"""The column of a micro-batch that is replayed; it is no input of the model."""


@dataclass(frozen=True)
class Recording:
    """The recorded choices of one micro-batch for one model chunk: experts [t, layers, E].

    ``valid`` bool [t] is False for tokens without a recording.
    """

    experts: Tensor
    valid: Tensor


class ChunkState:
    """The state of replay that the routers of one model chunk share.

    Attributes:
        recording: the recording that the routers replay now; None: they route naturally.
        compares: whether natural choices are compared with the recording; True in forward passes, False in
            recomputation.
        counts: int64 [2] on the device: number of equal and of compared choices.
    """

    def __init__(self, device: torch.device) -> None:
        self.recording: Recording | None = None
        self.compares = False
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def replay(self, recording: Recording | None, *, compares: bool) -> None:
        """Select ``recording`` for the following passes."""
        self.recording = recording
        self.compares = compares


class LayerReplay(RouterReplay):
    """Megatron-Core's replay of one router, with the current recording of its chunk.

    ``column``: index of the layer in ``Recording.experts`` of the chunk.
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
        """Return the scores and numbers [t, E] of the recorded experts.

        A token without a recording gets its top-k experts. ``scores`` [t, experts] get a gradient at the chosen
        experts.
        """
        assert default_compute_topk is not None
        recording = self._chunk.recording
        if recording is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        with torch.no_grad():
            _, natural = default_compute_topk(scores, topk, num_groups, group_topk)
            recorded = recording.experts[:, self._column].long()
            if self._chunk.compares:
                # Compare sets: the order of a token's experts has no effect.
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

    ``layers``: indices of this rank's layers among the model's layers with a router. A recording has either all layers
    with a router or only ``layers``. It has either all rows of its micro-batch or only this rank's rows. ``share``:
    this rank's part of a micro-batch.

    Raises ValueError for a model without routers. Only ``agreement`` is collective.
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
        # Tensor-parallel ranks route the same tokens, so only the first rank counts choices. With sequence parallelism
        # each rank routes its own tokens, and counts the choices for them.
        self._counts_choices = share.sequence_size > 1 or topology.tp_rank == 0
        self._states = [ChunkState(device) for _ in chunks]
        # For each chunk the indices of its layers among the model's layers with a router, as in ``layers``.
        self._router_layers: list[list[int]] = []
        for chunk, state in zip(chunks, self._states, strict=True):
            self._router_layers.append(attach(chunk, state, shape.moe_layers))
        self.layers = sorted(chain.from_iterable(self._router_layers))
        self._recordings: list[list[Recording | None]] = [[] for _ in chunks]
        # Remove the instances from Megatron-Core's registry, so that its global functions do not switch them.
        RouterReplay.clear_global_router_replay_instances()

    def load(self, batches: Sequence[PackedBatch]) -> None:
        """Load this rank's part of the recordings of the next micro-batches.

        Raises ValueError for a recording of another model.
        """
        for batch in batches:
            self._check(batch)
        self._recordings = []
        for router_layers in self._router_layers:
            self._recordings.append([self._local(batch, router_layers) for batch in batches])
        for state in self._states:
            state.counts.zero_()

    def unload(self) -> None:
        """Drop the recordings; the routers then route naturally."""
        self._recordings = [[] for _ in self._states]
        for state in self._states:
            state.replay(None, compares=False)

    def forward(self, chunk: int, micro_batch: int, run: Callable[[], Tensor]) -> Tensor:
        """Return ``run()``, the forward pass of model chunk ``chunk``, and replay the micro-batch's recording in it.

        Recomputation in the backward pass replays the same recording.
        """
        state = self._states[chunk]
        recording = self._recordings[chunk][micro_batch]
        state.replay(recording, compares=True)
        output = run()

        def before_backward(_: Tensor) -> None:
            state.replay(recording, compares=False)

        if output.requires_grad:
            # Select the recording again: a pipeline runs other micro-batches' forward passes in between.
            output.register_hook(before_backward)
        return output

    def agreement(self) -> MetricSums:
        """Count how often the natural routing of the loaded micro-batches equals the engine's routing. Collective."""
        counts = torch.stack([state.counts for state in self._states]).sum(0)
        counts = counts * int(self._counts_choices)
        dist.all_reduce(counts)
        agreed, compared = counts.double()
        return MetricSums({metric_names.ROUTING_AGREEMENT: agreed, metric_names.COMPARED: compared})

    def _local(self, batch: PackedBatch, router_layers: Sequence[int]) -> Recording | None:
        """Return this rank's part of a micro-batch's recording for one model chunk; None without a recording.

        ``router_layers``: indices of the chunk's layers among the model's layers with a router.
        """
        if RECORDING not in batch.columns:
            return None
        recorded = batch.columns[RECORDING]
        valid = batch.valid[RECORDING]
        has_all_rows = len(recorded) == batch.num_tokens
        if has_all_rows:
            rows = self._share.rows(batch.cu_seqlens)
            recorded = recorded[rows]
            valid = valid[rows]
        # A recording of all layers has the chunk's layers at ``router_layers``, a recording of ``layers`` at other
        # places.
        places = list(router_layers)
        has_all_layers = recorded.shape[1] == len(self._shape.moe_layers)
        if not has_all_layers:
            places = [self.layers.index(layer) for layer in router_layers]
        experts = recorded[:, places]
        return Recording(experts.to(self._device), valid.to(self._device))

    def _check(self, batch: PackedBatch) -> None:
        """Raise ValueError if the micro-batch's recording is of another model."""
        if RECORDING not in batch.columns:
            return
        recorded = batch.columns[RECORDING]
        model_dims = (len(self._shape.moe_layers), self._shape.experts_per_token)
        rank_dims = (len(self.layers), self._shape.experts_per_token)
        dims = tuple(recorded.shape[1:])
        if dims not in (model_dims, rank_dims):
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
    """Attach a LayerReplay to every router of ``chunk``; return the index of each router's layer in ``moe_layers``.

    ``moe_layers``: numbers, from 0, of the model's layers with a router. Raises ValueError if they do not agree with
    the chunk's layers.
    """
    router_layers: list[int] = []
    for layer in chunk.decoder.layers:
        # Megatron-Core numbers layers from 1.
        number = layer.layer_number - 1
        router: Any = getattr(layer.mlp, "router", None)
        has_router = router is not None
        if has_router != (number in moe_layers):
            raise ValueError(
                f"layer {number} of the model {'routes' if has_router else 'is dense'}, "
                f"but the recording's layers are {list(moe_layers)}"
            )
        if has_router:
            router.router_replay = LayerReplay(state, len(router_layers))
            router_layers.append(list(moe_layers).index(number))
    return router_layers
