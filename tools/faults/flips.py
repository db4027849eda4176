#!/usr/bin/env python3
"""Random bits flipped in the files that a run reads: each flip must be caught by a clear error, or be harmless.

A small run is made and finished. Then its files are read as a start of a run, or a command, reads them. A flip is

    caught     a RunError, or the warning that a record was altered
    harmless   equal values were read
    accepted   other values were read, without an error
    unclear    an exception other than a RunError

    python -m tools.faults.flips --folder /tmp/flips [--flips 1000] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint, tensor_digests
from megatron_dppo.config import load_config
from megatron_dppo.convert.streaming import hf_to_megatron
from megatron_dppo.data.batch_file import SavedBatch
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.loop import run_rank
from megatron_dppo.loop.inputs import model_files
from megatron_dppo.loop.run_state import FILES, RunState
from megatron_dppo.metrics import records
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.hub_download import check_downloaded_files
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import sha256_of
from megatron_dppo.trainer.checkpoint.directory import check_content, check_sizes, read_manifest
from tools.faults.material import make_material

STEPS = 3
OUTCOMES = ("caught", "harmless", "accepted", "unclear")


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and the function that reads them. Equal results mean that equal values were read."""

    name: str
    files: Sequence[Path]
    read: Callable[[], Any]


def kinds_of(folder: Path) -> list[Kind]:
    """Return the kinds of files that a run in ``folder`` reads."""
    run, material = folder / "run", folder / "material"
    model, data, export = material / "model", material / "train.jsonl", run / records.EXPORT_FOLDER
    converted, batches = folder / "converted", material / "batches"
    newest = sorted((run / records.CHECKPOINTS_FOLDER).glob("step_??????"))[-1]
    rows = records.read_records(run)
    started_from = _file_hashes(model, data)

    def read_start_files() -> None:
        state = RunState(identity={FILES: started_from})
        state.check_files(_file_hashes(model, data), "the checkpoint")

    def read_checkpoint() -> None:
        manifest = read_manifest(newest)
        check_sizes(newest, manifest)
        check_content(newest, manifest["files"])

    def read_batches() -> list[Any]:
        found = []
        for step in records.saved_batch_steps(batches):
            batch = SavedBatch(batches, step)
            for trajectory in batch.read(range(len(batch.problems))):
                found.append([trajectory.digests(), trajectory.reward, trajectory.advantage])
        return found

    def read_rows() -> str:
        present = records.read_records(run)
        if records.sha256_until(present, STEPS) != records.sha256_until(rows, STEPS):
            # A start logs this, and continues, because nothing trains on records.
            raise records.RecordsError("the records were altered since the checkpoint")
        return records.sha256_until(present, STEPS)

    def read_history() -> list[bool]:
        past = records.read_history(run)
        # A start only needs to know whether a checkpoint was written, and whether anything is damaged.
        if past.damage is not None:
            raise records.RecordsError(past.damage)
        return [past.saved_step is not None, past.counts_checkpoint]

    return [
        Kind("start model with a certificate", _files(export), lambda: _tensor_hashes(export)),
        Kind("converted model (torch_dist)", _files(converted), lambda: _tensor_hashes(converted)),
        Kind(
            "start model and data, resumed",
            [*model_files(str(model), None).values(), data],
            read_start_files,
        ),
        Kind(
            "download from the hub",
            [model / "model.safetensors"],
            lambda: check_downloaded_files(_files(model)),
        ),
        Kind("config.yaml", [run / "config.yaml"], lambda: load_config(str(run / "config.yaml"))),
        Kind("checkpoint", _files(newest), read_checkpoint),
        Kind("saved batches", _files(batches), read_batches),
        Kind("metrics.jsonl", [run / records.RECORDS_FILE], read_rows),
        Kind("last_checkpoint.json", [run / "last_checkpoint.json"], read_history),
    ]


def _tensor_hashes(folder: Path) -> dict[str, str]:
    shape = load_model_shape(folder)
    with open_checkpoint(folder) as reader:
        reader.check(shape)
    return tensor_digests(folder)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size and ".cache" not in path.parts
    )


def _file_hashes(model: Path, data: Path) -> dict[str, str]:
    files = {**model_files(str(model), None), "data.train": data}
    return {name: sha256_of(path) for name, path in files.items()}


def make_run(folder: Path) -> None:
    """Make the material, finish a run on it, convert its export, and describe the start model as a download."""
    material = folder / "material"
    material.mkdir(parents=True)
    config_file = make_material(material, STEPS)
    config = load_config(str(config_file), [f"run.directory={folder / 'run'}"])
    with RunDirectory(folder / "run") as directory:
        directory.write_config(config)
    run_rank(config, RunSpec.of(config))
    hf_to_megatron(folder / "run" / records.EXPORT_FOLDER, folder / "converted")
    weights = material / "model" / "model.safetensors"
    metadata = weights.parent / ".cache" / "huggingface" / "download" / f"{weights.name}.metadata"
    metadata.parent.mkdir(parents=True)
    # A flip rewrites the file. With a later time in the metadata, the file does not look changed on purpose.
    later = weights.stat().st_mtime + 10**6
    metadata.write_text(f"{'0' * 40}\n{sha256_of(weights)}\n{later}\n")


def outcome_of(kind: Kind, intact: Any) -> tuple[str, str]:
    """Read the files of a kind, and return the outcome of the flip, with the error if there is one."""
    try:
        present = kind.read()
    except RunError as error:
        return "caught", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    return ("harmless" if present == intact else "accepted"), ""


def flip(path: Path, position: int, bit: int) -> None:
    """Flip one bit in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def try_flips(
    kinds: Sequence[Kind], flips: int, seed: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return the outcomes' counts for each kind, and a line for each flip that was accepted or unclear."""
    rng = random.Random(seed)
    intact = {kind.name: kind.read() for kind in kinds}
    counts = {kind.name: Counter[str]() for kind in kinds}
    bad = []
    for number in range(flips):
        kind = kinds[number % len(kinds)]
        path = rng.choice(kind.files)
        position, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        flip(path, position, bit)
        outcome, text = outcome_of(kind, intact[kind.name])
        flip(path, position, bit)
        counts[kind.name][outcome] += 1
        if outcome in ("accepted", "unclear"):
            bad.append(
                f"{outcome}: bit {bit} of byte {position} of {path} ({kind.name}): {text[:200]}"
            )
    return counts, bad


def table(counts: dict[str, Counter[str]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| files | flips | {' | '.join(OUTCOMES)} |", f"|---|---|{'---|' * len(OUTCOMES)}"]
    for name, outcome_counts in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        cells = " | ".join(str(outcome_counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {name} | {outcome_counts.total()} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    options = _parser().parse_args()
    folder: Path = options.folder.absolute()
    if not (folder / "converted").exists():
        shutil.rmtree(folder, ignore_errors=True)
        make_run(folder)
    counts, bad = try_flips(kinds_of(folder), options.flips, options.seed)
    print("\n".join(bad))
    print(table(counts))
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/flips"), help="of the run")
    parser.add_argument("--flips", type=int, default=1000, help="number of flips (1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the flips (1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
