"""Which cause makes the probabilities of engine and trainer differ, in a saved batch of a run.

    megatron-dppo doctor runs/demo --step 3 --html doctor.html

The run must have been started with ``rollout.save=true``. The engine's mu, and pi as the loss saw it in the step's
first mini-batch, are each compared with transformers in float32, which shares no code with either. A side that differs
is compared with what transformers give where one thing is done in another way: weights of another version or of a part
of them, temperature or filter, precision, positions, routing, keys and values of a cache. What comes nearest is named,
and the tokens that show it. Where nothing explains a trainer of several processes, and the same trainer in one does not
differ, it is the layout.

Then: whether the tokens were drawn as configured, by the likelihood of other samplers (mu and pi may agree on numbers
that nothing was drawn from); whether responses of a group are copies; whether prompts are what tokenizer and template
make.

Weights are found in the run: model.hf_checkpoint is version 0, a checkpoint of step N version N, and RUN/hf that of the
last step; --weights N=FOLDER names others. The whole model must fit this machine's memory twice, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_commands import batch_parser, run_batch_command, show_facts
from megatron_dppo.metrics.records import CHECKPOINTS_FOLDER, EXPORT_FOLDER, ROLLOUTS_FOLDER


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = batch_parser("doctor", str(__doc__), step="last", limit=64)
    parser.add_argument(
        "--weights", action="append", default=[], metavar="VERSION=FOLDER",
        help="Hugging Face folder, or checkpoint, of the policy after that many steps",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--html", type=Path, help="write the page here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, print and write; returns 0, or 2 if the input cannot be used."""
    options = parse(arguments)
    # Read when torch is imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_batch_command(report, options)


def report(options: argparse.Namespace) -> None:
    """Read the batch, examine both sides, write the requested files."""
    from megatron_dppo.data.batch_file import load_batch, saved_step
    from megatron_dppo.doctor import report as pages

    config = load_config(options.run / "config.yaml")
    folder = options.run / ROLLOUTS_FOLDER
    step = saved_step(folder, options.step, default=-1)
    whole = load_batch(folder, step)
    # In place, those without a token too: a position says which mini-batch a response was in.
    batch = whole[: options.limit or None]
    if not any(t.sampled for t in batch):
        raise ValueError(f"{folder}: the batch of step {step} has no response token")
    with tempfile.TemporaryDirectory(prefix="megatron-dppo-doctor-") as converted:
        folders = weights_by_version(options, config.model.hf_checkpoint, config.run.steps)
        doctor = pages.Doctor(config, batch, folders, Path(converted))
        doctor_report = doctor.report(step)
    title = f"Doctor: {options.run}, batch of step {step}"
    facts = [f"{len(batch)} of {len(whole)} responses", *doctor_report.facts]
    pages.show(show_facts(title, facts, width=140), doctor_report)
    if options.json:
        text = json.dumps(pages.as_json(doctor_report), indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"{options.json}: every figure")
    if options.html:
        options.html.write_text(pages.page(title, facts, doctor_report), encoding="utf-8")
        print(f"{options.html}: the page")


def weights_by_version(options: argparse.Namespace, start: str, last_step: int) -> dict[int, Path]:
    """Folders of weights, by the steps after which the policy had them. ``start``: what the run began with."""
    folders = {0: Path(start)}
    checkpoints = sorted((options.run / CHECKPOINTS_FOLDER).glob("step_??????"))
    folders |= {int(folder.name.removeprefix("step_")): folder for folder in checkpoints}
    exported = options.run / EXPORT_FOLDER
    if (exported / "config.json").is_file():
        folders.setdefault(last_step, exported)
    for option in options.weights:
        version, separator, folder = option.partition("=")
        if not separator or not version.isdecimal():
            raise ValueError(f"--weights {option}: expected VERSION=FOLDER, a number of steps")
        folders[int(version)] = Path(folder)
    return folders


if __name__ == "__main__":
    sys.exit(main())
