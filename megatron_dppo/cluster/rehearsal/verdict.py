"""The verdict of a rehearsal as text: findings, the parts of the recipe that ran or did not run, and the cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megatron_dppo.cluster.rehearsal.shrinking import Omission
from megatron_dppo.cluster.rehearsal.usage import MIB, UsageByPhase
from megatron_dppo.config import TrainConfig
from megatron_dppo.metrics.verdict import VerdictRow, verdict_table

_REAL_WEIGHTS = Omission(
    "real weights", "the model is random and tiny; `megatron-dppo convert` reads the real one"
)
NEVER = (
    Omission("GPU kernels", "attention, grouped GEMM, FP8 and Transformer Engine run only on GPUs"),
    Omission("NCCL", "ranks and servers exchange tensors over gloo on one machine"),
    Omission("GPU memory and speed", "see `megatron-dppo plan`"),
    _REAL_WEIGHTS,
)
"""Parts of any recipe that a rehearsal on the CPUs of one machine does not cover."""


NEVER_ON_NODES: Mapping[str, Sequence[Omission]] = {
    "cpu": (
        Omission(
            "GPU kernels, GPU memory and speed", "the ranks and servers ran on the nodes' CPUs"
        ),
        Omission("NCCL", "ranks and servers exchanged tensors over gloo, on the nodes' network"),
        _REAL_WEIGHTS,
    ),
    "gpu": (
        Omission("GPU memory and speed", "the model is tiny; see `megatron-dppo plan`"),
        _REAL_WEIGHTS,
    ),
}
"""Parts of any recipe that a rehearsal on a cluster does not cover, by the kind of device of its nodes."""


def exercised(config: TrainConfig) -> list[str]:
    """Name the parts of the recipe that its rehearsal runs."""
    updates = f"weight updates by {config.weight_sync.strategy}"
    return [*features(config), updates, "checkpoint, stop, resume, evaluation, export"]


def features(config: TrainConfig) -> list[str]:
    """Name the algorithm, the reward and the options of a recipe that decide which code it runs."""
    rollout, lora = config.rollout, config.lora
    is_used = {
        f"algorithm {config.algorithm.name}": True,
        f"reward {config.reward.name}": True,
        f"environment {config.environment.name}": config.environment.name is not None,
        "R3": rollout.router_replay,
        f"LoRA of rank {lora.rank}": lora.rank > 0,
        f"staleness {rollout.max_staleness} with {rollout.interrupt}": rollout.max_staleness > 0,
        "colocation": config.engine.placement == "colocated",
        "dynamic filtering": rollout.drop_zero_variance_groups,
        "reference KL": config.algorithm.reference_kl > 0,
        f"teacher ({config.distillation.loss})": bool(config.distillation.teachers),
    }
    return [part for part in is_used if is_used[part]]


def show(
    console: Console,
    rows: Sequence[VerdictRow],
    omissions: Iterable[Omission],
    usage: UsageByPhase,
    parts: Sequence[str],
    never: Sequence[Omission] = NEVER,
) -> None:
    """Print the verdict's tables.

    Args:
        console: the console.
        rows: findings.
        omissions: parts of this recipe that the rehearsal left out.
        usage: seconds and memory.
        parts: parts of the recipe that ran.
        never: parts that no rehearsal of this kind covers.
    """
    console.print(verdict_table("Rehearsal", rows))
    console.print(f"exercised: {', '.join(parts)}", soft_wrap=True)
    console.print("not exercised:")
    for omission in (*omissions, *never):
        console.print(f"  {omission.key}: {omission.reason}", soft_wrap=True)
    console.print(usage_table(usage))


def usage_table(usage: UsageByPhase) -> Table:
    """Return a table with the seconds of each phase, and the MiB of its largest sample."""
    # The columns from "ranks" on: number of ranks, mean memory of a rank, memory of the largest rank, memory of all
    # processes.
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
            # The remark marks resident sets, which count shared pages for each process. They are measured where the
            # kernel gives no proportional sizes.
            remark = "" if sample.is_proportional else " (resident)"
            cells += [
                str(len(sample.ranks)),
                f"{sample.mean_rank / MIB:.0f}{remark}",
                f"{max(sample.ranks) / MIB:.0f}",
                f"{sample.total / MIB:.0f}",
            ]
        table.add_row(phase, *cells)
    return table
