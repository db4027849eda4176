"""The results of a run in a few numbers (``summary.json``), and its identification for titles.

The numbers come from ``metrics.jsonl``, so that a resumed run includes the steps of earlier processes.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    CONFIG_FILE,
    ENVIRONMENT_FAULTS_FILE,
    SUMMARY_FILE,
    Record,
    mean_accuracy,
    phase_table,
    read_records,
    read_step_lines,
    series,
    start_folder,
    step_of,
)
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.system.files import hash_fault, write_atomically
from megatron_dppo.system.yaml_core import parse_yaml

log = logging.getLogger(__name__)
_CURRENT_FOLDER = threading.Lock()
"""Held by the thread that changes the current folder of the process."""


@dataclass(frozen=True)
class RunInfo:
    """Identification of a run, for titles.

    ``layout``: as in ``TP2 EP2 SP, 2 ranks``. ``model``: name of the checkpoint's folder. ``dtype``: ``fp8`` stands for
    a trainer in bfloat16 and servers with FP8 weights.
    """

    algorithm: str
    layout: str
    model: str
    dtype: Dtype
    seed: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Build from a resolved configuration as plain values, e.g. ``TrainConfig.model_dump()``."""
        # FP8 servers need a trainer in bfloat16, so "fp8" determines both dtypes: the servers' and the trainer's.
        dtype = config["model"]["dtype"]
        if config.get("engine", {}).get("quantization") is not None:
            dtype = config["engine"]["quantization"]
        # A supervised run has no algorithm of RL.
        algorithm = "supervised"
        if "algorithm" in config:
            algorithm = config["algorithm"]["name"]
        return cls(
            algorithm=algorithm,
            layout=describe_layout(config["parallel"]),
            model=Path(config["model"]["hf_checkpoint"]).name,
            dtype=dtype,
            seed=config["run"]["seed"],
        )

    @classmethod
    def of_run(cls, directory: str | Path) -> Self | None:
        """Build from the ``config.yaml`` in a run's folder; None if the file does not exist.

        Raises ValueError if the file is not a resolved configuration, or differs from the hash in its first line.
        """
        config = saved_config(directory)
        if config is None:
            return None
        try:
            return cls.of_config(config)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{Path(directory) / CONFIG_FILE}: expected the resolved configuration of a run ({error!r})"
            ) from error

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Algorithm, layout with precision, model and seed, as text."""
        precisions = {"float32": "fp32", "bfloat16": "bf16", "fp8": "bf16 and fp8 rollouts"}
        layout = f"{self.layout}, {precisions[self.dtype]}"
        return (self.algorithm, layout, self.model, f"seed {self.seed}")


def saved_config(directory: str | Path) -> dict[str, Any] | None:
    """Read the ``config.yaml`` in a run's folder as plain values; None if the file does not exist.

    Raises ValueError if the file is no table, or differs from the hash in its first line.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    if (difference := hash_fault(text)) is not None:
        raise ValueError(f"{path}: altered: {difference}")
    try:
        config = parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the resolved configuration of a run ({error!r})"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected the resolved configuration of a run")
    return config


def differing_keys(directories: Sequence[str | Path]) -> dict[str, list[str]]:
    """Return the keys in which the runs' configurations differ, with each run's value as text, in the runs' order.

    The runs' own folders are left out. A run without a ``config.yaml`` has no values: the result is then empty. Raises
    ValueError as ``saved_config``.
    """
    configs: list[dict[str, Any]] = []
    for directory in directories:
        config = saved_config(directory)
        if config is None:
            return {}
        configs.append(dict(_flat(config, "")))
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.directory")
    texts = {key: [str(config.get(key, "not set")) for config in configs] for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of nested tables with its dotted key."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def add_metrics_of(directory: str | Path) -> None:
    """Add the own metrics of the run in ``directory`` to the table of metrics.

    The modules of the metrics are searched in the folder that the run was started in. Metrics that can't be imported
    here are left out, with a warning: the run's other figures can be shown without them.

    Meanwhile the current folder of all threads is that folder, so other threads must read absolute paths.
    """
    try:
        config = saved_config(directory) or {}
        folder = start_folder(Path(directory))
        with _CURRENT_FOLDER, nullcontext() if folder is None else chdir(folder):
            metric_names.add_metrics(config.get("tracking", {}).get("metrics", ()))
    except ValueError as error:
        log.warning("%s: tracking.metrics: %s", directory, error)


def describe_layout(parallel: Mapping[str, Any]) -> str:
    """Return the parallel sizes above 1 with Megatron's short names: ``TP2 PP2 SP, 4 ranks``; ``1 rank``."""
    world, tensor, pipeline = (parallel[key] for key in ("world_size", "tensor", "pipeline"))
    # A configuration that was saved before context parallelism existed lacks this key.
    context = parallel.get("context", 1)
    sizes = {
        "TP": tensor,
        "CP": context,
        "PP": pipeline,
        "VPP": parallel["virtual_pipeline"],
        "EP": parallel["expert"],
        "ETP": parallel["expert_tensor"],
        "DP": world // (tensor * context * pipeline),
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size is not None and size > 1]
    if parallel["sequence"]:
        parts.append("SP")
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    if parts:
        return f"{' '.join(parts)}, {ranks}"
    return ranks


@dataclass(frozen=True)
class EnvironmentFault:
    """A kind of fault of an environment, and its count. ``reason`` does not contain the environment's name."""

    environment: str
    reason: str
    count: int


def environment_faults(directory: str | Path) -> tuple[EnvironmentFault, ...]:
    """Return the faults of the run in ``directory``, the most frequent first. Raises RecordsError."""
    path = Path(directory) / ENVIRONMENT_FAULTS_FILE
    counts = Counter[tuple[str, str]]()
    if not path.is_file():
        return ()
    for line in read_step_lines(path):
        for reason, count in line["faults"].items():
            counts[line["environment"], reason] += count
    faults: list[EnvironmentFault] = []
    for (environment, reason), count in counts.most_common():
        faults.append(EnvironmentFault(environment, reason, count))
    return tuple(faults)


@dataclass(frozen=True)
class RunSummary:
    """Results of a run; None: not measured.

    Attributes:
        steps: rollout batches trained on.
        eval_accuracy_start, eval_accuracy_end: avg@k at the first and the last evaluation; mean
            over the held-out sets.
        eval_steps: steps of the first and the last evaluation.
        eval_accuracy_by_set: held-out set -> its avg@k at the first and the last evaluation of the set.
        train_reward_start, train_reward_end: mean rewards of the first and the last ``window_steps`` steps.
        mean_abs_prob_gap: mean |pi - mu| while trainer and servers had equal weights, over the last ``window_steps``
            steps.
        weight_updates, weight_updates_verified: number of updates, and of updates whose tensors were all compared.
        hf_export_max_logprob_diff: largest difference of a log-probability between trainer and
            exported checkpoint, nats.
        algorithm, layout, model, dtype, seed: as in ``RunInfo``.
        seconds_per_phase: seconds of each phase, summed over all records, those of earlier starts included.
        environment_faults: faults of environments, the most frequent first.
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
    environment_faults: tuple[EnvironmentFault, ...] = ()


def summarize(
    records: list[Record],
    info: RunInfo,
    *,
    hf_export_max_logprob_diff: float | None = None,
    faults: tuple[EnvironmentFault, ...] = (),
) -> RunSummary:
    """Compute the summary of a run from its records.

    Args:
        records: metrics rows of the whole run.
        info: identification of the run.
        hf_export_max_logprob_diff: see ``RunSummary``.
        faults: faults of its environments.

    Raises:
        ValueError: no step was trained.
    """
    # The record of step 0 is from before training.
    steps = sum(step_of(record) > 0 for record in records)
    if steps == 0:
        raise ValueError(f"{len(records)} records hold no trained step, so there is no summary")
    window = window_of(steps)
    eval_steps: list[int] = []
    accuracies: list[float] = []
    set_of_metric: dict[str, str] = {}
    for record in records:
        accuracy = mean_accuracy(record)
        if accuracy is not None:
            eval_steps.append(step_of(record))
            accuracies.append(accuracy)
        for metric in record:
            if held_out_set := metric_names.accuracy_set(metric):
                set_of_metric[metric] = held_out_set
    accuracy_by_set: dict[str, tuple[float, float]] = {}
    for metric, held_out_set in sorted(set_of_metric.items()):
        _, set_accuracies = series(records, metric)
        if set_accuracies:
            accuracy_by_set[held_out_set] = set_accuracies[0], set_accuracies[-1]
    seconds_per_phase: dict[str, float] = {}
    for phase, seconds in phase_table(records).items():
        seconds_per_phase[phase] = round(sum(seconds), 3)
    _, rewards = series(records, metric_names.REWARD)
    _, gaps = series(records, metric_names.GAP_ON_POLICY)
    _, updates = series(records, metric_names.WEIGHT_UPDATES)
    _, verified_updates = series(records, metric_names.WEIGHT_UPDATES_VERIFIED)
    return RunSummary(
        steps=steps,
        eval_accuracy_start=accuracies[0] if accuracies else None,
        eval_accuracy_end=accuracies[-1] if accuracies else None,
        eval_steps=(eval_steps[0], eval_steps[-1]) if eval_steps else None,
        eval_accuracy_by_set=accuracy_by_set,
        train_reward_start=_mean(rewards[:window]),
        train_reward_end=_mean(rewards[-window:]),
        window_steps=window,
        mean_abs_prob_gap=_mean(gaps[-window:]),
        weight_updates=round(sum(updates)),
        weight_updates_verified=round(sum(verified_updates)),
        hf_export_max_logprob_diff=hf_export_max_logprob_diff,
        **asdict(info),
        seconds_per_phase=seconds_per_phase,
        environment_faults=faults,
    )


def window_of(steps: int) -> int:
    """Return the number of steps to average at the start or the end of a run: a quarter of its steps, at least 1 and
    at most 5.
    """
    return max(1, min(5, steps // 4))


def _mean(values: list[float]) -> float | None:
    if values:
        return sum(values) / len(values)
    return None


def write_summary(
    directory: str | Path, info: RunInfo, *, hf_export_max_logprob_diff: float | None = None
) -> RunSummary:
    """Write ``summary.json`` of the run in ``directory`` (replaced atomically) and return it.

    See ``summarize`` for ``info`` and ``hf_export_max_logprob_diff``. Raises RecordsError if there is no metrics
    file, ValueError if no step was trained.
    """
    summary = summarize(
        read_records(directory),
        info,
        hf_export_max_logprob_diff=hf_export_max_logprob_diff,
        faults=environment_faults(directory),
    )
    text = json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n"
    write_atomically(Path(directory) / SUMMARY_FILE, text)
    return summary
