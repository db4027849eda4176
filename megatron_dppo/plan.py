"""Entry point: ``megatron-dppo plan RECIPE.yaml [key.path=value ...] --gpu h100 --nodes 4``.

What a recipe takes on a cluster, from its file and the model's config.json alone: memory of every rank, server and
host, bytes and seconds of a step, and whether it fits. Exit codes: 0 it fits, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from megatron_dppo import EXAMPLES
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.logging import fatal
from megatron_dppo.planner.devices import DEVICES, GB, GIB, NETWORK_LATENCY, Cluster
from megatron_dppo.planner.facts import shape_of
from megatron_dppo.planner.report import draw, plan_json, print_plan, print_proposals
from megatron_dppo.planner.run_plan import RunPlan
from megatron_dppo.planner.search import (
    MOST_NODES,
    Proposal,
    Question,
    best_of_each,
    least_nodes,
    nearest,
    search,
    search_schedules,
)
from megatron_dppo.planner.traffic import weight_plan
from megatron_dppo.system.errors import RunError

SHOWN = 4
"""Layouts of each schedule."""
NEAREST = 3
WIDTH = 118


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; the process's exit code: 0 it fits, 2 refused."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(options.recipe, options.overrides)
        shape = shape_of(config.model.hf_checkpoint, options.model_configs)
        lengths = (options.mean_response, options.mean_prompt)
        cluster, storage = _cluster(options), options.storage_gbps * GB
        question = Question(config, shape, cluster, *lengths, storage)
        return _weights(question, options) if options.weights else _plan(question, options)
    except RunError as error:
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
    """Print a weight update's plan of buckets for every rank; 2 where it would not be a whole update."""
    if faults := question.layout_faults():
        raise ConfigError(faults, options.recipe)
    plan = weight_plan(question.facts(), question.cluster.gpus_per_node)
    print(json.dumps(asdict(plan), indent=1) if options.json else "\n".join(plan.lines()))
    return 2 if plan.problems else 0


def _plan(question: Question, options: argparse.Namespace) -> int:
    faults = question.layout_faults()
    plan = None if faults else question.plan()
    if plan is not None:
        faults = list(plan.faults)
    shown: list[Proposal] = []
    if options.search:
        shown = best_of_each(search_schedules(question), SHOWN)
    elif faults:
        shown = nearest(search(question), NEAREST)
    searched = options.search or faults
    larger = least_nodes(question) if searched and not shown else None
    if options.meta:
        planned = [] if plan is None else [question]
        faults += _meta_faults([*planned, *(proposal.question for proposal in shown)])
    if options.png and plan is not None:
        draw(plan, options.png)
    steps = question.config.run.steps
    if options.json:
        print(json.dumps(_as_json(steps, plan, faults, shown, larger), indent=1))
    else:
        _print(steps, plan, faults, shown, options)
        if searched and not shown:
            print(_none_fits(question.cluster, options.gpu, larger))
    return 2 if faults or (options.search and not shown) else 0


def _none_fits(cluster: Cluster, gpu: str, larger: Cluster | None) -> str:
    size = cluster.gpus_per_node
    text = f"No layout of {cluster.nodes} x {size} {gpu} fits"
    if larger is None:
        return f"{text}, nor of up to {MOST_NODES} such nodes."
    return f"{text}; the least that does: {larger.nodes} x {size} (--nodes {larger.nodes})."


def _print(
    steps: int,
    plan: RunPlan | None,
    faults: list[str],
    shown: list[Proposal],
    options: argparse.Namespace,
) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    if plan is None:
        console.print(str(ConfigError(faults, options.recipe)), highlight=False, soft_wrap=True)
    else:
        print_plan(console, plan)
        if plan.fits and plan.seconds is not None:
            idle = [
                f"{name} idle {share:.0%} of a step; " for name, share in plan.seconds.idle.items()
            ]
            waits = "".join(idle) if plan.facts.engine.servers else ""
            text = (
                f"{waits}{plan.gpu_hours:,.1f} GPU-hours a step. The run's {steps:,} steps: "
                f"{plan.gpu_hours * steps:,.0f} GPU-hours, idle GPUs and evaluation included."
            )
            console.print(text, highlight=False, soft_wrap=True)
    if shown:
        console.print("" if options.search else "What would fit, with the fewest changes:")
        print_proposals(console, shown)


def _meta_faults(questions: Sequence[Question]) -> list[str]:
    """Build each layout's modules on the meta device; what differs from the conversion's rules."""
    from megatron_dppo.trainer.model import compare

    faults: list[str] = []
    for question in questions:
        comparison = compare(question.config, question.shape)
        print(comparison.summary(), file=sys.stderr)
        faults += comparison.faults
    return faults


def _as_json(
    steps: int,
    plan: RunPlan | None,
    faults: list[str],
    shown: list[Proposal],
    larger: Cluster | None,
) -> dict[str, Any]:
    return {
        "fits": not faults,
        "problems": faults,
        "least_nodes": None if larger is None else larger.nodes,
        "gpu_hours": None if plan is None else plan.gpu_hours * steps,
        "plan": None if plan is None else plan_json(plan),
        "proposals": [
            {
                "overrides": p.changes,
                "placement": p.question.schedule.placement,
                "staleness": p.question.schedule.staleness,
                "seconds": p.seconds,
                "gpu_idle": p.plan.gpu_idle,
                "plan": plan_json(p.plan),
            }
            for p in shown
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo plan",
        description="What a recipe takes on a cluster, and whether it fits; needs no weights and no GPU.",
        epilog="Exit codes: 0 it fits, 2 refused. docs/planner.md: formulas, sources, accuracy.",
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the run's configuration")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="replaces one value")
    _takes_cluster(parser)
    parser.add_argument(
        "--mean-response", type=float, help="tokens; default: half of rollout.max_response_tokens"
    )
    parser.add_argument(
        "--mean-prompt", type=float, help="tokens; default: a quarter of data.max_prompt_tokens"
    )
    parser.add_argument(
        "--model-configs",
        default=EXAMPLES / "model_configs",
        metavar="FOLDER",
        help="where config.json is looked for, by the checkpoint's name in small letters, while the checkpoint is not "
        "there; default %(default)s",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="the best layouts of this cluster, generating in step, ahead and on the trainer's GPUs, ranked by "
        "seconds; with each the share of GPU time that is waited away",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="only a weight update's plan of buckets, for every rank",
    )
    parser.add_argument("--png", metavar="FILE", help="draw every GPU's memory by part")
    parser.add_argument("--json", action="store_true", help="every number, as JSON")
    parser.add_argument(
        "--meta",
        action="store_true",
        help="also build a rank's Megatron modules without memory and compare every shape with the conversion's rules",
    )
    return parser


def _takes_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", choices=sorted(DEVICES), required=True, help="kind of GPU")
    parser.add_argument("--nodes", type=_positive, required=True, metavar="N", help="nodes")
    parser.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--host-memory-gib", type=float, default=0, help="of a node; default: the maker's"
    )
    parser.add_argument(
        "--storage-gbps", type=float, default=5.0, help="GB/s that checkpoints reach; default 5"
    )
    parser.add_argument(
        "--network-gbps",
        type=float,
        help="GB/s of each GPU's port to other nodes; default: the kind's",
    )
    parser.add_argument(
        "--network-latency-us",
        type=float,
        default=NETWORK_LATENCY * 1e6,
        help="microseconds from one node to the next; default %(default)g",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
