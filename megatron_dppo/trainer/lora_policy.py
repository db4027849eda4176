"""The adapters of a Trainer: made beside its model, started, merged, gathered and stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.checkpoint_conversion.adapters import PeftReader, write_peft
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.config.lora import adapters_of
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
from megatron_dppo.trainer.hugging_face import shared_digest
from megatron_dppo.trainer.topology import Topology

# Merged parameters that are kept: a bucket's queries, keys and values are read off one.
_KEPT = 4


def adapter_values(adapters: list[lora_modules.LinearAdapter]) -> dict[ParameterKey, Tensor]:
    """This rank's A and B, under the names of ``adapter_parameters``; views."""
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
    whole: Callable[[str, tuple[int, ...]], Tensor],
    dims: Mapping[str, tuple[int, ...]],
) -> None:
    """Set every A and B to its part of ``whole(name, dims)``, the tensor of the whole model."""
    values = adapter_values(adapters)
    for entry in table:
        (segment,) = entry.segments
        source = whole(segment.hf_name, dims[segment.hf_name])
        values[entry.chunk, entry.name].copy_(segment.of_hf(source))


class MergedWeights(Mapping[ParameterKey, Tensor]):
    """A rank's parameters, those with adapters as ``W + scale * B A`` of this moment, in W's type.

    Made when asked for, in fp32 and from the frozen W, so that no update's rounding is in the next one's.
    """

    def __init__(
        self,
        parameters: Mapping[ParameterKey, Tensor],
        adapters: list[lora_modules.LinearAdapter],
    ) -> None:
        self._parameters = parameters
        self._deltas: dict[ParameterKey, Callable[[], Tensor]] = {}
        self._kept: OrderedDict[ParameterKey, Tensor] = OrderedDict()
        for adapter in adapters:
            for expert, name in _base_names(adapter, parameters):
                self._deltas[adapter.linear.chunk, name] = partial(adapter.weight_delta, expert)

    @torch.no_grad()
    def __getitem__(self, key: ParameterKey) -> Tensor:
        base = self._parameters[key]
        if key not in self._deltas:
            return base
        if key not in self._kept:
            self._kept[key] = (base.float() + self._deltas[key]()).to(base.dtype)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def __iter__(self) -> Iterator[ParameterKey]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def sharded_adapters(
    adapters: list[lora_modules.LinearAdapter], chunks: list[GPTModel], layout: Layout
) -> dict[str, Any]:
    """Every trained tensor of this rank as a sharded tensor, by ``model<chunk>`` and its name in the chunk.

    Keys are the adapters' names in the whole model, ``*`` standing for the experts that a first axis counts; those of
    trained routers are ``adapters.router.<layer>``. They know no layout.
    """
    out: dict[str, Any] = {f"model{i}": {} for i in range(len(chunks))}
    for adapter in adapters:
        linear = adapter.linear
        for part in linear.parts:
            for which in (LORA_A, LORA_B):
                name = f"{linear.path}.{CHILD}.{part.name}.{which}"
                tensor = getattr(adapter.matrices(part.name), which)
                out[f"model{linear.chunk}"][name] = _sharded(adapter, part, which, tensor, layout)
    return out


def sharded_routers(
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int
) -> dict[str, dict[str, ShardedTensor]]:
    """The routers' weights likewise, whole on every rank of a stage."""
    coordinates = layout.coordinates(rank)
    out: dict[str, dict[str, ShardedTensor]] = {}
    for i, chunk in enumerate(chunks):
        layers = local_layers(shape, layout, coordinates.pp, i)
        out[f"model{i}"] = {
            name: ShardedTensor.from_rank_offsets(
                f"adapters.router.{layers[int(name.split('.')[2])]}",
                parameter,
                replica_id=(0, coordinates.tp, coordinates.dp),
            )
            for name, parameter in chunk.named_parameters()
            if name.endswith(lora_modules.ROUTER)
        }
    return out


def _sharded(
    adapter: lora_modules.LinearAdapter,
    part: AdapterPart,
    which: str,
    tensor: Parameter,
    layout: Layout,
) -> ShardedTensor:
    linear = adapter.linear
    key = f"{CHECKPOINT_PREFIX}{part.module.format(expert=ANY_EXPERT)}.{which}"
    offsets = []
    is_cut = part.is_cut(which) and not (linear.of_experts and not linear.experts)
    if linear.experts:
        tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        tensor_size = layout.expert_tensor
        replica = parallel_state.get_expert_data_parallel_rank()
        offsets.append((0, parallel_state.get_expert_model_parallel_rank(), layout.expert))
    else:
        tensor_rank, tensor_size = parallel_state.get_tensor_model_parallel_rank(), layout.tensor
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if is_cut:
        offsets.append((part.axis + len(offsets), tensor_rank, tensor_size))
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, replica_id=(0, 0 if is_cut else tensor_rank, replica)
    )


def _base_names(
    adapter: lora_modules.LinearAdapter, parameters: Mapping[ParameterKey, Tensor]
) -> list[tuple[int | None, str]]:
    """(local expert, name) of the weights that the adapter adds to."""
    linear = adapter.linear
    if not linear.of_experts:
        return [(None, f"{linear.path}.weight")]
    prefix = f"{linear.path}.weight"
    numbers = [
        int(name.removeprefix(prefix))
        for chunk, name in parameters
        if chunk == linear.chunk and name.startswith(prefix)
    ]
    return [(i, f"{prefix}{i}") for i in sorted(numbers)]


_BUCKET_BYTES = 64 * 2**20


class AdaptedPolicy:
    """A rank's model chunks, frozen, with adapters beside their linears.

    Attributes:
        adapters: which ones.
        base_sha256: of the checkpoint that the frozen weights were loaded from; the same on every rank.
    """

    def __init__(
        self,
        lora: LoraConfig,
        hf_checkpoint: str,
        seed: int,
        shape: ModelShape,
        topology: Topology,
        layout: Layout,
        transformer: TransformerConfig,
        chunks: list[GPTModel],
    ) -> None:
        """Freeze ``chunks``, whose weights are loaded, and attach what ``lora`` asks for. Collective.

        ``hf_checkpoint``: what the frozen weights were loaded from. ``seed``: of A's start.


        Raises ValueError where the section doesn't fit the model or the layout, CheckpointError where
        ``lora.start_from`` holds other adapters.
        """
        adapters = adapters_of(lora, shape)
        if adapters is None:
            raise ValueError("lora.rank is 0: there are no adapters")
        if faults := list(adapter_faults(adapters, shape, layout)):
            raise ValueError("; ".join(faults))
        self.adapters: Adapters = adapters
        self._shape, self._layout, self._rank = shape, layout, topology.rank
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

        def reduce_all_grads(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
            reduce_grads(chunks, num_tokens, **kwargs)
            lora_modules.sum_expert_tensor_grads(chunks)

        transformer.finalize_model_grads_func = reduce_all_grads

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it the model computes without its adapters: as the policy that training started from, where they
        started at zero."""
        for adapter in self.modules:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.modules:
                adapter.enabled = True

    def tensors(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets of whole A and B by ``adapter_tensors``' names, on global rank 0; elsewhere empty. Collective."""
        values = self.values()
        item = next(iter(values.values())).element_size()
        plan = adapter_buckets_plan(self.adapters, self._shape, self._layout, _BUCKET_BYTES, item)
        return (gathered.tensors for gathered in gather(plan, self._rank, values))

    def values(self) -> Mapping[ParameterKey, Tensor]:
        """This rank's A and B, under the names of ``adapter_parameters``; views."""
        return adapter_values(self.modules)

    def export(self, out_dir: str | Path, base: str) -> None:
        """Write the present adapters as a folder in PEFT's format, which appears when complete. Collective.

        ``base``: the checkpoint that they are added to. Raises CheckpointError on every rank if rank 0 cannot write.
        """
        assert not self._train_router, "a folder of adapters can't hold the routers"
        buckets = self.tensors()
        failure: str | None = None
        if self._rank == 0:
            named = (pair for bucket in buckets for pair in bucket)
            dtype = next(iter(self.values().values())).dtype
            try:
                write_peft(out_dir, self.adapters, self._shape, named, base=base, dtype=dtype)
            except (OSError, CheckpointError) as error:
                failure = str(error)
        # Where rank 0 failed, the other ranks still send: without this they would wait for ever.
        for _ in buckets:
            pass
        if (first := first_failure(failure)) is not None:
            raise CheckpointError(f"{out_dir}: the adapters were not written: {first}")

    def sharded(self) -> dict[str, Any]:
        """What a checkpoint holds of the model: adapters, and the routers where they are trained."""
        state = sharded_adapters(self.modules, self._chunks, self._layout)
        if self._train_router:
            for chunk, routers in sharded_routers(
                self._chunks, self._shape, self._layout, self._rank
            ).items():
                state[chunk].update(routers)
        return state

    def facts(self) -> dict[str, Any]:
        """What a resumed run must not change."""
        return {
            "lora.rank": self.adapters.rank,
            "lora.alpha": self.adapters.alpha,
            "lora.target_modules": list(self.adapters.modules),
            "lora.experts": "shared" if self.adapters.share_experts else "each",
            "lora.train_router": self._train_router,
            "base_sha256": self.base_sha256,
        }

    def _start(self, lora: LoraConfig, seed: int) -> None:
        rank = self.adapters.rank
        dims = adapter_tensors(self.adapters, self._shape)
        table = adapter_parameters(self.adapters, self._shape, self._layout, self._rank)
        if lora.start_from is None:
            start = partial(lora_modules.initial_tensor, rank=rank, seed=seed, init=lora.init)
            fill(self.modules, table, start, dims)
            return
        with PeftReader(Path(lora.start_from), self.adapters, self._shape) as reader:
            fill(self.modules, table, reader.read, dims)
