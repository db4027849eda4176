"""``summary.json``: the results of a whole run in a few numbers.

Computed from ``metrics.jsonl``, so that a resumed run includes the steps of earlier processes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dppo.metrics import names
from megatron_dppo.metrics.records import (
    Record,
    mean_accuracy,
    phase_table,
    read_records,
    series,
    step_of,
)
from megatron_dppo.metrics.run_info import RunInfo
from megatron_dppo.system.files import write_atomically

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class RunSummary:
    """Results of a run; None: not measured.

    Attributes:
        steps: rollout batches trained on.
        eval_accuracy_start, eval_accuracy_end: avg@k at the first and the last evaluation; mean
            over the held-out sets.
        eval_steps: steps of these two evaluations.
        eval_accuracy_by_set: the same for each held-out set.
        train_reward_start, train_reward_end: means over the first and last ``window_steps`` steps.
        mean_abs_prob_gap: mean |pi - mu| at equal weights over the last ``window_steps`` steps.
        weight_updates, weight_updates_verified: all, and those with every tensor compared.
        hf_export_max_logprob_diff: largest difference of a log-probability between trainer and
            exported checkpoint, nats.
        algorithm, layout, model, dtype, seed: as in ``RunInfo``.
        seconds_per_phase: over the whole run, processes before a resume included.
    """

    steps: int
    eval_accuracy_start: float | None
    eval_accuracy_end: float | None
    eval_steps: tuple[int, int] | None
    eval_accuracy_by_set: dict[str, tuple[float, float]]
    train_reward_start: float | None
    train_reward_end: float | None
    window_steps: int
    mean_abs_prob_gap: float | None
    weight_updates: int
    weight_updates_verified: int
    hf_export_max_logprob_diff: float | None
    algorithm: str
    layout: str
    model: str
    dtype: str
    seed: int
    seconds_per_phase: dict[str, float]


def summarize(
    records: list[Record], info: RunInfo, *, hf_export_max_logprob_diff: float | None = None
) -> RunSummary:
    """Compute the summary of a run from its records.

    Args:
        records: of the whole run.
        info: identification of the run.
        hf_export_max_logprob_diff: see ``RunSummary``.

    Raises:
        ValueError: no step was trained.
    """
    steps = sum(step_of(record) > 0 for record in records)
    if steps == 0:
        raise ValueError(f"{len(records)} records hold no trained step, so there is no summary")
    window = window_of(steps)
    evaluated = [(step_of(r), mean_accuracy(r)) for r in records]
    accuracies = [(step, value) for step, value in evaluated if value is not None]
    sets = {name: dataset for r in records for name in r if (dataset := names.accuracy_set(name))}
    by_set = {dataset: series(records, name)[1] for name, dataset in sorted(sets.items())}
    rewards = series(records, names.REWARD)[1]
    return RunSummary(
        steps=steps,
        eval_accuracy_start=accuracies[0][1] if accuracies else None,
        eval_accuracy_end=accuracies[-1][1] if accuracies else None,
        eval_steps=(accuracies[0][0], accuracies[-1][0]) if accuracies else None,
        eval_accuracy_by_set={k: (v[0], v[-1]) for k, v in by_set.items() if v},
        train_reward_start=_mean(rewards[:window]),
        train_reward_end=_mean(rewards[-window:]),
        window_steps=window,
        mean_abs_prob_gap=_mean(series(records, names.GAP_ON_POLICY)[1][-window:]),
        weight_updates=round(sum(series(records, names.WEIGHT_UPDATES)[1])),
        weight_updates_verified=round(sum(series(records, names.WEIGHT_UPDATES_VERIFIED)[1])),
        hf_export_max_logprob_diff=hf_export_max_logprob_diff,
        algorithm=info.algorithm,
        layout=info.layout,
        model=info.model,
        dtype=info.dtype,
        seed=info.seed,
        seconds_per_phase={p: round(sum(s), 3) for p, s in phase_table(records).items()},
    )


def window_of(steps: int) -> int:
    """Number of steps in a mean at the start or end of a run: a quarter of it, from 1 to 5."""
    return max(1, min(5, steps // 4))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def write_summary(
    directory: str | Path, info: RunInfo, *, hf_export_max_logprob_diff: float | None = None
) -> RunSummary:
    """Write ``summary.json`` of the run in ``directory`` (replaced atomically) and return it.

    Arguments as for ``summarize``. Raises RecordsError if there is no metrics file, ValueError if no
    step was trained.
    """
    summary = summarize(
        read_records(directory), info, hf_export_max_logprob_diff=hf_export_max_logprob_diff
    )
    text = json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n"
    write_atomically(Path(directory) / SUMMARY_FILE, text)
    return summary
