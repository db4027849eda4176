"""The verdict of a rehearsal: its findings, the parts of the recipe that ran and that did not, and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dppo.cluster.rehearsal.shrinking import Omission
from megatron_dppo.cluster.rehearsal.usage import MIB, UsageByPhase
from megatron_dppo.config import TrainConfig
from megatron_dppo.demo.material import EXPORT_BOUNDS
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import Record
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.metrics.verdict import VerdictRow, verdict_table

NEVER = (
    Omission(
        "GPU kernels", "attention, grouped GEMM, FP8 and Transformer Engine run on GPUs alone"
    ),
    Omission("NCCL", "ranks and servers exchange tensors over gloo on one machine"),
    Omission("GPU memory and speed", "see `megatron-dppo plan`"),
    Omission(
        "real weights", "the model is random and tiny; `megatron-dppo convert` reads the real one"
    ),
)
"""Parts of any recipe that a rehearsal on the CPUs of one machine does not cover."""


NEVER_ON_NODES: Mapping[str, Sequence[Omission]] = {
    "cpu": (
        Omission(
            "GPU kernels, GPU memory and speed", "the ranks and servers ran on the nodes' CPUs"
        ),
        Omission("NCCL", "ranks and servers exchanged tensors over gloo, on the nodes' network"),
        NEVER[-1],
    ),
    "gpu": (
        Omission("GPU memory and speed", "the model is tiny; see `megatron-dppo plan`"),
        NEVER[-1],
    ),
}
"""Parts of any recipe that a rehearsal on a cluster does not cover, by the kind of device of its nodes."""


def findings(
    config: TrainConfig,
    summary: Mapping[str, Any],
    records: Sequence[Record],
    *,
    was_resumed: bool,
) -> list[VerdictRow]:
    """Compare the results of a finished rehearsal with those that every healthy run has."""
    dtype = config.model.dtype
    updates = summary["weight_updates"]
    verified = summary["weight_updates_verified"]
    steps = round(sum(record.get(names.OPTIMIZER_STEPS) or 0 for record in records))
    gradient = _largest(records, names.GRAD_NORM)
    found = [
        VerdictRow("layout", str(summary["layout"]), "the recipe's"),
        VerdictRow("optimiser steps", str(steps), "2 or more", steps >= 2),
        VerdictRow(
            "weight updates verified",
            f"{verified} of {updates}",
            "all",
            verified == updates > 0,
        ),
        _bounded(
            "|pi - mu| at equal weights",
            summary["mean_abs_prob_gap"],
            BY_METRIC[names.GAP_ON_POLICY].upper(config.precision),
        ),
        VerdictRow("gradient norm", _small(gradient), "above 0", bool(gradient)),
        VerdictRow(
            "stop and resume", "resumed" if was_resumed else "ended before the stop", "", None
        ),
        VerdictRow("evaluation", _sets(summary), "each set", _evaluates(config, summary)),
        _bounded(
            "export in transformers, nats",
            summary["hf_export_max_logprob_diff"],
            EXPORT_BOUNDS[dtype],
        ),
    ]
    if config.rollout.router_replay:
        compared = _largest(records, names.COMPARED) or 0.0
        found.append(
            VerdictRow("R3: replayed tokens x layers", f"{compared:.0f}", "above 0", compared > 0)
        )
    if config.rollout.max_staleness:
        stale = _largest(records, names.STALENESS_MAX)
        largest = config.rollout.max_staleness
        is_within = stale is not None and stale <= largest
        found.append(
            VerdictRow("staleness of a token", _small(stale), f"{largest} or less", is_within)
        )
    if config.environment.name is not None:
        turns = _largest(records, names.TURNS)
        found.append(VerdictRow("turns of an episode", _small(turns), "above 0", bool(turns)))
        found.append(_environment_faults(config.environment.name, summary["environment_faults"]))
    return found


def _environment_faults(name: str, faults: Sequence[Mapping[str, Any]]) -> VerdictRow:
    """Report faults of the environment. A real run would replace the episodes; in a rehearsal a fault is a finding."""
    measured = "; ".join(f"{fault['count']} x {fault['reason']}" for fault in faults) or "none"
    return VerdictRow(f"faults of environment.name {name}", measured, "none", not faults)


def exercised(config: TrainConfig) -> list[str]:
    """Name the parts of the recipe that its rehearsal runs."""
    updates = f"weight updates by {config.weight_sync.strategy}"
    return [*features(config), updates, "checkpoint, stop, resume, evaluation, export"]


def features(config: TrainConfig) -> list[str]:
    """Name the algorithm, the reward and the options of a recipe that decide which code it runs."""
    rollout, lora = config.rollout, config.lora
    parts = {
        f"algorithm {config.algorithm.name}": True,
        f"reward {config.reward.name}": True,
        f"environment {config.environment.name}": config.environment.name is not None,
        "R3": rollout.router_replay,
        f"LoRA of rank {lora.rank}": lora.rank > 0,
        f"staleness {rollout.max_staleness} with {rollout.interrupt}": rollout.max_staleness > 0,
        "colocation": config.engine.placement == "colocated",
        "dynamic filtering": rollout.drop_zero_variance_groups,
        "reference KL": config.algorithm.reference_kl > 0,
    }
    return [part for part, is_used in parts.items() if is_used]


def show(
    console: Console,
    found: Sequence[VerdictRow],
    left_out: Iterable[Omission],
    usage: UsageByPhase,
    parts: Sequence[str],
    never: Sequence[Omission] = NEVER,
) -> None:
    """Print the verdict's tables. ``never``: parts that such a rehearsal covers for no recipe."""
    console.print(verdict_table("Rehearsal", found))
    console.print(f"exercised: {', '.join(parts)}", soft_wrap=True)
    console.print("not exercised:")
    for omission in (*left_out, *never):
        console.print(f"  {omission.key}: {omission.reason}", soft_wrap=True)
    console.print(usage_table(usage))


def usage_table(usage: UsageByPhase) -> Table:
    """Return a table with the seconds of each phase, and the MiB of its largest sample."""
    names_of_columns = (
        "seconds",
        "CPU s ranks",
        "CPU s others",
        "ranks",
        "MiB/rank",
        "most",
        "MiB all",
    )
    table = Table("phase", *names_of_columns, title="Seconds and memory")
    for phase, used in usage.by_phase.items():
        seconds = (used.seconds, used.rank_seconds, used.other_seconds)
        cells = [f"{value:.0f}" for value in seconds]
        if (sample := used.fullest) is not None:
            kind = "" if sample.is_proportional else " (resident)"
            cells += [
                str(len(sample.ranks)),
                f"{sample.mean_rank / MIB:.0f}{kind}",
                f"{max(sample.ranks) / MIB:.0f}",
                f"{sample.total / MIB:.0f}",
            ]
        table.add_row(phase, *cells)
    return table


def _bounded(label: str, value: float | None, bound: float) -> VerdictRow:
    holds = None if value is None else value <= bound
    return VerdictRow(label, _small(value), f"{bound:.0e} or less", holds)


def _largest(records: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return max((value for value in values if value is not None), default=None)


def _sets(summary: Mapping[str, Any]) -> str:
    by_set = summary["eval_accuracy_by_set"]
    return ", ".join(f"{name} {end:.2f}" for name, (_, end) in by_set.items()) or "none"


def _evaluates(config: TrainConfig, summary: Mapping[str, Any]) -> bool:
    return set(summary["eval_accuracy_by_set"]) == set(config.data.evaluation_files)


def _small(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"
