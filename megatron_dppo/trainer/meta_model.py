"""A rank's real Megatron modules at full size on the meta device, and their shapes against the conversion's rules.

No memory is taken and no other process is needed: torch's fake process group stands for a world of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.megatron_config import transformer_config
from megatron_dppo.trainer.model import make_chunks


@dataclass(frozen=True)
class MetaComparison:
    """What was found in the modules of some ranks. ``problems``: a line for each parameter that the rules lack, that
    the modules lack, or whose shape differs."""

    layout: str
    ranks: tuple[int, ...]
    parameters: int
    elements: int
    problems: tuple[str, ...]

    def summary(self) -> str:
        """In a line."""
        verdict = f"{len(self.problems)} differ" if self.problems else "all as the rules say"
        return (
            f"{self.layout}: Megatron's modules of ranks {', '.join(map(str, self.ranks))}, {self.parameters:,} "
            f"parameters of {self.elements / 1e9:.2f} B elements: {verdict}"
        )


def compare(config: PolicyConfig, shape: ModelShape) -> MetaComparison:
    """Build the first and the last rank of ``config``'s layout, and compare every parameter's name and shape with
    ``model.mapping.local_parameters``. The process must be in no process group."""
    layout = Layout.of(config.parallel.sizes)
    ranks = tuple(sorted({0, layout.world_size - 1}))
    problems: list[str] = []
    count = elements = 0
    for rank in ranks:
        made = meta_parameters(config, shape, layout, rank)
        expected = {(p.chunk, p.name): p.shape for p in local_parameters(shape, layout, rank)}
        problems += [
            f"rank {rank} of {layout.describe()}: {text}" for text in differences(made, expected)
        ]
        count += len(made)
        elements += sum(torch.Size(dims).numel() for dims in made.values())
    return MetaComparison(layout.describe(), ranks, count, elements, tuple(problems))


def meta_parameters(
    config: PolicyConfig, shape: ModelShape, layout: Layout, rank: int
) -> dict[tuple[int, str], tuple[int, ...]]:
    """(chunk, name) -> shape of every parameter of ``rank``'s GPTModels."""
    transformer = transformer_config(config, shape, layout)
    transformer = replace(transformer, perform_initialization=False)
    with _fake_world(layout, rank), torch.device("meta"):
        chunks = make_chunks(transformer, shape)
        return {
            (number, name): tuple(parameter.shape)
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }


def differences(
    made: dict[tuple[int, str], tuple[int, ...]], expected: dict[tuple[int, str], tuple[int, ...]]
) -> Iterator[str]:
    """A line for each parameter whose shape is not the expected one, or that only one side has."""
    for key in sorted(made.keys() | expected.keys()):
        if made.get(key) != expected.get(key):
            yield (
                f"chunk {key[0]}, {key[1]}: Megatron has {made.get(key, 'none')}, expected "
                f"{expected.get(key, 'none')} by the rules"
            )


@contextmanager
def _fake_world(layout: Layout, rank: int) -> Iterator[None]:
    """This process as ``rank`` of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        platform.seed_everything(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
