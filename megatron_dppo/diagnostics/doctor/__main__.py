"""Find the cause that makes engine and trainer differ in a saved batch.

    megatron-dppo doctor runs/demo --step 3 --html doctor.html
    megatron-dppo doctor runs/demo --step 3 --parts --png parts.png

The run must have been started with ``rollout.save=true``. The engine's mu, and pi as the loss saw it in the step's
first mini-batch, are each compared with transformers in float32, which shares no code with either. A side that differs
is compared with what transformers give where one thing is done in another way: weights of another version or of a part
of them, temperature or filter, precision, positions, routing, keys and values of a cache. What comes nearest is named,
and the tokens that show it. Where nothing explains a trainer of several processes but for rounding, and the same
trainer in one does not differ, it is the layout.

Then: whether the tokens were drawn as configured, by the likelihood of other samplers (mu and pi may agree on numbers
that nothing was drawn from); whether responses of a group are copies; whether prompts are what tokenizer and template
make.

With ``--parts`` it says how much of mean |pi - mu| each cause makes up: pi is recomputed by the run's own trainer, on
its device, with one more cause fixed in each pass:

    nothing fixed        the weights that trained on it (not known: the newest), logits as they are, natural routing
    sampling transform   logits divided by rollout.temperature, as the engine does
    staleness            the weights that sampled the batch
    routing              experts as the engine recorded them (needs rollout.router_replay=true)
    precision            the trainer in float32 (where the run is not, and not with --no-precision)

The decrease of mean |pi - mu| by a fix is that cause's part; the rest before ``precision`` is numerics. A cause that is
not possible in this run has no row.

Without ``--step`` it is the last saved batch whose weights are known. They are found in the run: model.hf_checkpoint is
version 0, a checkpoint of step N version N, and RUN/hf that of the last step; --weights N=FOLDER names others. The
whole model must fit this machine's memory twice, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config.loading import load_config
from megatron_dppo.diagnostics.explain.__main__ import batch_parser, run_batch_command, show_facts
from megatron_dppo.metrics.records import (
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    RECORDS_FILE,
    ROLLOUTS_FOLDER,
    read_records,
    saved_step,
    saved_steps,
    step_of,
)

if TYPE_CHECKING:
    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.diagnostics.doctor.reference import KnownWeights


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = batch_parser("doctor", str(__doc__))
    parser.add_argument(
        "--weights", action="append", default=[], metavar="VERSION=FOLDER",
        help="Hugging Face folder, or checkpoint, of the policy after that many steps",
    )  # fmt: skip
    parser.add_argument("--parts", action="store_true", help="how much of the gap is which cause's")
    parser.add_argument(
        "--no-precision", dest="precision", action="store_false",
        help="no pass in float32, for which Transformer Engine has no attention of packed sequences",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--html", type=Path, help="write the page here, not with --parts")
    parser.add_argument("--png", type=Path, help="draw parts, ratio and TV against mu here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, print and write; returns 0, or 2 if the input cannot be used."""
    options = parse(arguments)
    # Read when torch is imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_batch_command(report, options)


def report(options: argparse.Namespace) -> None:
    """Read the batch, examine it, write the requested files."""
    if options.html if options.parts else options.png:
        raise ValueError("--html is the page of all causes, --png the figure of --parts")
    config = load_config(options.run / "config.yaml")
    folder = options.run / ROLLOUTS_FOLDER
    # Before torch is imported, which takes seconds.
    step = saved_step(folder, options.step)
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.doctor.reference import KnownWeights

    folders = weights_by_version(options, config)
    if options.step is None:
        step = last_examinable(saved_steps(folder), folders)
    whole = load_batch(folder, step)
    # In place, those without a token too: a position says which mini-batch a response was in.
    batch = whole[: options.limit or None]
    if not any(t.sampled for t in batch):
        raise ValueError(f"{folder}: the batch of step {step} has no response token")
    with tempfile.TemporaryDirectory(prefix="megatron-dppo-doctor-") as converted:
        weights = KnownWeights(folders, Path(config.model.hf_checkpoint), Path(converted))
        case = Case(options, config, step, batch, len(whole), weights)
        (report_parts if options.parts else report_causes)(case)


@dataclass(frozen=True)
class Case:
    """What is examined: of the ``size`` responses of the batch of ``step`` the first, ``batch``; and for whom."""

    options: argparse.Namespace
    config: TrainConfig
    step: int
    batch: Sequence[Trajectory]
    size: int
    weights: KnownWeights

    def write_json(self, text: str) -> None:
        """Every figure, where ``--json`` says."""
        if self.options.json:
            self.options.json.write_text(text, encoding="utf-8")
            print(f"{self.options.json}: every figure")


def report_causes(case: Case) -> None:
    """Which cause makes either side differ."""
    from megatron_dppo.diagnostics.doctor import report as pages

    options, batch = case.options, case.batch
    doctor_report = pages.Doctor(case.config, batch, case.weights).report(case.step)
    if not (doctor_report.diagnoses or doctor_report.findings):
        raise ValueError("nothing can be examined: " + "; ".join(doctor_report.all_facts))
    title = f"Doctor: {options.run}, batch of step {case.step}"
    facts = [f"{len(batch)} of {case.size} responses", *doctor_report.all_facts]
    pages.show(show_facts(title, facts, width=140), doctor_report)
    case.write_json(json.dumps(pages.as_json(doctor_report), indent=2) + "\n")
    if options.html:
        options.html.write_text(pages.page(title, facts, doctor_report), encoding="utf-8")
        print(f"{options.html}: the page")


def report_parts(case: Case) -> None:
    """How much of mean |pi - mu| each cause makes up."""
    import torch

    from megatron_dppo.diagnostics.doctor.diagnosis import engine_side
    from megatron_dppo.diagnostics.doctor.ladder import Parts, draw

    options, config, known = case.options, case.config, case.weights
    side = engine_side(case.batch)
    if side is None:
        raise ValueError("no response of the batch has one weight version alone")
    batch = [t for i in side.positions if (t := case.batch[i]).sampled]
    # What trained on the batch, where it is known.
    trained_by = case.step - 1 if case.step - 1 in known.folders else max(known.folders, default=0)
    folders = known.folder(side.version), known.folder(trained_by)
    try:
        parts = Parts.of(config, batch, *folders, precision=options.precision)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the run's trainer in one process does not fit this device: {error}; set CUDA_VISIBLE_DEVICES= to "
            "compute on the CPU"
        ) from error
    title = f"Parts of |pi - mu|: {options.run}, batch of step {case.step}"
    facts = [
        f"{len(batch)} of {case.size} responses, {len(parts.log_mu)} tokens; {config.model.dtype}, "
        f"temperature {config.temperature:g}",
        f"sampled by version {side.version}, {known.folders[side.version]}; "
        f"trained as version {trained_by}, {known.folders[trained_by]}",
    ]
    parts.show(title, facts)
    case.write_json(parts.to_text(case.step, len(batch)))
    if options.png:
        draw(options.png, title, parts.split, parts.measured, parts.log_mu.numpy())
        print(f"{options.png}: the parts, and ratio and TV against mu")


def last_examinable(saved: Sequence[int], versions: Container[int]) -> int:
    """The last of the ``saved`` steps whose batch was trained on from one of the known ``versions``; the last one where
    none was."""
    known = [step for step in saved if step - 1 in versions]
    return known[-1] if known else saved[-1]


def weights_by_version(options: argparse.Namespace, config: TrainConfig) -> dict[int, Path]:
    """Folders of weights, by the steps after which the policy had them. Of a run with adapters, whose checkpoints hold
    nothing else, only the model that it began with, and where it began with adapters not even that."""
    from megatron_dppo.trainer.checkpoint.directory import suspect_folders

    folders: dict[int, Path] = {}
    if not (config.lora.rank and config.lora.start_from):
        folders[0] = Path(config.model.hf_checkpoint)
    if not config.lora.rank:
        directory = options.run / CHECKPOINTS_FOLDER
        checkpoints = sorted(directory.glob("step_??????"))
        # Where a step has both, the checkpoint that a start would load is later in the list and counts.
        for folder in [*suspect_folders(directory), *checkpoints]:
            folders[int(folder.name[len("step_") : len("step_000000")])] = folder
    exported, last = options.run / EXPORT_FOLDER, config.run.steps
    is_recorded = (options.run / RECORDS_FILE).is_file()
    is_finished = is_recorded and any(step_of(r) == last for r in read_records(options.run))
    # Where this run has not come to its end, it is of an earlier one in this folder, or of fewer steps.
    if is_finished and (exported / "config.json").is_file():
        folders.setdefault(last, exported)
    for option in options.weights:
        version, separator, folder = option.partition("=")
        if not separator or not version.isdecimal():
            raise ValueError(f"--weights {option}: expected VERSION=FOLDER, a number of steps")
        folders[int(version)] = Path(folder)
    return folders


if __name__ == "__main__":
    sys.exit(main())
