"""The adapters of a Trainer: made beside its model, started, merged, gathered and stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.checkpoint_conversion.peft import PeftReader, write_peft
from megatron_dppo.config.lora import adapters_of
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.adapters import (
    Adapters,
    adapted_linears,
    adapter_faults,
    adapter_parameters,
    adapter_tensors,
)
from megatron_dppo.model.gather_plan import ParameterKey, adapter_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.hf_weights import shared_digest, write_on_rank_0
from megatron_dppo.trainer.lora.attaching import (
    attach,
    freeze,
    initial_tensor,
    sum_expert_tensor_grads,
    without_adapters,
)
from megatron_dppo.trainer.lora.modules import AdapterOptions
from megatron_dppo.trainer.lora.weights import (
    MergedWeights,
    adapter_values,
    fill,
    sharded_adapters,
    sharded_routers,
)
from megatron_dppo.trainer.topology import Topology

_BUCKET_BYTES = 64 * 2**20


class AdaptedPolicy:
    """A rank's model chunks, frozen, with adapters beside their linears.

    Attributes:
        adapters: which ones.
        base_sha256: of the checkpoint that the frozen weights were loaded from; the same on every rank.
    """

    def __init__(
        self,
        config: PolicyConfig,
        shape: ModelShape,
        topology: Topology,
        layout: Layout,
        transformer: TransformerConfig,
        chunks: list[GPTModel],
    ) -> None:
        """Freeze ``chunks``, whose weights are loaded, and attach what ``config.lora`` asks for. Collective.

        Raises ValueError where the section doesn't fit the model or the layout, CheckpointError where
        ``lora.start_from`` holds other adapters.
        """
        found = adapters_of(config.lora, shape)
        if found is None:
            raise ValueError("lora.rank is 0: there are no adapters")
        if problems := list(adapter_faults(found, shape, layout)):
            raise ValueError("; ".join(problems))
        self.adapters: Adapters = found
        self._shape, self._layout, self._rank = shape, layout, topology.rank
        self._chunks = chunks
        self._train_router = config.lora.train_router
        freeze(chunks, train_router=config.lora.train_router)
        options = AdapterOptions(
            found,
            config.lora.dropout,
            transformer.sequence_parallel,
            transformer.params_dtype,
            platform.current().device,
        )
        linears = adapted_linears(found, shape, layout, topology.rank)
        self.modules = attach(chunks, linears, options)
        self._start(config)
        self.base_sha256 = shared_digest(config.model.hf_checkpoint, topology)
        reduce_grads = transformer.finalize_model_grads_func

        def reduce_all_grads(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
            reduce_grads(chunks, num_tokens, **kwargs)
            sum_expert_tensor_grads(chunks)

        transformer.finalize_model_grads_func = reduce_all_grads

    def merged(self, parameters: Mapping[ParameterKey, Parameter]) -> Mapping[ParameterKey, Tensor]:
        """This rank's whole weights at this moment, adapters merged into the frozen ones."""
        return MergedWeights(parameters, self.modules)

    def frozen(self) -> AbstractContextManager[None]:
        """Within it the model computes without its adapters."""
        return without_adapters(self.modules)

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
        """Write the adapters in PEFT's format; see ``Trainer.export_peft``. Collective."""
        if self._train_router:
            raise ValueError(
                "lora.train_router is true: a folder of adapters can't hold the routers; export the "
                "merged model"
            )
        buckets = self.tensors()

        def write() -> None:
            named = (pair for bucket in buckets for pair in bucket)
            dtype = next(iter(adapter_values(self.modules).values())).dtype
            write_peft(out_dir, self.adapters, self._shape, named, base=base, dtype=dtype)

        write_on_rank_0(write, buckets, f"{out_dir}: the adapters were not written")

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

    def _start(self, config: PolicyConfig) -> None:
        lora, rank = config.lora, self.adapters.rank
        dims = adapter_tensors(self.adapters, self._shape)
        table = adapter_parameters(self.adapters, self._shape, self._layout, self._rank)
        if lora.start_from is None:
            start = partial(initial_tensor, rank=rank, seed=config.run.seed, init=lora.init)
            fill(self.modules, table, start, dims)
            return
        with PeftReader(Path(lora.start_from), self.adapters, self._shape) as reader:
            fill(self.modules, table, reader.read, dims)


def weights_of(
    policy: AdaptedPolicy | None, parameters: Mapping[ParameterKey, Parameter]
) -> Mapping[ParameterKey, Tensor]:
    """The policy's whole weights on this rank, with or without adapters."""
    if policy is None:
        return {key: p.data for key, p in parameters.items()}
    return policy.merged(parameters)
