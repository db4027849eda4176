"""The rehearsal of a supervised recipe: its layout and its data with a tiny model, stopped once and resumed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.cluster.known_models import KnownModel
from megatron_dppo.cluster.rehearsal import attempts, shrinking, tiny_model, tiny_sizes
from megatron_dppo.cluster.rehearsal.problems import FIRST_ROWS, missing_file, toy_rows, write_rows
from megatron_dppo.cluster.rehearsal.shrinking import Omission
from megatron_dppo.cluster.rehearsal.tokenizer import write_tokenizer
from megatron_dppo.cluster.rehearsal.usage import UsageByPhase
from megatron_dppo.cluster.rehearsal.weights import write_model
from megatron_dppo.config import SupervisedConfig, check_supervised_config, resolved_yaml
from megatron_dppo.config.loading import merged
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.data.problems import PromptForm, load_tokenizer, load_turns
from megatron_dppo.data.records import DataError, Record, read_all_records
from megatron_dppo.data.tokenizer import has_tokenizer
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import EXPORT_FOLDER, read_records, series
from megatron_dppo.metrics.verdict import VerdictRow
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.splits import ceil_to
from megatron_dppo.supervised import MODULE

STEPS = 6
_ROWS = 64
FORM = attempts.RunForm((sys.executable, "-m", MODULE), signal.SIGINT, attempts.LOCAL.environment)
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass
class SupervisedRehearsal:
    """The files and runs of one rehearsal.

    Attributes:
        recipe: path of the recipe.
        config: the recipe, with the user's overrides.
        parallel: the layout to rehearse.
        known_model: the recipe's model.
        folder: folder of the rehearsal.
        phase: announces and measures a phase.
        say: prints a line.
        usage: memory and processor time of the runs.
        omissions: parts of the recipe that the rehearsal leaves out; complete after ``prepare``.
    """

    recipe: Path
    config: SupervisedConfig
    parallel: ParallelConfig
    known_model: KnownModel
    folder: Path
    phase: Phase
    say: Callable[[str], None]
    usage: UsageByPhase
    omissions: list[Omission] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = self.folder / "model"
        self._run_directory = self.folder / "run"

    def prepare(self, path: Path) -> SupervisedConfig:
        """Make the tokenizer, the data, the model and the rehearsal's configuration, and write it to ``path``.

        Raises ConfigError and DataError for faults of the recipe.
        """
        if self.known_model.missing:
            self.omissions.append(Omission("model.hf_checkpoint", self.known_model.missing))
        with self.phase("make the tokenizer and the data"):
            source = self.config.model.hf_checkpoint
            has_own_tokenizer = has_tokenizer(source)
            self.omissions += shrinking.replaced_trainer_parts(
                self.config, self.parallel, has_own_tokenizer=has_own_tokenizer
            )
            self.omissions += shrinking.interface_parts(self.config)
            write_tokenizer(self._model, source if has_own_tokenizer else None)
            data = self._data()
            longest = self._longest_sequence([data["train"], *data["evaluation"].values()])
        with self.phase("make a tiny model and the rehearsal's configuration"):
            sizes = tiny_sizes.tiny_sizes(
                self.parallel.sizes,
                self.known_model.shape,
                longest,
                all_to_all=self.config.megatron.get("cp_comm_type") == "a2a",
            )
            values = tiny_model.tiny_config(
                self.known_model, sizes, own_tokenizer=has_own_tokenizer
            )
            count = write_model(self._model, values, self.config.model.dtype, self.config.run.seed)
            self.say(f"  a random model of {count:,} parameters: {sizes.describe()}")
            config = self._shrunk(data, longest)
            check_supervised_config(config, str(self.recipe))
            path.write_text(resolved_yaml(config), encoding="utf-8")
        return config

    def _data(self) -> dict[str, Any]:
        """Write rows of the recipe's files, or toy pairs; return the changed keys of ``data``."""
        (self.folder / "problems").mkdir(parents=True, exist_ok=True)
        data = self.config.data
        evaluation: dict[str, str] = {}
        for number, (name, file) in enumerate(data.evaluation.items(), start=1):
            evaluation[name] = self._write_rows(f"data.evaluation.{name}", file, number)
        return {"train": self._write_rows("data.train", data.train, 0), "evaluation": evaluation}

    def _write_rows(self, key: str, file: str, number: int) -> str:
        """Write rows of the recipe's ``file``, or toy pairs with the seed ``number``; return the new file's path."""
        path = self.folder / "problems" / f"{number}.jsonl"
        write_rows(path, self._rows(key, file, seed=number))
        return str(path)

    def _rows(self, key: str, file: str, seed: int) -> Sequence[Record]:
        omission = missing_file(key, file)
        if omission is not None:
            self.omissions.append(omission)
            toys = toy_rows(_ROWS, seed)
            return [{"prompt": row["prompt"], "response": row["answer"]} for row in toys]
        try:
            records = read_all_records(file).records[:FIRST_ROWS]
        except DataError as error:
            raise DataError(f"{key}: {error}") from error
        return sorted(records, key=lambda record: len(json.dumps(record, default=str)))[:_ROWS]

    def _longest_sequence(self, paths: Sequence[str]) -> int:
        data = self.config.data
        form = PromptForm(data.apply_chat_template, arguments=data.chat_template_arguments)
        tokenizer = load_tokenizer(self._model)
        longest = 1
        for path in paths:
            turns = load_turns(path, tokenizer, form=form, only_last=data.turns == "last")
            for sequence in turns:
                longest = max(longest, sum(map(len, sequence)))
        return longest

    def _shrunk(self, data: dict[str, Any], longest: int) -> SupervisedConfig:
        """Return the rehearsal's configuration: the recipe with as few changes as a run of minutes needs."""
        config = self.config
        parallel = self.parallel
        changes = shrinking.trainer_changes(
            config, parallel, self._run_directory, self._model, steps=STEPS
        )
        changes |= {
            "training": {
                "sequences_per_step": ceil_to(
                    max(4, parallel.data * parallel.pipeline), parallel.data
                ),
                "micro_batch_tokens": 2 * longest,
            },
            "evaluation": {"every": 2},
            "checkpoint": {"every": 1, "keep": 2},
            "tracking": {"trackers": []},
        }
        values = merged(config.model_dump(), changes)
        dropped_options = shrinking.dropped_trainer_options(config)
        self.omissions += shrinking.dropped_parts(dropped_options, config.tracking)
        for table, keys in dropped_options.items():
            options = getattr(config, table)
            values[table] = {key: value for key, value in options.items() if key not in keys}
        values["data"] = {**values["data"], **data}
        return SupervisedConfig.model_validate(values)

    def train(self, path: Path) -> list[attempts.RehearsalRun]:
        """Run the configuration until it is stopped, and then to its end. The last run may have failed."""
        planned_runs = (
            attempts.PlannedRun("train and be stopped", lambda _: "train", 1),
            attempts.PlannedRun("resume, evaluate, export", lambda _: "resume and export"),
        )
        return attempts.run_planned(
            planned_runs, path, self._run_directory, self.usage, self.phase, last=STEPS, form=FORM
        )

    def findings(self, config: SupervisedConfig) -> list[VerdictRow]:
        """Compare the results of the finished runs with what every healthy run keeps."""
        records = read_records(self._run_directory)
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
        has_export = (self._run_directory / EXPORT_FOLDER / "config.json").is_file()
        rows.append(
            VerdictRow("export", "written" if has_export else "none", "written", has_export)
        )
        return rows
