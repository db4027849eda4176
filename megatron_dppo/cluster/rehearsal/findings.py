"""The findings of a rehearsal: its results, compared with those that every healthy run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.config import TrainConfig
from megatron_dppo.demo.material import EXPORT_BOUNDS
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import Record
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.metrics.verdict import VerdictRow


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
    steps = round(sum(record.get(metric_names.OPTIMIZER_STEPS) or 0 for record in records))
    gradient = _largest(records, metric_names.GRAD_NORM)
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
            BY_METRIC[metric_names.GAP_ON_POLICY].upper(config.precision),
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
        compared = _largest(records, metric_names.COMPARED) or 0.0
        found.append(
            VerdictRow("R3: replayed tokens x layers", f"{compared:.0f}", "above 0", compared > 0)
        )
    if config.rollout.max_staleness:
        stale = _largest(records, metric_names.STALENESS_MAX)
        largest = config.rollout.max_staleness
        is_within = stale is not None and stale <= largest
        found.append(
            VerdictRow("staleness of a token", _small(stale), f"{largest} or less", is_within)
        )
    if config.environment.name is not None:
        turns = _largest(records, metric_names.TURNS)
        found.append(VerdictRow("turns of an episode", _small(turns), "above 0", bool(turns)))
        found.append(_environment_faults(config.environment.name, summary["environment_faults"]))
    return found


def _environment_faults(name: str, faults: Sequence[Mapping[str, Any]]) -> VerdictRow:
    """Report faults of the environment. A real run would replace the episodes; in a rehearsal a fault is a finding."""
    measured = "; ".join(f"{fault['count']} x {fault['reason']}" for fault in faults) or "none"
    return VerdictRow(f"faults of environment.name {name}", measured, "none", not faults)


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
