"""Find the cause that makes engine and trainer differ in a saved batch.

    megatron-dppo doctor runs/demo --step 3 --html doctor.html
    megatron-dppo doctor runs/demo --step 3 --parts --png parts.png

The run must have been started with ``rollout.save=true``. The command compares two sides with a reference: the
engine's mu, and pi as the loss computed it in the step's first mini-batch. The reference is transformers in float32; it
shares no code with engine or trainer. If a side differs, the command changes one thing at a time in the reference: the
version of all or some weights; the temperature or filter; the precision; the positions; the routing; the cached keys
and values. The command names the change that brings the reference nearest to this side, and the tokens that show it.
If a trainer with several processes differs, and no change explains the whole difference, the command runs the
trainer in one process. If the trainer in one process does not differ, the command names the parallel layout.

Then the command tests three more things:

    sampling   The tokens were sampled as configured. The test compares the tokens' likelihoods under the configured
               sampler and under others. mu and pi may agree even if the tokens were sampled from neither.
    copies     No responses of a group are copies.
    prompts    Tokenizer and template still make the same prompts.

In a run with teachers, it compares each teacher's scores with the teacher's checkpoint: the scores in the batch, and
the scores by each server that answers now, with the key MEGATRON_DPPO_API_KEY.

With ``--parts`` the command prints how much of mean |pi - mu| each cause makes up. The run's own trainer, on its
device, recomputes pi with one more cause fixed in each pass:

    nothing fixed        the weights that trained on the batch (if unknown: the newest), raw logits, natural routing
    sampling transform   logits divided by rollout.temperature, as the engine does
    staleness            the weights that sampled the batch
    routing              experts as the engine recorded them (needs rollout.router_replay=true)
    precision            the trainer in float32 (if the run is not in float32, and without --no-precision)

The part of a cause is the decrease of mean |pi - mu| when the cause is fixed. The mean that is left when all
causes above ``precision`` are fixed is numerics. ``precision`` shows how much of the numerics float32 removes. A cause
that is not possible in this run has no row.

Without ``--step`` the command uses the last saved batch whose weights are known. It finds weights in the run:
model.hf_checkpoint is version 0, a checkpoint of step N is version N, and RUN/hf is the version of the last step;
--weights N=FOLDER names the folder of another version. Two copies of the whole model in float32 must fit in this
machine's memory.
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
from megatron_dppo.config.schema import DistillationConfig, TrainConfig
from megatron_dppo.diagnostics.explain.__main__ import batch_parser, run_batch_command, show_facts
from megatron_dppo.metrics.records import (
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    RECORDS_FILE,
    ROLLOUTS_FOLDER,
    read_records,
    saved_batch_step,
    saved_batch_steps,
    step_of,
    step_of_name,
)
from megatron_dppo.system.arguments import file_to_write
from megatron_dppo.weights.server import held_tensors

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.diagnostics.doctor.reference import KnownWeights


def _with_absolute_folder(text: str) -> str:
    """Return ``VERSION=FOLDER`` with an absolute folder: the command changes to the run's start folder."""
    version, separator, folder = text.partition("=")
    if not separator:
        return text
    return f"{version}={Path(folder).absolute()}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = batch_parser("doctor", str(__doc__))
    parser.add_argument(
        "--weights",
        action="append",
        default=[],
        type=_with_absolute_folder,
        metavar="VERSION=FOLDER",
        help="Hugging Face folder, or checkpoint, of the policy after VERSION steps",
    )
    parser.add_argument("--parts", action="store_true", help="print each cause's part of the gap")
    parser.add_argument(
        "--no-precision",
        dest="precision",
        action="store_false",
        help="no pass in float32 (Transformer Engine has no float32 attention for packed sequences)",
    )
    parser.add_argument(
        "--no-teachers",
        dest="teachers",
        action="store_false",
        help="examine no teacher: each teacher must fit in memory, too",
    )
    parser.add_argument("--json", type=file_to_write, help="write every figure here")
    parser.add_argument("--html", type=file_to_write, help="write the page here, not with --parts")
    parser.add_argument(
        "--png", type=file_to_write, help="draw parts, ratio and TV against mu here"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 if the input cannot be used."""
    options = parse(arguments)
    # Compute with one thread, as the ranks of a run do. Torch reads the variable when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_batch_command(report, options)


def report(options: argparse.Namespace) -> None:
    """Read the batch, examine it, and write the requested files."""
    # --parts excludes --html, and --png needs --parts.
    unusable_option = options.html if options.parts else options.png
    if unusable_option:
        raise ValueError("--html is the page of all causes, --png the figure of --parts")
    config = load_config(options.run / "config.yaml")
    if not options.teachers:
        config = config.model_copy(update={"distillation": DistillationConfig()})
    folder = options.run / ROLLOUTS_FOLDER
    # Check the step before torch is imported: the import takes seconds.
    step = saved_batch_step(folder, options.step)
    from megatron_dppo.data.batch_file import load_batch
    from megatron_dppo.diagnostics.doctor.reference import KnownWeights

    folders = weights_by_version(options, config)
    if options.step is None:
        step = last_examinable(saved_batch_steps(folder), folders)
    saved_batch = load_batch(folder, step)
    # Keep responses without a token: the position of a response determines its mini-batch.
    batch = saved_batch[: options.limit or None]
    if not any(t.sampled for t in batch):
        raise ValueError(f"{folder}: the batch of step {step} has no response token")
    with tempfile.TemporaryDirectory(prefix="megatron-dppo-doctor-") as converted:
        weights = KnownWeights(folders, Path(config.model.hf_checkpoint), Path(converted))
        case = Case(options, config, step, batch, len(saved_batch), weights)
        if options.parts:
            report_parts(case)
        else:
            report_causes(case)


@dataclass(frozen=True)
class Case:
    """The batch to examine, with the options and the configuration of its run.

    The batch of ``step`` has ``size`` responses; ``batch`` has the first of these responses (``--limit``).
    """

    options: argparse.Namespace
    config: TrainConfig
    step: int
    batch: Sequence[Trajectory]
    size: int
    weights: KnownWeights

    def write_json(self, text: str) -> None:
        """Write ``text``, every figure as JSON, to the file of ``--json`` if there is one."""
        if self.options.json:
            self.options.json.write_text(text, encoding="utf-8")
            print(f"{self.options.json}: every figure")


def report_causes(case: Case) -> None:
    """Find the cause that makes a side differ, and print and write the report."""
    from megatron_dppo.diagnostics.doctor import report as pages

    options = case.options
    batch = case.batch
    path = held_tensors.file_of(options.run / ROLLOUTS_FOLDER, case.step)
    servers = held_tensors.read(path) if path.is_file() else ()
    doctor_report = pages.Doctor(case.config, batch, case.weights).report(case.step, servers)
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
    """Measure how much of mean |pi - mu| each cause makes up, and print and write the figures."""
    import torch

    from megatron_dppo.diagnostics.doctor.diagnosis import engine_side
    from megatron_dppo.diagnostics.doctor.ladder import Parts, draw

    options = case.options
    config = case.config
    known_weights = case.weights
    side = engine_side(case.batch)
    if side is None:
        raise ValueError("no response of the batch was sampled by a single weight version")
    side_batch = [case.batch[i] for i in side.positions]
    batch = [t for t in side_batch if t.sampled]
    # Use the weights that trained on the batch if they are known, else the newest.
    trained_version = case.step - 1
    if trained_version not in known_weights.folders:
        trained_version = max(known_weights.folders, default=0)
    folders = known_weights.folder(side.version), known_weights.folder(trained_version)
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
        f"sampled by version {side.version}, {known_weights.folders[side.version]}; "
        f"trained as version {trained_version}, {known_weights.folders[trained_version]}",
    ]
    parts.show(title, facts)
    case.write_json(parts.to_text(case.step, len(batch)))
    if options.png:
        draw(options.png, title, parts)
        print(f"{options.png}: the parts, and ratio and TV against mu")


def last_examinable(saved: Sequence[int], versions: Container[int]) -> int:
    """Return the last of the ``saved`` steps that began with weights of one of the known ``versions``.

    Returns the last saved step if no saved step began with known weights.
    """
    known_steps = [step for step in saved if step - 1 in versions]
    if known_steps:
        return known_steps[-1]
    return saved[-1]


def weights_by_version(options: argparse.Namespace, config: TrainConfig) -> dict[int, Path]:
    """Return the folders of weights by version.

    A version is the number of steps after which the policy had these weights.

    The checkpoints of a run with adapters have only the adapters. Of such a run only version 0 is known: the model that
    the run began with. If the run began with adapters (``lora.start_from``), no version is known. ``--weights`` adds
    versions.
    """
    from megatron_dppo.trainer.checkpoint.directory import suspect_folders

    folders: dict[int, Path] = {}
    if not (config.lora.rank and config.lora.start_from):
        folders[0] = Path(config.model.hf_checkpoint)
    if not config.lora.rank:
        directory = options.run / CHECKPOINTS_FOLDER
        checkpoints = [path for path in directory.glob("step_*") if not path.suffix]
        # If a step has both a suspect and a regular checkpoint, use the regular checkpoint, as a restart does. It comes
        # later in the list, so it replaces the suspect checkpoint. A suspect folder's name has a suffix after the step.
        for folder in [*suspect_folders(directory), *checkpoints]:
            folders[step_of_name(folder.stem)] = folder
    export_folder = options.run / EXPORT_FOLDER
    last_step = config.run.steps
    is_recorded = (options.run / RECORDS_FILE).is_file()
    is_finished = is_recorded and any(step_of(r) == last_step for r in read_records(options.run))
    # If this run has not finished, the export is from an earlier run in this folder, or from a run of fewer steps.
    if is_finished and (export_folder / "config.json").is_file():
        folders.setdefault(last_step, export_folder)
    for option in options.weights:
        version, separator, folder = option.partition("=")
        if not separator or not version.isdecimal():
            raise ValueError(f"--weights {option}: expected VERSION=FOLDER, a number of steps")
        folders[int(version)] = Path(folder)
    return folders


if __name__ == "__main__":
    sys.exit(main())
