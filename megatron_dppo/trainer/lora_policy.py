"""The adapters of a Trainer: their creation, initialisation, merging, gathering and saving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.checkpoint_conversion.adapters import PeftReader, write_peft
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.model.adapters import (
    ANY_EXPERT,
    CHECKPOINT_PREFIX,
    CHILD,
    LORA_A,
    LORA_B,
    AdapterPart,
    Adapters,
    adapted_linears,
    adapter_faults,
    adapter_parameters,
    adapter_tensors,
)
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.gather_plan import ParameterKey, adapter_buckets_plan
from megatron_dppo.model.layout import Layout, local_layers
from megatron_dppo.model.mapping import LocalParameter
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import lora_modules, platform
from megatron_dppo.trainer.collectives import first_failure
from megatron_dppo.trainer.hf_loading import shared_digest
from megatron_dppo.trainer.sharded_sections import in_sections
from megatron_dppo.trainer.topology import Topology


def adapter_values(adapters: list[lora_modules.LinearAdapter]) -> dict[ParameterKey, Tensor]:
    """Return views of this rank's A and B, by the names of ``adapter_parameters``."""
    values = {}
    for adapter in adapters:
        linear = adapter.linear
        for part in linear.parts:
            for which in (LORA_A, LORA_B):
                tensor = getattr(adapter.matrices(part.name), which).data
                name = f"{linear.path}.{CHILD}.{part.name}.{which}"
                if linear.experts:
                    for i in range(len(linear.experts)):
                        values[linear.chunk, f"{name}.{i}"] = tensor[i]
                else:
                    values[linear.chunk, name] = tensor
    return values


@torch.no_grad()
def fill(
    adapters: list[lora_modules.LinearAdapter],
    table: Iterator[LocalParameter],
    read: Callable[[str, tuple[int, ...]], Tensor],
    dims: Mapping[str, tuple[int, ...]],
) -> None:
    """Set every A and B to its part of ``read(name, dims)``, the tensor of the whole model.

    ``table``: this rank's A and B, as parts of these tensors. ``dims``: the dimensions of these tensors by name.
    """
    values = adapter_values(adapters)
    for entry in table:
        # The segments of an A or B are parts of one tensor of the whole model.
        name = entry.segments[0].hf_name
        source = read(name, dims[name])
        value = values[entry.chunk, entry.name]
        for segment in entry.segments:
            segment.of_local(value).copy_(segment.of_hf(source))


def sharded_adapters(
    adapters: list[lora_modules.LinearAdapter], chunks: list[GPTModel], layout: Layout
) -> dict[str, Any]:
    """Return this rank's adapters as sharded tensors, by ``model<chunk>`` and the name in the chunk.

    A sharded tensor's key is the name in the whole model, and does not depend on the layout. In the name of an expert's
    adapter, ``*`` replaces the expert's number. If each expert has separate adapters, one sharded tensor has the
    adapters of all experts, along its first axis.
    """
    state: dict[str, Any] = {f"model{i}": {} for i in range(len(chunks))}
    for adapter in adapters:
        linear = adapter.linear
        for part in linear.parts:
            for which in (LORA_A, LORA_B):
                name = f"{linear.path}.{CHILD}.{part.name}.{which}"
                tensor = getattr(adapter.matrices(part.name), which)
                sharded = _sharded(adapter, part, which, tensor, layout)
                state[f"model{linear.chunk}"][name] = sharded
    return state


def sharded_routers(
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int
) -> dict[str, dict[str, ShardedTensor]]:
    """Return the routers' weights as sharded tensors, by ``model<chunk>`` and the name in the chunk.

    The sharded tensors' keys are ``adapters.router.<layer>``. Every rank of a stage holds all routers of the stage.
    """
    coordinates = layout.coordinates(rank)
    state: dict[str, dict[str, ShardedTensor]] = {}
    for i, chunk in enumerate(chunks):
        layers = local_layers(shape, layout, coordinates.pp, i)
        routers: dict[str, ShardedTensor] = {}
        for name, parameter in chunk.named_parameters():
            if not name.endswith(lora_modules.ROUTER):
                continue
            # The name is decoder.layers.<local layer>.mlp.router.weight.
            local_layer = int(name.split(".")[2])
            routers[name] = ShardedTensor.from_rank_offsets(
                f"adapters.router.{layers[local_layer]}",
                parameter,
                replica_id=(0, coordinates.tp, coordinates.dp),
            )
        state[f"model{i}"] = routers
    return state


def _sharded(
    adapter: lora_modules.LinearAdapter,
    part: AdapterPart,
    which: str,
    tensor: Parameter,
    layout: Layout,
) -> ShardedTensor | ShardedTensorFactory:
    """Return the ``tensor`` of this rank, A or B of ``part``, as one or several parts of the checkpoint's tensor."""
    linear = adapter.linear
    key = f"{CHECKPOINT_PREFIX}{part.module.format(expert=ANY_EXPERT)}.{which}"
    offsets = []
    is_cut = part.is_cut(which) and not linear.is_shared_by_experts
    if linear.experts:
        tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        tensor_size = layout.expert_tensor
        replica = parallel_state.get_expert_data_parallel_rank()
        offsets.append((0, parallel_state.get_expert_model_parallel_rank(), layout.expert))
    else:
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        tensor_size = layout.tensor
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if is_cut:
        # The matrix's axes come after the axis of experts, if there is one.
        axis = part.axis + len(offsets)
        offsets.append((axis, tensor_rank, tensor_size))
    # Every tensor-parallel rank holds a copy of a tensor that is not cut.
    tensor_replica = 0 if is_cut else tensor_rank
    sharded = ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, replica_id=(0, tensor_replica, replica)
    )
    if not is_cut or len(part.ranges) == 1:
        return sharded
    # The matrix of a delta net has one range for each of the sections query, key and value. The rank holds a part of
    # every section, so its rows are several runs of the checkpoint's tensor.
    widths = [indices.length for indices in part.ranges]
    return in_sections(sharded, widths, tensor_size, tensor_rank)


_BUCKET_BYTES = 64 * 2**20
"""Size of a bucket of adapters that is gathered at once."""


class AdaptedPolicy:
    """A rank's model chunks, frozen, with adapters on their linears.

    Attributes:
        adapters: The adapters of the model.
        modules: This rank's adapters.
        base_sha256: Hash of the checkpoint with the frozen weights; the same on every rank.
    """

    def __init__(
        self,
        lora: LoraConfig,
        adapters: Adapters,
        hf_checkpoint: str,
        seed: int,
        shape: ModelShape,
        topology: Topology,
        layout: Layout,
        transformer: TransformerConfig,
        chunks: list[GPTModel],
    ) -> None:
        """Freeze ``chunks``, whose weights are loaded, and attach ``adapters``. Collective.

        ``lora`` has their options; ``hf_checkpoint`` is the checkpoint with the frozen weights; ``seed`` is the seed of
        the initial A. Raises ValueError if the adapters do not fit the model or the layout, and CheckpointError if
        ``lora.start_from`` has other adapters.
        """
        faults = list(adapter_faults(adapters, shape, layout))
        if faults:
            raise ValueError("; ".join(faults))
        self.adapters = adapters
        self._shape = shape
        self._layout = layout
        self._rank = topology.rank
        self._chunks = chunks
        self._train_router = lora.train_router
        lora_modules.freeze(chunks, train_router=lora.train_router)
        options = lora_modules.AdapterOptions(
            adapters,
            lora.dropout,
            transformer.sequence_parallel,
            transformer.params_dtype,
            platform.current().device,
        )
        linears = adapted_linears(adapters, shape, layout, topology.rank)
        self.modules = lora_modules.attach(chunks, linears, options)
        self._start(lora, seed)
        self.base_sha256 = shared_digest(hf_checkpoint, topology)
        reduce_grads = transformer.finalize_model_grads_func

        # Megatron-Core's reduction does not sum over expert-tensor-parallel ranks.
        def reduce_all_grads(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
            reduce_grads(chunks, num_tokens, **kwargs)
            lora_modules.sum_expert_tensor_grads(chunks)

        transformer.finalize_model_grads_func = reduce_all_grads

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters in this context: the model computes without any A and B.

        If every B started as zero, this model is the policy before training, except for trained routers.
        """
        for adapter in self.modules:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.modules:
                adapter.enabled = True

    def tensors(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Gather buckets of all A and B, by the names of ``adapter_tensors``, on global rank 0. Collective.

        Buckets are empty on other ranks.
        """
        values = self.values()
        element_bytes = next(iter(values.values())).element_size()
        plan = adapter_buckets_plan(
            self.adapters, self._shape, self._layout, _BUCKET_BYTES, element_bytes
        )
        return (gathered.tensors for gathered in gather(plan, self._rank, values))

    def values(self) -> Mapping[ParameterKey, Tensor]:
        """Return views of this rank's A and B, by the names of ``adapter_parameters``."""
        return adapter_values(self.modules)

    def export(self, out_dir: str | Path, base: str) -> None:
        """Write the current adapters as a folder in PEFT's format, atomically. Collective.

        ``base`` is the checkpoint of the base model. Raises CheckpointError on every rank if rank 0 cannot write.
        """
        assert not self._train_router, "a folder of adapters can't hold the routers"
        buckets = self.tensors()
        failure: str | None = None
        if self._rank == 0:
            tensors = chain.from_iterable(buckets)
            dtype = next(iter(self.values().values())).dtype
            try:
                write_peft(out_dir, self.adapters, self._shape, tensors, base=base, dtype=dtype)
            except (OSError, CheckpointError) as error:
                failure = str(error)
        # Gather the remaining buckets: on rank 0 the buckets after a failure, on other ranks all buckets. The
        # collectives would hang if a rank left out a bucket.
        for _ in buckets:
            pass
        message = first_failure(failure)
        if message is not None:
            raise CheckpointError(f"{out_dir}: the adapters were not written: {message}")

    def sharded(self) -> dict[str, Any]:
        """Return the sharded tensors of a checkpoint: the adapters, and the routers if they are trained."""
        state = sharded_adapters(self.modules, self._chunks, self._layout)
        if self._train_router:
            router_state = sharded_routers(self._chunks, self._shape, self._layout, self._rank)
            for chunk, routers in router_state.items():
                state[chunk].update(routers)
        return state

    def facts(self) -> dict[str, Any]:
        """Return the settings that a resumed run must not change."""
        return {
            "lora.rank": self.adapters.rank,
            "lora.alpha": self.adapters.alpha,
            "lora.target_modules": list(self.adapters.modules),
            "lora.experts": "shared" if self.adapters.share_experts else "each",
            "lora.train_router": self._train_router,
            "base_sha256": self.base_sha256,
        }

    def _start(self, lora: LoraConfig, seed: int) -> None:
        """Set the adapters to the values in ``lora.start_from``; without this setting, to initial values."""
        rank = self.adapters.rank
        dims = adapter_tensors(self.adapters, self._shape)
        table = adapter_parameters(self.adapters, self._shape, self._layout, self._rank)
        if lora.start_from is None:
            initial = partial(lora_modules.initial_tensor, rank=rank, seed=seed, init=lora.init)
            fill(self.modules, table, initial, dims)
            return
        with PeftReader(Path(lora.start_from), self.adapters, self._shape) as reader:
            fill(self.modules, table, reader.read, dims)
