"""A recipe on a cluster: whether its layout is one at all, its plan, and the layouts that fit, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megatron_dppo.cluster.planner.devices import Cluster
from megatron_dppo.cluster.planner.facts import (
    COLOCATED,
    ON_POLICY,
    STALE,
    RunFacts,
    Schedule,
    facts_of,
    schedule_of,
)
from megatron_dppo.cluster.planner.run_plan import RunPlan, plan_run
from megatron_dppo.cluster.planner.traffic import STORAGE
from megatron_dppo.config.checks import batch_faults
from megatron_dppo.config.layout import layout_faults, world_faults
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.layout import LayoutSizes, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
_RECOMPUTE = ("none", "selective", "full")
MOST_TENSOR = 8
LEAST_CONTEXT = 8192
"""Tokens of the longest sequence below which a rank's attention takes less time than the exchange for it.
Assumption."""
MOST_NODES = 16
"""Up to which more nodes are looked for."""
FULLEST = 0.9
"""Share of a GPU's memory up to which a layout is proposed: the planner is right within 10%."""


@dataclass(frozen=True)
class Question:
    """A recipe on a cluster.

    ``mean_response``, ``mean_prompt``: assumed or measured, tokens; None: as ``facts_of`` assumes. ``storage``:
    bytes/s of the shared file system. ``other``: a schedule in place of the recipe's.
    """

    config: TrainConfig
    shape: ModelShape
    cluster: Cluster
    mean_response: float | None = None
    mean_prompt: float | None = None
    storage: float = STORAGE
    other: Schedule | None = None

    @property
    def schedule(self) -> Schedule:
        return self.other or schedule_of(self.config.rollout, self.config.engine)

    def layout_faults(self) -> list[str]:
        """What is wrong with the layout by itself, with the model, and with the batch sizes; no file is looked at."""
        # Batch sizes are shared out over replicas, of which a wrong world has no number.
        config = self.config
        sizes, per_step = config.parallel.sizes, config.training.prompts_per_mini_batch
        batch = batch_faults(config.rollout, per_step, config.parallel.data)
        faults = list(world_faults(sizes)) or list(batch)
        faults += layout_faults(sizes, config.megatron, self.shape)
        if config.lora.rank and sizes.tensor > self.shape.num_query_groups:
            groups = self.shape.num_query_groups
            faults.append(
                f"parallel.tensor: got {sizes.tensor}, with adapters expected at most the {groups} key-value heads"
            )
        return faults

    def facts(self) -> RunFacts:
        """Of the run. The layout must be one."""
        return facts_of(
            self.config,
            self.shape,
            mean_response=self.mean_response,
            mean_prompt=self.mean_prompt,
            ranks_per_node=self.cluster.gpus_per_node,
            schedule=self.schedule,
        )

    def plan(self) -> RunPlan:
        """The plan. The layout must be one."""
        return plan_run(self.facts(), self.cluster, self.storage)


@dataclass(frozen=True)
class Proposal:
    """A layout that fits. ``changes``: what differs from the recipe, as overrides of the command line."""

    changes: tuple[str, ...]
    question: Question
    plan: RunPlan

    @property
    def seconds(self) -> float:
        assert self.plan.seconds is not None
        return self.plan.seconds.total


def schedules(question: Question) -> tuple[Schedule, ...]:
    """On-policy, stale and colocated, and the recipe's own where it is none of them."""
    return tuple(dict.fromkeys((ON_POLICY, STALE, COLOCATED, question.schedule)))


def search_schedules(question: Question) -> list[Proposal]:
    """Every layout that fits under any of ``schedules``, by expected seconds of a step."""
    proposals: list[Proposal] = []
    for schedule in schedules(question):
        proposals += _fitting(replace(question, other=schedule), question)
    return sorted(proposals, key=lambda proposal: proposal.seconds)


def best_of_each(proposals: list[Proposal], count: int) -> list[Proposal]:
    """The first ``count`` of each schedule, in their order."""
    counts: Counter[Schedule] = Counter()
    best = []
    for proposal in proposals:
        counts[proposal.question.schedule] += 1
        if counts[proposal.question.schedule] <= count:
            best.append(proposal)
    return best


def search(question: Question) -> list[Proposal]:
    """Every valid layout of the cluster's GPUs that fits under the question's schedule, by expected seconds of a step.

    Tried: trainer and engine shares in halves of a node, tensor, context (while each rank has ``LEAST_CONTEXT`` tokens
    of the longest sequence), pipeline, virtual pipeline and expert sizes, the three recompute settings, the servers'
    tensor sizes. All else stays as the recipe says; the optimizer is distributed.
    """
    return sorted(_fitting(question, question), key=lambda proposal: proposal.seconds)


def least_nodes(question: Question) -> Cluster | None:
    """The cluster with the fewest more nodes of its kind on which some layout fits; None where none of ``MOST_NODES``
    does."""
    for nodes in range(question.cluster.nodes + 1, MOST_NODES + 1):
        larger = replace(question.cluster, nodes=nodes)
        widened = replace(question, cluster=larger)
        if next(_fitting(widened, widened), None) is not None:
            return larger
    return None


def nearest(proposals: list[Proposal], count: int) -> list[Proposal]:
    """Those with the fewest changes to the recipe, the fastest of them first."""
    return sorted(proposals, key=lambda p: (len(p.changes), p.seconds))[:count]


def _fitting(question: Question, before: Question) -> Iterator[Proposal]:
    for candidate in _candidates(question):
        if candidate.layout_faults():
            continue
        plan = candidate.plan()
        is_safe = plan.fullest.total <= FULLEST * question.cluster.device.memory
        if plan.fits and is_safe and plan.seconds is not None:
            yield Proposal(tuple(_changes(before, candidate)), candidate, plan)


def _candidates(question: Question) -> Iterator[Question]:
    for world, servers, engine_tensor in _splits(question):
        for sizes, recompute in product(_layouts(world, question), _RECOMPUTE):
            yield _changed(question, sizes, recompute, servers, engine_tensor)


def _layouts(world: int, question: Question) -> Iterator[LayoutSizes]:
    """The layouts of ``world`` ranks that hold the model; expert tensor parallelism as it follows from the rest."""
    shape, config = question.shape, question.config
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = config.environment.longest(prompt, response)
    contexts = [size for size in _POWERS if size == 1 or longest // size >= LEAST_CONTEXT]
    experts: tuple[int, ...] = (1,)
    if shape.is_moe:
        experts = tuple(size for size in _POWERS if shape.num_experts % size == 0)
    for tensor, pipeline, virtual, expert, context in product(
        _tensors(), _POWERS, (None, 2, 4), experts, contexts
    ):
        # Sizes alone first: a plan takes far longer than both checks.
        sizes = LayoutSizes(world, tensor, pipeline, virtual, expert, context=context)
        if not size_faults(sizes) and not model_faults(sizes, shape):
            yield sizes


def _tensors() -> tuple[int, ...]:
    return tuple(size for size in _POWERS if size <= MOST_TENSOR)


def _splits(question: Question) -> Iterator[tuple[int, int, int]]:
    """(trainer ranks, servers, GPUs of a server) of the whole cluster, in halves of a node, or all of it twice."""
    config, cluster = question.config, question.cluster
    if not config.engine.started or config.rollout.replay_from is not None:
        yield cluster.gpus, 0, 1
        return
    step = max(1, cluster.gpus_per_node // 2)
    shares = [(world, cluster.gpus - world) for world in range(step, cluster.gpus, step)]
    if question.schedule.is_colocated:
        shares = [(cluster.gpus, cluster.gpus)]
    for (world, serving), tensor in product(shares, _tensors()):
        if tensor <= cluster.gpus_per_node and serving % tensor == 0:
            yield world, serving // tensor, tensor


def _changed(
    question: Question, sizes: LayoutSizes, recompute: str, servers: int, engine_tensor: int
) -> Question:
    config = question.config
    table = {**config.sglang}
    if engine_tensor != _engine_tensor(question):
        table["tp_size"] = engine_tensor
    sections: dict[str, dict[str, Any]] = {
        "parallel": asdict(sizes),
        "training": {"recompute": recompute},
        "optimizer": {"distributed": True},
        "engine": {"servers": servers},
    }
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return replace(question, config=config.model_copy(update={**changed, "sglang": table}))


def _changes(before: Question, after: Question) -> Iterator[str]:
    for section in ("parallel", "training", "optimizer", "engine"):
        new = getattr(after.config, section)
        # What the other changes alone would give.
        unchanged = after.config.model_copy(update={section: getattr(before.config, section)})
        for key in type(new).model_fields:
            if _meaning(unchanged, section, key) != _meaning(after.config, section, key):
                value = getattr(new, key)
                yield f"{section}.{key}=" + ("" if value is None else str(value).lower())
    if _engine_tensor(before) != _engine_tensor(after):
        yield f"sglang.tp_size={_engine_tensor(after)}"
    yield from _schedule_changes(before.schedule, after.schedule)


def _schedule_changes(before: Schedule, after: Schedule) -> Iterator[str]:
    if before.staleness != after.staleness:
        yield f"rollout.max_staleness={after.staleness}"
    if before.drains != after.drains:
        yield f"rollout.interrupt={'drain' if after.drains else 'retract'}"
    if before.placement != after.placement:
        yield f"engine.placement={after.placement}"


def _engine_tensor(question: Question) -> int:
    return int(question.config.sglang.get("tp_size") or 1)


def _meaning(config: TrainConfig, section: str, key: str) -> Any:
    """A key's value, its default filled in where that depends on others: a default is no change to suggest."""
    match section, key:
        case "parallel", "expert_tensor":
            return config.parallel.sizes.expert_tensor_size
        case "optimizer", "distributed":
            return config.distributed_optimizer
        case "engine", "servers":
            return config.engine.started
    return getattr(getattr(config, section), key)
