"""Plan a recipe on a cluster: check its layout, compute its plan, and search the layouts that fit, best first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
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
from megatron_dppo.config import forwarded, speculation
from megatron_dppo.config.checks import batch_faults, colocation_faults, held_weight_faults
from megatron_dppo.config.layout import layout_faults, world_faults
from megatron_dppo.config.lora import lora_faults
from megatron_dppo.config.machine import has_server_sizes, server_size_faults
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.engine_layout import EngineLayout, engine_size_faults, server_ranks
from megatron_dppo.model.layout import LayoutSizes, model_faults, size_faults
from megatron_dppo.model.shape import ModelShape

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
_RECOMPUTE = ("none", "selective", "full")
MOST_SHARES = 64
"""The largest number of divisions of a cluster between trainer and servers that the search tries."""
MOST_TENSOR = 8
"""The largest tensor-parallel size that the search tries, for trainer and servers."""
_TENSOR_SIZES = tuple(size for size in _POWERS if size <= MOST_TENSOR)
LEAST_CONTEXT = 8192
"""The search divides the longest sequence only so far that each context-parallel rank has at least this many tokens.
Assumption: with fewer tokens, attention takes less time than the exchange of keys and values."""
MOST_NODES = 16
"""The largest number of nodes that the search for a larger cluster tries."""
FULLEST = 0.9
"""The largest used share of a GPU's memory in a proposed layout: the planner is accurate within 10%."""


@dataclass(frozen=True)
class Question:
    """A recipe on a cluster.

    Attributes:
        config: the recipe.
        shape: the model.
        cluster: the cluster.
        mean_response, mean_prompt: assumed or measured tokens; None for the assumptions of ``facts_of``.
        storage: bytes/s of the shared file system.
    """

    config: TrainConfig
    shape: ModelShape
    cluster: Cluster
    mean_response: float | None = None
    mean_prompt: float | None = None
    storage: float = STORAGE

    @property
    def schedule(self) -> Schedule:
        """The schedule of the recipe."""
        return schedule_of(self.config)

    def layout_faults(self) -> list[str]:
        """List the faults of the layout and of the schedule.

        The sizes must fit each other, the model and the batch sizes. The checks read no file.
        """
        config = self.config
        sizes = config.parallel.sizes
        faults = list(world_faults(sizes))
        if not faults:
            # ``batch_faults`` divides batch sizes by the number of replicas, so it needs a valid number of ranks.
            per_step = config.training.prompts_per_mini_batch
            faults += batch_faults(config.rollout, per_step, config.parallel.data)
        faults += layout_faults(sizes, config.megatron, self.shape)
        faults += forwarded.SGLANG.faults(config.sglang)
        faults += server_size_faults(config.sglang)
        faults += lora_faults(config.lora, sizes, self.shape, has_engines=True)
        faults += colocation_faults(config, "cuda")
        faults += held_weight_faults(config.weight_sync, config.engine)
        faults += speculation.run_faults(config, self.shape)
        return faults

    def facts(self) -> RunFacts:
        """Return the facts of the run. The layout must be valid."""
        return facts_of(
            self.config, self.shape, mean_response=self.mean_response, mean_prompt=self.mean_prompt
        )

    def plan(self) -> RunPlan:
        """Return the plan of the run. The layout must be valid."""
        return plan_run(self.facts(), self.cluster, self.storage)


@dataclass(frozen=True)
class Proposal:
    """A layout that fits.

    Attributes:
        changes: the differences from the recipe, as overrides for the command line.
        question: the recipe with the changes.
        plan: the plan of ``question``.
    """

    changes: tuple[str, ...]
    question: Question
    plan: RunPlan

    @property
    def seconds(self) -> float:
        """Expected seconds of a step."""
        assert self.plan.seconds is not None
        return self.plan.seconds.total


def schedules(question: Question) -> tuple[Schedule, ...]:
    """Return the on-policy, stale and colocated schedules, and the recipe's schedule if it differs from all three."""
    return tuple(dict.fromkeys((ON_POLICY, STALE, COLOCATED, question.schedule)))


def search_schedules(question: Question) -> list[Proposal]:
    """Return each layout that fits under any of ``schedules``, sorted by the expected seconds of a step."""
    proposals: list[Proposal] = []
    for schedule in schedules(question):
        proposals += _fitting(_with_schedule(question, schedule), question)
    return sorted(proposals, key=lambda proposal: proposal.seconds)


def best_of_each(proposals: list[Proposal], count: int) -> list[Proposal]:
    """Return the first ``count`` proposals of each schedule, in the given order."""
    counts: Counter[Schedule] = Counter()
    best_proposals = []
    for proposal in proposals:
        counts[proposal.question.schedule] += 1
        if counts[proposal.question.schedule] <= count:
            best_proposals.append(proposal)
    return best_proposals


def search(question: Question) -> list[Proposal]:
    """Return each valid layout of the cluster's GPUs that fits, sorted by the expected seconds of a step.

    The schedule is the recipe's. The search tries:

    - numbers of GPUs for trainer and servers, in steps of half a node;
    - tensor, pipeline, virtual pipeline and expert sizes;
    - context sizes that leave each rank at least ``LEAST_CONTEXT`` tokens of the longest sequence;
    - the three recompute settings;
    - the servers' tensor sizes.

    The optimizer is distributed. All other settings are the recipe's.
    """
    proposals = _fitting(_with_schedule(question, question.schedule), question)
    return sorted(proposals, key=lambda proposal: proposal.seconds)


def least_nodes(question: Question) -> Cluster | None:
    """Add nodes to the cluster until some layout fits, and return this cluster.

    The result is None if no layout fits on up to ``MOST_NODES`` nodes.
    """
    for nodes in range(question.cluster.nodes + 1, MOST_NODES + 1):
        larger_cluster = replace(question.cluster, nodes=nodes)
        larger_question = _with_schedule(
            replace(question, cluster=larger_cluster), question.schedule
        )
        if next(_fitting(larger_question, question), None) is not None:
            return larger_cluster
    return None


def nearest(proposals: list[Proposal], count: int) -> list[Proposal]:
    """Return the ``count`` proposals with the fewest changes to the recipe. Among equals, the fastest come first."""
    return sorted(proposals, key=lambda p: (len(p.changes), p.seconds))[:count]


def _fitting(question: Question, question_before: Question) -> Iterator[Proposal]:
    """Yield the layouts that fit, with their changes to the recipe of ``question_before``."""
    for candidate in _candidates(question):
        if candidate.layout_faults():
            continue
        plan = candidate.plan()
        is_safe = plan.fullest.total <= FULLEST * question.cluster.device.memory
        if plan.fits and is_safe and plan.seconds is not None:
            yield Proposal(tuple(_changes(question_before, candidate)), candidate, plan)


def _candidates(question: Question) -> Iterator[Question]:
    for ranks, servers, engine_tensor in _splits(question):
        for sizes, recompute in product(_layouts(ranks, question), _RECOMPUTE):
            yield _with_layout(question, sizes, recompute, servers, engine_tensor)


def _layouts(ranks: int, question: Question) -> Iterator[LayoutSizes]:
    """Yield the layouts of ``ranks`` ranks that can hold the model.

    The size of expert tensor parallelism follows from the other sizes.
    """
    shape = question.shape
    longest = question.config.longest_sequence
    contexts = [size for size in _POWERS if size == 1 or longest // size >= LEAST_CONTEXT]
    experts: tuple[int, ...] = (1,)
    if shape.is_moe:
        experts = tuple(size for size in _POWERS if shape.num_experts % size == 0)
    for tensor, pipeline, virtual, expert, context in product(
        _TENSOR_SIZES, _POWERS, (None, 2, 4), experts, contexts
    ):
        # Check the sizes before anything is planned: a plan takes far longer than both checks.
        sizes = LayoutSizes(ranks, tensor, pipeline, virtual, expert, context=context)
        if not size_faults(sizes) and not model_faults(sizes, shape):
            yield sizes


def _splits(question: Question) -> Iterator[tuple[int, int, int]]:
    """Yield (trainer ranks, servers, GPUs of a server) for the whole cluster.

    Trainer and servers divide the GPUs in steps of half a node, or of more on a cluster with more than ``MOST_SHARES``
    halves. If they are colocated, both use all GPUs. The GPUs of a
    server are its tensor-parallel ranks: a run accepts no pipeline stages of servers.
    """
    config = question.config
    cluster = question.cluster
    if not config.engine.servers_to_start or config.rollout.replays:
        yield cluster.gpus, 0, 1
        return
    half_node = max(1, cluster.gpus_per_node // 2)
    step = half_node * math.ceil(cluster.gpus / half_node / MOST_SHARES)
    gpu_shares = [(ranks, cluster.gpus - ranks) for ranks in range(step, cluster.gpus, step)]
    if question.schedule.is_colocated:
        gpu_shares = [(cluster.gpus, cluster.gpus)]
    if not has_server_sizes(config.sglang):
        return
    layout = EngineLayout.of_options(config.sglang)
    for (ranks, serving_gpus), tensor in product(gpu_shares, _TENSOR_SIZES):
        has_faults = any(engine_size_faults(tensor, layout.expert, layout.attention_replicas))
        if tensor <= cluster.gpus_per_node and serving_gpus % tensor == 0 and not has_faults:
            yield ranks, serving_gpus // tensor, tensor


def _with_layout(
    question: Question, sizes: LayoutSizes, recompute: str, servers: int, engine_tensor: int
) -> Question:
    """Return the question with another layout in its recipe."""
    sglang = question.config.sglang
    if engine_tensor != server_ranks(sglang):
        sglang = {**sglang, "tp_size": engine_tensor}
        config = question.config.model_copy(update={"sglang": sglang})
        question = replace(question, config=config)
    return _with_values(
        question,
        {
            "parallel": asdict(sizes),
            "training": {"recompute": recompute},
            "optimizer": {"distributed": True},
            "engine": {"servers": servers},
        },
    )


def _with_schedule(question: Question, schedule: Schedule) -> Question:
    """Return the question with another schedule in its recipe, and with weight updates that reach the servers."""
    config = question.config
    rollout: dict[str, Any] = {"max_staleness": schedule.staleness}
    if schedule.staleness and (config.rollout.interrupt == "drain") != schedule.drains:
        rollout["interrupt"] = "drain" if schedule.drains else "retract"
    engine: dict[str, Any] = {"placement": schedule.placement}
    weight_sync = _reaching_sync(config, schedule, question.cluster.nodes)
    if schedule.is_colocated:
        # Servers that give up their weights for every training step hold none of the previous version.
        engine["atomic_updates"] = weight_sync["changes_only"] = False
    return _with_values(
        question, {"rollout": rollout, "engine": engine, "weight_sync": weight_sync}
    )


def _reaching_sync(config: TrainConfig, schedule: Schedule, nodes: int) -> dict[str, Any]:
    """Return the keys of ``weight_sync:`` with which updates reach all servers of ``nodes`` nodes."""
    strategy: str = config.weight_sync.strategy
    directory = config.weight_sync.directory
    if schedule.is_colocated and strategy == "distributed":
        strategy = "tensor"
    elif nodes > 1 and strategy == "tensor" and not schedule.is_colocated:
        # Servers on nodes of their own share no memory with a trainer rank.
        strategy = "distributed"
    if nodes > 1 and strategy == "disk" and directory is None:
        # All nodes see the run's folder. By default, updates are written to the memory of one node.
        directory = f"{config.run.directory}/weights"
    return {"strategy": strategy, "directory": directory}


def _with_values(question: Question, values: Mapping[str, Mapping[str, Any]]) -> Question:
    """Return the question with other values in sections of its recipe."""
    config = question.config
    sections = {
        name: getattr(config, name).model_copy(update=changed) for name, changed in values.items()
    }
    return replace(question, config=config.model_copy(update=sections))


def _changes(question_before: Question, question_after: Question) -> Iterator[str]:
    """Yield the overrides that turn the recipe of ``question_before`` into the recipe of ``question_after``."""
    new_config = question_after.config
    for section in ("parallel", "training", "optimizer", "engine", "rollout", "weight_sync"):
        new_section = getattr(new_config, section)
        # The default of a key may depend on other sections. So ``base_config`` differs from ``new_config`` in this
        # section alone.
        old_section = getattr(question_before.config, section)
        base_config = new_config.model_copy(update={section: old_section})
        for key in type(new_section).model_fields:
            if _effective(base_config, section, key) != _effective(new_config, section, key):
                yield f"{section}.{key}={_override_text(getattr(new_section, key))}"
    tensor = server_ranks(new_config.sglang)
    if tensor != server_ranks(question_before.config.sglang):
        yield f"sglang.tp_size={tensor}"


def _override_text(value: Any) -> str:
    """Return a key's value as the command line takes it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _effective(config: TrainConfig, section: str, key: str) -> Any:
    """Return a key's value. If the key is empty, return its default, which follows from other keys."""
    match section, key:
        case "parallel", "expert_tensor":
            return config.parallel.sizes.expert_tensor_size
        case "optimizer", "distributed":
            return config.distributed_optimizer
        case "engine", "servers":
            return config.engine.servers_to_start
    return getattr(getattr(config, section), key)
