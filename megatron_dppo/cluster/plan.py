"""Compute the memory, traffic and time of a recipe on a cluster, and decide whether it fits.

``megatron-dppo plan RECIPE.yaml [key.path=value ...] --gpu h100 --nodes 4`` reads only the recipe and the model's
config.json. The command prints the memory of each rank, server and host, the bytes and seconds of a step, and whether
the recipe fits. The output is tables or JSON; ``--png`` also draws the memory of each GPU. Exit codes: 0 it fits, 2
refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dppo.cluster.known_models import KNOWN_MODELS, read_model
from megatron_dppo.cluster.planner import activations, step_time
from megatron_dppo.cluster.planner.devices import (
    DEVICES,
    GB,
    GIB,
    NETWORK_LATENCY,
    Cluster,
    gb,
    gib,
)
from megatron_dppo.cluster.planner.recipes import load_recipe
from megatron_dppo.cluster.planner.run_plan import RunPlan
from megatron_dppo.cluster.planner.search import (
    MOST_NODES,
    Proposal,
    Question,
    best_of_each,
    least_nodes,
    nearest,
    search,
    search_schedules,
)
from megatron_dppo.cluster.planner.server_memory import EngineBytes
from megatron_dppo.cluster.planner.step_time import StepSeconds, model_flops_utilisation
from megatron_dppo.cluster.planner.weight_plan import weight_plan
from megatron_dppo.config import ConfigError
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.logging import fatal
from megatron_dppo.model.mapping import parameter_count
from megatron_dppo.model.resharding import figures_table
from megatron_dppo.spec import ServersSpec
from megatron_dppo.system.arguments import (
    file_to_write,
    finite_number,
    positive_number,
    whole_number,
)
from megatron_dppo.system.errors import RunError


def print_plan(console: Console, plan: RunPlan) -> None:
    """Print all parts of the plan, and then the verdict."""
    for text in _head(plan):
        console.print(text)
    for table in (
        _roles(plan),
        _ranks(plan),
        _engine(plan),
        *_teachers(plan),
        _hosts(plan),
        _data(plan),
        _time(plan),
    ):
        if table is not None:
            console.print(table)
    for line in (_rates(plan), _shared(plan), _evaluation(plan)):
        if line is not None:
            console.print(line)
    _print_assumptions(console, plan)
    print_verdict(console, plan)


LEAST_SPARE = 0.02
"""Share of a memory below which a plan that fits is a warning: the estimates are not that exact."""


def verdict_of(plan: RunPlan) -> str:
    """Return in words that the plan fits, and by how little."""
    use = plan.fullest_memory
    spare = 1 - use.share
    text = f"{gib(use.size - use.used)} ({spare:.1%}) of the {gib(use.size)} of the {use.name} are spare."
    if spare >= LEAST_SPARE:
        return f"It fits: {text}"
    return (
        f"It fits on paper only: {text} That is less than the estimate's error, expected at least "
        f"{LEAST_SPARE:.0%}: change the layout, or lower sglang.mem_fraction_static or training.micro_batch_tokens"
    )


def print_verdict(console: Console, plan: RunPlan) -> None:
    """Print that the plan fits, with its limits, or print all of its faults."""
    if plan.fits:
        console.print(verdict_of(plan), soft_wrap=True)
        console.print(f"Limits: {plan.memory_limit}; {plan.time_limit}.")
        return
    console.print("It can't work:")
    for fault in plan.faults:
        console.print(f"  {fault}", soft_wrap=True)


def print_proposals(console: Console, proposals: Sequence[Proposal]) -> None:
    """Print the layouts of a search, best first, with the overrides that turn the recipe into each layout."""
    table = figures_table(
        "Layouts that fit",
        *("step", "GPU idle", "placement", "staleness", "generate", "train", "rank", "layout"),
        *("servers", "recompute"),
    )
    for proposal in proposals:
        plan = proposal.plan
        seconds = plan.seconds
        engine = plan.facts.engine
        schedule = plan.facts.schedule
        assert seconds is not None
        table.add_row(
            f"{seconds.total:.0f} s",
            f"{plan.gpu_idle:.0%}",
            schedule.placement,
            str(schedule.staleness),
            f"{seconds.servers:.0f} s",
            f"{seconds.trainer:.0f} s",
            gib(plan.fullest.total),
            plan.facts.trainer.layout.describe(),
            f"{engine.started} x TP{engine.layout.tensor}",
            plan.facts.trainer.recompute,
        )
    console.print(table)
    for number, proposal in enumerate(proposals, start=1):
        changes = " ".join(proposal.changes) or "the recipe as it is"
        console.print(f"  {number}: {changes}", soft_wrap=True)


def _head(plan: RunPlan) -> Iterable[str]:
    facts = plan.facts
    cluster = plan.cluster
    trainer = facts.trainer
    rollout = facts.rollout
    batches = facts.batches()
    yield (
        f"{trainer.shape.family}, {parameter_count(trainer.shape) / 1e9:.2f} B parameters, on {cluster.nodes} x "
        f"{cluster.gpus_per_node} {cluster.device.name}; trainer {trainer.layout.describe()}, recompute "
        f"{trainer.recompute}, {'distributed' if trainer.distributed_optimizer else 'plain'} optimizer"
    )
    yield (
        f"A step: {rollout.responses:,} responses, {rollout.tokens / 1e6:.1f} M tokens at {rollout.mean_prompt:.0f} + "
        f"{rollout.mean_response:.0f} each, at most {batches['longest_tokens'] / 1e6:.1f} M; {rollout.steps} "
        f"optimiser steps of {batches['per_step']} responses, {batches['replica']:.0f} on each of "
        f"{trainer.layout.data} replicas in about {trainer.micro_batches} micro-batches of up to "
        f"{trainer.tokens:,} tokens"
    )


def _roles(plan: RunPlan) -> Table | None:
    if not plan.nodes:
        return None
    table = figures_table("Roles of the GPUs", "node", "GPUs", "train", "serve", "servers", "idle")
    gpus_per_node = plan.cluster.gpus_per_node
    for node in plan.nodes:
        servers = "-"
        if node.servers:
            servers = f"{node.servers[0]}-{node.servers[-1]}"
        first_gpu = node.node * gpus_per_node
        gpus = f"{first_gpu}-{first_gpu + gpus_per_node - 1}"
        cells = (node.node, gpus, node.trainer, node.engine, servers, node.idle)
        table.add_row(*map(str, cells))
    return table


def _ranks(plan: RunPlan) -> Table:
    names = list(plan.ranks[0].parts)
    table = figures_table("A trainer rank's GPU, GiB", "stage", *names, "total", "of")
    device_memory = plan.cluster.device.memory
    for rank in plan.ranks:
        sizes = (*rank.parts.values(), rank.total, device_memory)
        cells = [f"{size / GIB:.1f}" for size in sizes]
        table.add_row(str(rank.stage), *cells)
    return table


def _engine(plan: RunPlan) -> Table | None:
    engine = plan.engine
    facts = plan.facts.engine
    if engine is None:
        return None
    return _server_table("A server's GPU", facts, engine)


def _teachers(plan: RunPlan) -> Iterator[Table]:
    for teacher in plan.facts.spec.teachers:
        if teacher.name in plan.teachers:
            title = f"A GPU of the teacher {teacher.name}"
            yield _server_table(title, teacher.servers, plan.teachers[teacher.name])


def _server_table(name: str, facts: ServersSpec, engine: EngineBytes) -> Table:
    title = f"{name}: {facts.started} servers x TP {facts.layout.tensor}, mem_fraction_static {engine.fraction}"
    table = figures_table(
        title, "weights", "KV pool", "left free", "KV tokens", "sequences at once", "all longest"
    )
    table.add_row(
        gib(engine.weights),
        gib(engine.kv_pool),
        gib(engine.reserved),
        f"{engine.kv_tokens:,}",
        str(engine.sequences),
        str(engine.longest),
    )
    return table


def _hosts(plan: RunPlan) -> Table | None:
    if not plan.nodes:
        return None
    table = figures_table(
        f"Host memory, GiB of {plan.cluster.node_memory / GIB:.0f}",
        *("node", "processes", "batch", "checkpoint", "routing", "parked", "optimizer", "updates"),
        "total",
    )
    for node, host in enumerate(plan.hosts):
        sizes = (
            *(host.processes, host.batch, host.checkpoint, host.capture),
            *(host.parked, host.offloaded, host.updates, host.total),
        )
        cells = [f"{size / GIB:.0f}" for size in sizes]
        table.add_row(str(node), *cells)
    return table


def _data(plan: RunPlan) -> Table:
    columns = plan.columns
    traffic = plan.traffic
    table = figures_table("Transfers", "what", "bytes", "seconds")
    if plan.engine is not None:
        table.add_row(
            "a weight update, to the busiest engine GPU",
            gb(traffic.received),
            f"{traffic.update_seconds:.1f} ({traffic.messages} message{'s' if traffic.messages > 1 else ''})",
        )
    table.add_row("a checkpoint", gb(traffic.checkpoint), f"{traffic.checkpoint_seconds:.0f}")
    table.add_row(
        "a restart after a rank's death: the checkpoint, read by all ranks",
        gb(traffic.checkpoint),
        f"{traffic.checkpoint_seconds:.0f}",
    )
    if plan.engine is None:
        return table
    table.add_row(
        "a step's scored responses, which leaders write for such a restart",
        gb(columns.replicas),
        "during generation",
    )
    table.add_row(
        "a step's R3 routing: in memory; on the wire",
        f"{gb(columns.routing)}; {gb(columns.routing_wire)}",
        "",
    )
    if plan.seconds is not None:
        table.add_row(
            "a step's tokens and columns: from the leaders to the ranks",
            gb(columns.replicas),
            f"{plan.seconds.exchange:.1f}",
        )
    table.add_row(
        "a step's Top-K: in memory; on the wire", f"{gb(columns.topk)}; {gb(columns.topk_wire)}", ""
    )
    if columns.teacher:
        table.add_row(
            "a step's scores of teachers: in memory; on the wire",
            f"{gb(columns.teacher)}; {gb(columns.teacher_wire)}",
            "not counted",
        )
    return table


def _time(plan: RunPlan) -> Table | None:
    seconds = plan.seconds
    if seconds is None:
        return None
    table = figures_table("A step, seconds (a model, not a measurement)", *seconds.phases, "step")
    cells = [f"{value:.1f}" for value in seconds.phases.values()]
    table.add_row(*cells, f"{seconds.total:.0f}")
    return table


def _rates(plan: RunPlan) -> str | None:
    if plan.seconds is None:
        return None
    rate = plan.facts.rollout.tokens / plan.seconds.total / plan.gpus
    mfu = model_flops_utilisation(plan.facts, plan.seconds, plan.cluster)
    return f"{rate:,.0f} tokens/s a GPU; MFU of the trainer's seconds {mfu:.0%}."


def _shared(plan: RunPlan) -> str | None:
    if not plan.shared:
        return None
    gpu = max(plan.shared, key=attrgetter("travels"))
    parts = ", ".join(gpu.parked) or "nothing"
    return (
        f"Parked while servers generate (engine.parked): {parts}, {gib(gpu.travels)} to the host and back; a GPU "
        f"then holds {gib(gpu.generating)}, {gib(gpu.training)} in training and {gib(gpu.updating)} in an update."
    )


def _evaluation(plan: RunPlan) -> str | None:
    problems = plan.facts.evaluated_problems
    evaluation = plan.facts.config.evaluation
    seconds = plan.seconds
    if not problems or seconds is None or not seconds.evaluation:
        return None
    per_step = seconds.evaluation
    return (
        f"Evaluation: {problems} problems x {evaluation.samples_per_prompt} take {per_step * evaluation.every:.0f} s, "
        f"before the first step and every {evaluation.every} steps: {per_step:.0f} s for each step, "
        f"{per_step / seconds.total:.0%} of it."
    )


def _print_assumptions(console: Console, plan: RunPlan) -> None:
    assumptions = {
        **step_time.assumptions(),
        "seconds from node to node": plan.cluster.network_latency,
        "busiest expert rank over the mean": activations.BUSIEST_RANK,
    }
    if plan.facts.trainer.adam.offloaded:
        assumptions["GB/s of a node's host memory"] = step_time.HOST_RATE / GB
    text = "; ".join(f"{name} {value:g}" for name, value in assumptions.items())
    console.print(f"Assumed: {text}. Formulas and sources: docs/planner.md.")
    uncounted_settings = sorted(plan.facts.not_counted)
    if uncounted_settings:
        console.print(f"Not counted: {', '.join(uncounted_settings)}.")


_COLOURS = {
    "weights": "#4C72B0",
    "gradients": "#DD8452",
    "optimizer": "#55A868",
    "activations": "#C44E52",
    "logits": "#8172B3",
    "working": "#937860",
    "communicators": "#8C8C8C",
    "context": "#CCB974",
    "KV cache": "#64B5CD",
    "left free": "#E5E5E5",
}


def bars(plan: RunPlan) -> dict[str, dict[str, float]]:
    """Return bar -> part -> GiB, in the order of the picture: each trainer stage, then a server's GPU."""
    parts_by_bar: dict[str, dict[str, float]] = {}
    for rank in plan.ranks:
        parts = {part: size / GIB for part, size in rank.parts.items()}
        parts_by_bar[f"trainer, stage {rank.stage}"] = parts
    engine = plan.engine
    if engine is not None:
        parts_by_bar["server"] = {
            "weights": engine.weights / GIB,
            "KV cache": max(0, engine.kv_pool) / GIB,
            "left free": engine.reserved / GIB,
        }
    return parts_by_bar


def draw(plan: RunPlan, path: str | Path) -> None:
    """Draw the memory of each GPU by part, and write the picture to ``path`` as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    parts_by_bar = bars(plan)
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(parts_by_bar)))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, parts in enumerate(parts_by_bar.values()):
        start = 0.0
        for part, size in parts.items():
            axes.barh(row, size, left=start, color=_COLOURS[part], edgecolor="white", height=0.6)
            # A part of 3.5 GiB or less has no room for a number.
            if size > 3.5:
                center = start + size / 2
                axes.text(center, row, f"{size:.0f}", ha="center", va="center", fontsize=8)
            start += size
    device_memory = plan.cluster.device.memory / GIB
    axes.axvline(device_memory, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(parts_by_bar)), list(parts_by_bar))
    axes.invert_yaxis()
    widths = [sum(parts.values()) for parts in parts_by_bar.values()]
    axes.set_xlim(0, max(device_memory, *widths) * 1.03)
    axes.set_xlabel(f"GiB of a GPU; dashed: {plan.cluster.device.name}")
    part_names = []
    for part in _COLOURS:
        if any(part in parts for parts in parts_by_bar.values()):
            part_names.append(part)
    handles = [Rectangle((0, 0), 1, 1, color=_COLOURS[part]) for part in part_names]
    figure.legend(handles, part_names, loc="upper center", ncol=5, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.42 / figure.get_figheight()))
    figure.savefig(path, dpi=120, format="png")


def _seconds_json(seconds: StepSeconds) -> dict[str, float]:
    values = asdict(seconds)
    del values["schedule"]
    return {**values, "total": seconds.total}


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """Return all numbers of a plan as plain values, in bytes and seconds."""
    seconds = idle = None
    if plan.seconds is not None:
        seconds = _seconds_json(plan.seconds)
        if plan.facts.engine.started:
            idle = plan.seconds.idle
    return {
        "limits": [plan.memory_limit, plan.time_limit],
        "layout": asdict(plan.facts.trainer.layout),
        "ranks": [{**rank.parts, "stage": rank.stage, "total": rank.total} for rank in plan.ranks],
        "engine": None if plan.engine is None else asdict(plan.engine),
        "hosts": [{**asdict(host), "total": host.total} for host in plan.hosts],
        "nodes": [asdict(node) for node in plan.nodes],
        "batches": plan.facts.batches(),
        "columns": asdict(plan.columns),
        "transfer": asdict(plan.traffic),
        "schedule": asdict(plan.facts.schedule),
        "shared": [asdict(stage) for stage in plan.shared],
        "seconds": seconds,
        "idle": idle,
        "gpu_idle": plan.gpu_idle,
        "gpu_hours": plan.gpu_hours,
    }


MOST_CLUSTER_NODES = 2**14
MOST_GPUS_PER_NODE = 2**10
SHOWN = 4
"""The number of printed layouts of each schedule after ``--search``."""
NEAREST = 3
"""The number of layouts that the command proposes if the recipe does not fit."""
WIDTH = 118
"""Least width of the printed tables, in characters."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan a recipe and return the process's exit code: 0 if it fits, 2 if it is refused."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_recipe(options.recipe, options.overrides)
        shape = read_model(config.model.hf_checkpoint, options.model_configs).shape
        question = Question(
            config,
            shape,
            _cluster(options),
            mean_response=options.mean_response,
            mean_prompt=options.mean_prompt,
            storage=options.storage_gbps * GB,
        )
        if options.weights:
            return _weights(question, options)
        return _plan(question, options)
    except (RunError, OSError) as error:
        fatal(str(error))


def _cluster(options: argparse.Namespace) -> Cluster:
    device = DEVICES[options.gpu]
    if options.network_gbps is not None:
        device = replace(device, network=options.network_gbps * GB)
    return Cluster(
        device,
        options.nodes,
        options.gpus_per_node,
        round(options.host_memory_gib * GIB),
        options.network_latency_us * 1e-6,
    )


def _weights(question: Question, options: argparse.Namespace) -> int:
    """Print the plan of a weight update's messages for all ranks.

    The returned exit code is 2 if the plan has problems, for example an element that does not arrive.
    """
    if faults := question.layout_faults():
        raise ConfigError(faults, options.recipe)
    facts = question.facts()
    if not facts.engine.started:
        fault = "--weights: the run starts no server, expected engine.servers of at least 1"
        raise ConfigError([fault], options.recipe)
    if not facts.sends_shards:
        strategy = facts.config.weight_sync.strategy
        raise ConfigError(
            [
                f"--weights: got weight_sync.strategy {strategy}, which sends whole tensors; expected another strategy"
            ],
            options.recipe,
        )
    plan = weight_plan(facts, question.cluster)
    if options.json:
        print(json.dumps(asdict(plan), indent=1))
    else:
        print("\n".join(plan.lines()))
    return 2 if plan.problems else 0


def _plan(question: Question, options: argparse.Namespace) -> int:
    """Plan, search and print as the options say; return the exit code."""
    faults = question.layout_faults()
    plan = None if faults else question.plan()
    if plan is not None:
        faults = list(plan.faults)
    if options.png and plan is not None:
        draw(plan, options.png)
    steps = question.config.run.steps
    if not options.json:
        # The search may take minutes, so print the verdict before it.
        _print(steps, plan, faults, options.recipe)
    proposals: list[Proposal] = []
    larger_cluster = None
    search_text = ""
    if options.search or (faults and plan is not None):
        proposals, larger_cluster, search_text = _search(question, options)
    elif faults:
        search_text = _searchable(question.cluster, options.gpu)
    if options.meta:
        questions = [proposal.question for proposal in proposals]
        if plan is not None:
            questions.insert(0, question)
        faults += _meta_faults(questions)
    if options.json:
        print(json.dumps(_as_json(steps, plan, faults, proposals, larger_cluster), indent=1))
    else:
        _print_search(proposals, search_text, is_ranked=options.search)
    if faults or (options.search and not proposals):
        return 2
    return 0


def _search(
    question: Question, options: argparse.Namespace
) -> tuple[list[Proposal], Cluster | None, str]:
    """Return the proposals; if there are none, the least cluster with a layout that fits, and a text about it."""
    if options.search:
        proposals = best_of_each(search_schedules(question), SHOWN)
    else:
        proposals = nearest(search(question), NEAREST)
    if proposals:
        return proposals, None, ""
    larger_cluster = least_nodes(question)
    return proposals, larger_cluster, _none_fits(question.cluster, options.gpu, larger_cluster)


def _searchable(cluster: Cluster, gpu: str) -> str:
    return (
        f"--search lists the layouts of {cluster.nodes} x {cluster.gpus_per_node} {gpu} that fit."
    )


def _none_fits(cluster: Cluster, gpu: str, larger: Cluster | None) -> str:
    size = cluster.gpus_per_node
    text = f"No layout of {cluster.nodes} x {size} {gpu} fits"
    if larger is None:
        return f"{text}, nor of up to {MOST_NODES} such nodes."
    return f"{text}; the least that does: {larger.nodes} x {size} (--nodes {larger.nodes})."


def _console() -> Console:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    return console


def _print(steps: int, plan: RunPlan | None, faults: list[str], recipe: str) -> None:
    """Print the plan and its verdict, or the faults of a layout that has no plan."""
    console = _console()
    if plan is None:
        console.print(str(ConfigError(faults, recipe)), soft_wrap=True)
        return
    print_plan(console, plan)
    if plan.fits and plan.seconds is not None:
        idle_text = ""
        if plan.facts.engine.started:
            for role, share in plan.seconds.idle.items():
                idle_text += f"{role} idle {share:.0%} of a step; "
        text = (
            f"{idle_text}{plan.gpu_hours:,.1f} GPU-hours a step. The run's {steps:,} steps: "
            f"{plan.gpu_hours * steps:,.0f} GPU-hours, idle GPUs and evaluation included."
        )
        console.print(text, soft_wrap=True)


def _print_search(proposals: Sequence[Proposal], text: str, *, is_ranked: bool) -> None:
    """Print the layouts of a search, and ``text`` about it."""
    if proposals:
        console = _console()
        console.print("" if is_ranked else "What would fit, with the fewest changes:")
        print_proposals(console, proposals)
    if text:
        print(text)


def _meta_faults(questions: Sequence[Question]) -> list[str]:
    """Build each layout's modules on the meta device and list the differences from the conversion's rules."""
    from megatron_dppo.trainer.model import compare_with_rules

    faults: list[str] = []
    for question in questions:
        comparison = compare_with_rules(question.config, question.shape)
        print(comparison.summary(), file=sys.stderr)
        faults += comparison.faults
    return faults


def _as_json(
    steps: int,
    plan: RunPlan | None,
    faults: list[str],
    proposals: list[Proposal],
    larger: Cluster | None,
) -> dict[str, Any]:
    return {
        "fits": not faults,
        "problems": faults,
        "least_nodes": None if larger is None else larger.nodes,
        "gpu_hours": None if plan is None else plan.gpu_hours * steps,
        "plan": None if plan is None else plan_json(plan),
        "proposals": [_proposal_json(proposal) for proposal in proposals],
    }


def _proposal_json(proposal: Proposal) -> dict[str, Any]:
    schedule = proposal.question.schedule
    return {
        "overrides": proposal.changes,
        "placement": schedule.placement,
        "staleness": schedule.staleness,
        "seconds": proposal.seconds,
        "gpu_idle": proposal.plan.gpu_idle,
        "plan": plan_json(proposal.plan),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo plan",
        description="Compute a recipe's memory, traffic and time on a cluster, and whether it fits, without a GPU.",
        epilog="Exit codes: 0 it fits, 2 refused. docs/planner.md: formulas, sources, accuracy.",
    )
    add_config_arguments(parser, "recipe")
    _add_cluster_arguments(parser)
    parser.add_argument(
        "--mean-response",
        type=positive_number,
        help="tokens; default: half of rollout.max_response_tokens",
    )
    parser.add_argument(
        "--mean-prompt",
        type=positive_number,
        help="tokens; default: a quarter of data.max_prompt_tokens",
    )
    parser.add_argument(
        "--model-configs",
        default=KNOWN_MODELS,
        metavar="FOLDER",
        help="if the recipe's checkpoint is missing: read FOLDER/NAME/config.json instead, with the checkpoint's name "
        "in lower case; default %(default)s",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="the best layouts of this cluster for synchronous, stale and colocated generation, ranked by seconds, "
        "with the share of time in which GPUs wait",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="only the plan of a weight update from shard to shard",
    )
    parser.add_argument(
        "--png", type=file_to_write, metavar="FILE", help="draw every GPU's memory by part"
    )
    parser.add_argument("--json", action="store_true", help="every number, as JSON")
    parser.add_argument(
        "--meta",
        action="store_true",
        help="also build a rank's Megatron modules without memory and compare every shape with the conversion's rules",
    )
    return parser


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=sorted(DEVICES), required=True, help="kind of GPU")
    parser.add_argument(
        "--nodes",
        type=whole_number(1, MOST_CLUSTER_NODES),
        required=True,
        metavar="N",
        help="nodes",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole_number(1, MOST_GPUS_PER_NODE),
        default=8,
        metavar="N",
        help="default 8",
    )
    parser.add_argument(
        "--host-memory-gib",
        type=positive_number,
        default=0,
        help="host memory of a node; default: that of the vendor's nodes",
    )
    parser.add_argument(
        "--storage-gbps",
        type=positive_number,
        default=5.0,
        help="GB/s that checkpoints reach; default 5",
    )
    parser.add_argument(
        "--network-gbps",
        type=positive_number,
        help="GB/s of each GPU's port to other nodes; default: that of the vendor's nodes",
    )
    parser.add_argument(
        "--network-latency-us",
        type=finite_number(0),
        default=NETWORK_LATENCY * 1e6,
        help="microseconds from one node to the next; default %(default)g",
    )


if __name__ == "__main__":
    sys.exit(main())
