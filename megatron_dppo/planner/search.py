"""The layouts that fit a cluster, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron_dppo.config.checks import LAYOUT_CHECKS, batch_problems, world_problems
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.layout import LayoutSizes, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import Cluster
from megatron_dppo.planner.facts import job_of
from megatron_dppo.planner.run_plan import Verdict, verdict

# Whether a configuration's layout is one at all: the checks that come before any arithmetic.


def layout_problems(config: TrainConfig, shape: ModelShape) -> list[str]:
    """What is wrong with the layout by itself, with the model, and with the batch sizes; no file is looked at."""
    problems = list(world_problems(config)) or [*batch_problems(config)]
    return problems + [p for check in LAYOUT_CHECKS for p in check(config, shape)]


_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
_RECOMPUTE = ("none", "selective", "full")
MOST_TENSOR = 8
MOST_NODES = 16
"""Up to which more nodes are looked for."""
FULLEST = 0.9
"""Share of a GPU's memory up to which a layout is proposed: the planner is right within 10%."""


@dataclass(frozen=True)
class Proposal:
    """A layout that fits. ``changes``: what differs from the recipe, as overrides of the command line."""

    changes: tuple[str, ...]
    config: TrainConfig
    plan: Verdict

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.plan.seconds is not None
        return self.plan.seconds.total


@dataclass(frozen=True)
class Lengths:
    """Assumed or measured means, tokens; None: as ``job_of`` assumes."""

    response: float | None = None
    prompt: float | None = None


def search(
    config: TrainConfig, shape: ModelShape, cluster: Cluster, lengths: Lengths | None = None
) -> list[Proposal]:
    """Every valid layout of the cluster's GPUs that fits, by expected seconds of a step.

    Tried: trainer and engine shares in halves of a node, tensor, pipeline, virtual pipeline and expert sizes, the three
    recompute settings, the servers' tensor sizes. All else stays as the recipe says; the optimizer is distributed.
    """
    found = _fitting(config, shape, cluster, lengths or Lengths())
    return sorted(found, key=lambda proposal: proposal.seconds)


def least_nodes(
    config: TrainConfig, shape: ModelShape, cluster: Cluster, lengths: Lengths | None = None
) -> Cluster | None:
    """The cluster with the fewest more nodes of its kind on which some layout fits; None where none of ``MOST_NODES``
    does."""
    for nodes in range(cluster.nodes + 1, MOST_NODES + 1):
        larger = replace(cluster, nodes=nodes)
        if next(_fitting(config, shape, larger, lengths or Lengths()), None) is not None:
            return larger
    return None


def _fitting(
    config: TrainConfig, shape: ModelShape, cluster: Cluster, lengths: Lengths
) -> Iterator[Proposal]:
    for changed in _candidates(config, shape, cluster):
        if layout_problems(changed, shape):
            continue
        job = job_of(
            changed,
            shape,
            mean_response=lengths.response,
            mean_prompt=lengths.prompt,
            ranks_per_node=cluster.gpus_per_node,
        )
        plan = verdict(job, cluster)
        is_safe = plan.fullest.total <= FULLEST * cluster.device.memory
        if plan.fits and is_safe and plan.seconds is not None:
            yield Proposal(tuple(_changes(config, changed)), changed, plan)


def nearest(proposals: list[Proposal], count: int) -> list[Proposal]:
    """Those with the fewest changes to the recipe, the fastest of them first."""
    return sorted(proposals, key=lambda p: (len(p.changes), p.seconds))[:count]


def _candidates(config: TrainConfig, shape: ModelShape, cluster: Cluster) -> Iterator[TrainConfig]:
    for world, servers, engine_tensor in _splits(config, cluster):
        for sizes in _layouts(world, shape):
            for recompute in _RECOMPUTE:
                yield _with(
                    config,
                    parallel=asdict(sizes),
                    recompute=recompute,
                    servers=servers,
                    engine_tensor=engine_tensor,
                )


def _layouts(world: int, shape: ModelShape) -> Iterator[LayoutSizes]:
    """The layouts of ``world`` ranks that hold the model; expert tensor parallelism as it follows from the rest."""
    sizes = product(_tensors(), _POWERS, (None, 2, 4), _experts(shape))
    for tensor, pipeline, virtual, expert in sizes:
        found = LayoutSizes(world, tensor, pipeline, virtual, expert)
        if not size_faults(found) and not model_faults(found, shape):
            yield found


def _tensors() -> tuple[int, ...]:
    return tuple(size for size in _POWERS if size <= MOST_TENSOR)


def _experts(shape: ModelShape) -> tuple[int, ...]:
    if not shape.is_moe:
        return (1,)
    return tuple(size for size in _POWERS if shape.num_experts % size == 0)


def _splits(config: TrainConfig, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """(trainer ranks, servers, GPUs of a server) of the whole cluster, in halves of a node."""
    if not config.engine.started or config.rollout.replay_from is not None:
        yield cluster.gpus, 0, 1
        return
    step = max(1, cluster.gpus_per_node // 2)
    for world in range(step, cluster.gpus, step):
        for tensor in _tensors():
            if tensor <= cluster.gpus_per_node and (cluster.gpus - world) % tensor == 0:
                yield world, (cluster.gpus - world) // tensor, tensor


def _with(
    config: TrainConfig,
    *,
    parallel: dict[str, Any],
    recompute: str,
    servers: int,
    engine_tensor: int,
) -> TrainConfig:
    table = {**config.sglang}
    if engine_tensor != int(table.get("tp_size") or 1):
        table["tp_size"] = engine_tensor
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "training": config.training.model_copy(update={"recompute": recompute}),
            "optimizer": config.optimizer.model_copy(update={"distributed": True}),
            "engine": config.engine.model_copy(update={"servers": servers}),
            "sglang": table,
        }
    )


def _changes(before: TrainConfig, after: TrainConfig) -> Iterator[str]:
    for section in ("parallel", "training", "optimizer", "engine"):
        old, new = getattr(before, section), getattr(after, section)
        for key in type(new).model_fields:
            if _meaning(old, key) != _meaning(new, key):
                value = getattr(new, key)
                yield f"{section}.{key}=" + ("" if value is None else str(value).lower())
    if (before.sglang.get("tp_size") or 1) != (after.sglang.get("tp_size") or 1):
        yield f"sglang.tp_size={after.sglang['tp_size']}"


def _meaning(section: Any, key: str) -> Any:
    """A field's value, its default filled in where that depends on others."""
    if key == "expert_tensor":
        return section.sizes.expert_tensor_size
    return section.started if key == "servers" else getattr(section, key)
