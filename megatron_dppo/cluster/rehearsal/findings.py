"""The findings of a rehearsal: its results, compared with the bounds that every healthy run keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.config import TrainConfig
from megatron_dppo.config.data_schema import REWARD_OF_ENVIRONMENT
from megatron_dppo.demo.material import EXPORT_BOUNDS
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import Record, series
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.metrics.verdict import VerdictRow


def findings(
    config: TrainConfig, summary: Mapping[str, Any], records: Sequence[Record], *, was_resumed: bool
) -> list[VerdictRow]:
    """Compare the results of a finished rehearsal with the bounds that every healthy run keeps.

    Args:
        config: the rehearsal's configuration.
        summary: ``summary.json`` of the run.
        records: the run's metrics.
        was_resumed: whether the second start resumed the run.
    """
    dtype = config.model.dtype
    updates = summary["weight_updates"]
    verified_updates = summary["weight_updates_verified"]
    steps = round(sum(record.get(metric_names.OPTIMIZER_STEPS) or 0 for record in records))
    resume = "resumed" if was_resumed else "ended before the stop"
    accuracy_by_set = summary["eval_accuracy_by_set"]
    has_all_sets = set(accuracy_by_set) == set(config.data.evaluation_files)
    rows = [
        VerdictRow("layout", str(summary["layout"]), "the recipe's"),
        VerdictRow("optimiser steps", str(steps), "2 or more", steps >= 2),
        VerdictRow(
            "weight updates verified",
            f"{verified_updates} of {updates}",
            "all",
            updates > 0 and verified_updates == updates,
        ),
        _bounded(
            "|pi - mu| at equal weights",
            summary["mean_abs_prob_gap"],
            BY_METRIC[metric_names.GAP_ON_POLICY].upper(config.precision),
        ),
        _gradient_row(config, records),
        VerdictRow("stop and resume", resume, "", None),
        VerdictRow("evaluation", _accuracies(accuracy_by_set), "each set", has_all_sets),
        _bounded(
            "export in transformers, nats",
            summary["hf_export_max_logprob_diff"],
            EXPORT_BOUNDS[dtype],
        ),
    ]
    if config.rollout.router_replay:
        replayed = _largest(records, metric_names.COMPARED) or 0.0
        rows.append(
            VerdictRow("R3: replayed tokens x layers", f"{replayed:.0f}", "above 0", replayed > 0)
        )
    if config.rollout.max_staleness:
        staleness = _largest(records, metric_names.STALENESS_MAX)
        bound = config.rollout.max_staleness
        is_within = staleness is not None and staleness <= bound
        rows.append(
            VerdictRow("staleness of a token", _small(staleness), f"{bound} or less", is_within)
        )
    if config.environment.name is not None:
        turns = _largest(records, metric_names.TURNS)
        rows.append(VerdictRow("turns of an episode", _small(turns), "above 0", bool(turns)))
        rows.append(_environment_row(config.environment.name, summary["environment_faults"]))
    return rows


def _gradient_row(config: TrainConfig, records: Sequence[Record]) -> VerdictRow:
    """Compare the gradient with 0. No verdict if an environment, which gives all rewards, gave all responses the same.

    A random model may play every episode equally badly. In any other run, the rehearsal's reward differs between
    responses.
    """
    grad_norm = _largest(records, metric_names.GRAD_NORM)
    if config.reward.name == REWARD_OF_ENVIRONMENT and not grad_norm:
        _, shares = series(records, metric_names.ZERO_VARIANCE_GROUPS)
        if shares and min(shares) == 1.0:
            expected = "the environment rewarded all responses alike"
            return VerdictRow("gradient norm", _small(grad_norm), expected, None)
    return VerdictRow("gradient norm", _small(grad_norm), "above 0", bool(grad_norm))


def _environment_row(name: str, faults: Sequence[Mapping[str, Any]]) -> VerdictRow:
    """Report faults of the environment. A real run replaces faulty episodes; in a rehearsal, a fault is a finding."""
    measured = "; ".join(f"{fault['count']} x {fault['reason']}" for fault in faults) or "none"
    return VerdictRow(f"faults of environment.name {name}", measured, "none", not faults)


def _bounded(label: str, value: float | None, bound: float) -> VerdictRow:
    holds = None if value is None else value <= bound
    return VerdictRow(label, _small(value), f"{bound:.0e} or less", holds)


def _largest(records: Sequence[Record], name: str) -> float | None:
    return max(series(records, name)[1], default=None)


def _accuracies(accuracy_by_set: Mapping[str, Any]) -> str:
    """Return the last accuracy of each held-out set as text."""
    return ", ".join(f"{name} {end:.2f}" for name, (_, end) in accuracy_by_set.items()) or "none"


def _small(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"
