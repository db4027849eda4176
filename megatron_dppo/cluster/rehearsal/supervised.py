"""The rehearsal of a supervised recipe: its layout and its data with a tiny model, stopped once and resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.cluster.rehearsal import attempts, shrinking
from megatron_dppo.cluster.rehearsal.problems import FIRST_ROWS, Problems, toy_rows, write_rows
from megatron_dppo.cluster.rehearsal.shrinking import Omission, RehearsalInputs
from megatron_dppo.config import SupervisedConfig
from megatron_dppo.config.schema import ParallelConfig, SupervisedDataConfig
from megatron_dppo.data.problems import PromptForm, TurnSets
from megatron_dppo.data.records import Record, read_all_records
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import EXPORT_FOLDER, read_records, series
from megatron_dppo.metrics.verdict import VerdictRow
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.splits import ceil_to
from megatron_dppo.supervised import MODULE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS = 6
_ROWS = 64
FORM = replace(attempts.LOCAL, command=(*attempts.LOCAL.command[:-1], MODULE))
PLANNED_RUNS = (
    attempts.PlannedRun("train and be stopped", lambda _: "train", 1),
    attempts.PlannedRun("resume, evaluate, export", lambda _: "resume and export"),
)
EXERCISED = ("supervised training", "checkpoint, stop, resume, held-out loss, export")


def make_turns(
    data: SupervisedDataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Problems:
    """Write the shortest rows of each file of ``data``, or toy pairs, into ``folder``. Raises DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[str] = []
    absent: list[Omission] = []
    for number, (key, file) in enumerate(data.files.items()):
        toys = [
            {"prompt": row["prompt"], "response": row["answer"]} for row in toy_rows(_ROWS, number)
        ]
        path = folder / f"{number}.jsonl"
        absent += write_rows(path, key, file, partial(_shortest_rows, file), toys)
        paths.append(str(path))
    train, *held_out = paths
    evaluation = dict(zip(data.evaluation, held_out, strict=True))
    form = PromptForm(data.apply_chat_template, arguments=data.chat_template_arguments)
    written = data.model_copy(update={"train": train, "evaluation": evaluation})
    longest = TurnSets.of_files(written, tokenizer, form).longest
    return Problems((train,), evaluation, longest, tuple(absent))


def _shortest_rows(file: str) -> Sequence[Record]:
    records = read_all_records(file).records[:FIRST_ROWS]
    return sorted(records, key=lambda record: len(json.dumps(record, default=str)))[:_ROWS]


def shrink(
    config: SupervisedConfig, parallel: ParallelConfig, inputs: RehearsalInputs
) -> SupervisedConfig:
    """Return the rehearsal's configuration, as ``shrinking.shrink`` does for other recipes."""
    changes = shrinking.trainer_changes(config, parallel, inputs, STEPS) | {
        "training": {
            "sequences_per_step": ceil_to(max(4, parallel.data * parallel.pipeline), parallel.data),
            "micro_batch_tokens": shrinking.MICRO_BATCH_SEQUENCES * inputs.longest_prompt,
        },
        "evaluation": {"every": 2},
        "checkpoint": {"every": 1, "keep": shrinking.CHECKPOINTS},
        "tracking": {"trackers": []},
    }
    dropped_keys = shrinking.dropped_options(config, inputs)
    values = shrinking.changed_tables(config, changes, dropped_keys)
    values["data"] |= {"train": inputs.train[0], "evaluation": dict(inputs.evaluation)}
    return SupervisedConfig.model_validate(values)


def findings(config: SupervisedConfig) -> list[VerdictRow]:
    """Compare the results of the finished runs of ``config`` with what every healthy run keeps."""
    directory = Path(config.run.directory)
    records = read_records(directory)
    steps, losses = series(records, metric_names.NEGATIVE_LOG_LIKELIHOOD)
    _, norms = series(records, metric_names.GRAD_NORM)
    rows = [
        VerdictRow("layout", Layout.of(config.parallel.sizes).describe(), "the recipe's"),
        VerdictRow("steps", f"{len(steps)}", f"{STEPS}", list(steps) == [*range(1, STEPS + 1)]),
        VerdictRow(
            "-log pi of the first and the last step",
            f"{losses[0]:.3f}, {losses[-1]:.3f}",
            "falls",
            losses[-1] < losses[0],
        ),
        VerdictRow("largest gradient norm", f"{max(norms):.2g}", "above 0", max(norms) > 0),
    ]
    for name in config.data.evaluation:
        _, held_out = series(records, metric_names.held_out_loss(name))
        measured = ", ".join(f"{loss:.3f}" for loss in held_out)
        rows.append(VerdictRow(f"-log pi of {name}", measured, "measured", bool(held_out)))
    has_export = (directory / EXPORT_FOLDER / "config.json").is_file()
    rows.append(VerdictRow("export", "written" if has_export else "none", "written", has_export))
    return rows
