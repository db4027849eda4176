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
from megatron_dppo.config import ConfigError, TrainConfig, load_config
from megatron_dppo.logging import fatal
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.planner.devices import DEVICES, GB, GIB, NETWORK_LATENCY, Cluster
from megatron_dppo.planner.facts import job_of, shape_of
from megatron_dppo.planner.report import print_plan, print_proposals
from megatron_dppo.planner.run_plan import Verdict, verdict
from megatron_dppo.planner.search import (
    MOST_NODES,
    Lengths,
    Proposal,
    layout_problems,
    least_nodes,
    nearest,
    search,
)
from megatron_dppo.planner.traffic import weight_plan
from megatron_dppo.system.errors import RunError

SHOWN = 8
NEAREST = 3
WIDTH = 118


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan; the process's exit code: 0 it fits, 2 refused."""
    words = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(words.recipe, words.overrides)
        shape = shape_of(config.model.hf_checkpoint, words.model_configs)
    except RunError as error:
        fatal(str(error))
    if words.weights:
        return _weights(config, shape, words)
    cluster = _cluster(words)
    lengths = Lengths(words.mean_response, words.mean_prompt)
    plan, problems = _planned(config, shape, cluster, words)
    wanted = words.search or problems
    proposals = search(config, shape, cluster, lengths) if wanted else []
    shown = proposals[:SHOWN] if words.search else nearest(proposals, NEAREST)
    larger = None
    if wanted and not shown:
        larger = least_nodes(config, shape, cluster, lengths)
    if words.meta:
        problems += _meta_problems(config, shape, plan, shown)
    if words.png and plan is not None:
        from megatron_dppo.planner.report import draw

        draw(plan, words.png)
    if words.json:
        print(json.dumps(_as_json(config, plan, problems, shown, larger), indent=1))
    else:
        _print(config, plan, problems, shown, words)
        if wanted and not shown:
            print(_none_fits(cluster, words.gpu, larger))
    return 2 if problems or (words.search and not shown) else 0


def _none_fits(cluster: Cluster, gpu: str, larger: Cluster | None) -> str:
    size = cluster.gpus_per_node
    text = f"No layout of {cluster.nodes} x {size} {gpu} fits"
    if larger is None:
        return f"{text}, nor of up to {MOST_NODES} such nodes."
    return f"{text}; the least that does: {larger.nodes} x {size} (--nodes {larger.nodes})."


def _cluster(words: argparse.Namespace) -> Cluster:
    device = DEVICES[words.gpu]
    if words.network_gbps is not None:
        device = replace(device, network=words.network_gbps * GB)
    return Cluster(
        device,
        words.nodes,
        words.gpus_per_node,
        round(words.host_memory_gib * GIB),
        words.network_latency_us * 1e-6,
    )


def _weights(config: TrainConfig, shape: ModelShape, words: argparse.Namespace) -> int:
    """Print a weight update's plan of buckets for every rank; 2 where it would not be a whole update."""
    problems = layout_problems(config, shape)
    if problems:
        fatal(str(ConfigError(problems, words.recipe)))
    nodes = words.gpus_per_node
    found = weight_plan(job_of(config, shape, ranks_per_node=nodes), nodes)
    print(json.dumps(asdict(found), indent=1) if words.json else "\n".join(found.lines()))
    return 2 if found.problems else 0


def _planned(
    config: TrainConfig, shape: ModelShape, cluster: Cluster, words: argparse.Namespace
) -> tuple[Verdict | None, list[str]]:
    """The plan, and why it can't work; None where the layout is none."""
    problems = layout_problems(config, shape)
    if problems:
        return None, problems
    job = job_of(
        config,
        shape,
        mean_response=words.mean_response,
        mean_prompt=words.mean_prompt,
        ranks_per_node=cluster.gpus_per_node,
    )
    plan = verdict(job, cluster, words.storage_gbps * GB)
    return plan, list(plan.problems)


def _print(
    config: TrainConfig,
    plan: Verdict | None,
    problems: list[str],
    shown: list[Proposal],
    words: argparse.Namespace,
) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    if plan is not None:
        print_plan(console, plan)
        if plan.fits and plan.seconds is not None:
            steps, hours = config.run.steps, plan.gpu_hours * config.run.steps
            idle = plan.seconds.idle.items() if plan.job.engine.servers else ()
            waits = "".join(f"{name} idle {share:.0%} of a step; " for name, share in idle)
            text = (
                f"{waits}{plan.gpu_hours:,.1f} GPU-hours a step. The run's {steps:,} steps: {hours:,.0f} "
                "GPU-hours, idle GPUs included, evaluation left out."
            )
            console.print(text, highlight=False, soft_wrap=True)
    else:
        console.print(str(ConfigError(problems, words.recipe)), highlight=False, soft_wrap=True)
    if shown:
        console.print("" if words.search else "What would fit, with the fewest changes:")
        print_proposals(console, shown)


def _meta_problems(
    config: TrainConfig, shape: ModelShape, plan: Verdict | None, shown: list[Proposal]
) -> list[str]:
    """Build each layout's modules on the meta device; what differs from the conversion's rules."""
    from megatron_dppo.trainer.model import compare

    configs = [config] if plan is not None else []
    found: list[str] = []
    for layout_config in [*configs, *(p.config for p in shown)]:
        comparison = compare(layout_config, shape)
        print(comparison.summary(), file=sys.stderr)
        found += comparison.faults
    return found


def _as_json(
    config: TrainConfig,
    plan: Verdict | None,
    problems: list[str],
    shown: list[Proposal],
    larger: Cluster | None,
) -> dict[str, Any]:
    return {
        "fits": not problems,
        "problems": problems,
        "least_nodes": None if larger is None else larger.nodes,
        "gpu_hours": None if plan is None else plan.gpu_hours * config.run.steps,
        "plan": None if plan is None else plan_json(plan),
        "proposals": [{"overrides": p.changes, "plan": plan_json(p.plan)} for p in shown],
    }


def plan_json(plan: Verdict) -> dict[str, Any]:
    """Every number of a plan as plain values; bytes and seconds."""
    seconds = plan.seconds
    return {
        "limits": [plan.memory_limit, plan.time_limit],
        "layout": asdict(plan.job.trainer.layout),
        "ranks": [{**rank.parts, "stage": rank.stage, "total": rank.total} for rank in plan.ranks],
        "engine": None if plan.engine is None else asdict(plan.engine),
        "hosts": [{**asdict(host), "total": host.total} for host in plan.hosts],
        "nodes": [asdict(node) for node in plan.nodes],
        "batches": asdict(plan.batches),
        "columns": asdict(plan.columns),
        "transfer": asdict(plan.transfer),
        "seconds": None if seconds is None else {**asdict(seconds), "total": seconds.total},
        "idle": None if seconds is None or not plan.job.engine.servers else seconds.idle,
        "gpu_hours": plan.gpu_hours,
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
    parser.add_argument("--search", action="store_true", help="the best layouts, ranked")
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
