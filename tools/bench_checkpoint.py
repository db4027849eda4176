#!/usr/bin/env python3
"""Benchmark of checkpoints against Megatron-Core's torch_dist: seconds that training stands still, bytes and memory.

Every mode saves the same state (bfloat16 weights, Adam in fp32) several times, in separate processes. The first save
also allocates memory. With --before, another checkout of this project is measured in the same round.

    python tools/bench_checkpoint.py --folder /tmp/bench_checkpoint --ranks 4 --expert 2 --gb 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_rows import Quantity, write_rows
from rich.console import Console
from rich.table import Table

from megatron_dppo.system.ports import free_port
from megatron_dppo.system.processes import kill_families, start_process

RANK = Path(__file__).parent / "checkpoint_benchmark" / "rank.py"
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
BYTES_PER_PARAMETER = 14
"""2 bytes of the weight, and 12 bytes of the master weight and the two moments."""
MODES = ("background", "foreground", "megatron background", "megatron foreground")


class RanksEndedError(RuntimeError):
    """A rank ended before it had measured; the message names the file of its output."""


@dataclass(frozen=True)
class ModeFigures:
    """The figures of one mode.

    ``timings``: seconds of each save on the slowest rank. ``memory``: largest memory of all processes above the memory
    at the start, in bytes. ``written``: bytes of a checkpoint's files.
    """

    mode: str
    timings: list[dict[str, float]]
    memory: int
    written: int

    def later_median(self, key: str) -> float:
        """The median of all saves except the first."""
        return statistics.median(timing[key] for timing in self.timings[1:])


def make_material(folder: Path, gigabytes: float) -> None:
    """Write a random Qwen3-MoE with so many layers that a checkpoint has ``gigabytes``."""
    import torch
    from transformers import Qwen3MoeConfig

    from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.mapping import hf_tensors

    hidden, inner, experts, vocabulary = 1024, 512, 16, 8192
    layer = 3 * hidden * inner * experts + 3 * hidden * hidden
    layers = max(
        1, round((gigabytes * 1e9 / BYTES_PER_PARAMETER - 2 * vocabulary * hidden) / layer)
    )
    # transformers takes this key without declaring it.
    head: dict[str, Any] = {"head_dim": 128}
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, **head, moe_intermediate_size=inner, num_experts=experts,
        num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True, dtype="bfloat16",
        tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    side = folder.with_name("side")
    config.save_pretrained(side)
    shape = load_model_shape(side)
    tensors = (
        (name, torch.randn(dims).to(torch.bfloat16) * 0.02)
        for name, dims in hf_tensors(shape).items()
    )
    write_hf_checkpoint(folder, shape, torch.bfloat16, tensors, side_files_from=side)


def measure(mode: str, settings: dict[str, Any], before: Path | None) -> ModeFigures:
    """Start the ranks of one mode, and watch their memory while they save."""
    folder = Path(settings["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The mode "before" saves in the foreground, with the code of another checkout.
    rank_mode = "foreground" if mode == "before" else mode
    ranks = start({**settings, "mode": rank_mode}, before if mode == "before" else None)
    try:
        wait_for(ranks, [folder / f"ready{rank}" for rank in range(len(ranks))])
        start_bytes = memory_of(ranks)
        peak_bytes = start_bytes
        (folder / "go").touch()
        done = [folder / f"timings{rank}.json" for rank in range(len(ranks))]
        while not all(path.exists() for path in done):
            if any(process.poll() not in (None, 0) for process in ranks):
                raise RanksEndedError(f"a rank ended; see {folder}/log*")
            peak_bytes = max(peak_bytes, memory_of(ranks))
            time.sleep(0.1)
        for process in ranks:
            process.wait()
    finally:
        # Kill the processes that Megatron's writer has started, too.
        kill_families(ranks)
    timings_by_rank = [json.loads(path.read_text()) for path in done]
    slowest: list[dict[str, float]] = []
    for timings_of_save in zip(*timings_by_rank, strict=True):
        keys = timings_of_save[0]
        slowest.append({key: max(timings[key] for timings in timings_of_save) for key in keys})
    last_checkpoint = max((folder / "saved").iterdir(), key=_modification_time)
    files = [path for path in last_checkpoint.rglob("*") if path.is_file()]
    written_bytes = sum(path.stat().st_size for path in files)
    return ModeFigures(mode, slowest, peak_bytes - start_bytes, written_bytes)


def _modification_time(path: Path) -> float:
    return path.stat().st_mtime


def start(settings: dict[str, Any], before: Path | None) -> list[subprocess.Popen]:
    """Start the ranks with the code of this checkout, or of the checkout in ``before``."""
    port = str(free_port())
    processes = []
    for rank in range(settings["ranks"]):
        env = dict(
            os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1",
        )  # fmt: skip
        if before is not None:
            env["PYTHONPATH"] = str(before)
        with open(Path(settings["folder"], f"log{rank}"), "wb") as log:
            command = [sys.executable, str(RANK), json.dumps(settings)]
            processes.append(start_process(command, environment=env, output=log.fileno()))
    return processes


def wait_for(ranks: list[subprocess.Popen], files: list[Path]) -> None:
    """Wait until every rank has written its file."""
    while not all(path.exists() for path in files):
        if any(process.poll() is not None for process in ranks):
            raise RanksEndedError(f"a rank ended before it began; see {files[0].parent}/log*")
        time.sleep(0.1)


def memory_of(ranks: list[subprocess.Popen]) -> int:
    """Bytes of memory of the ranks and their children. A page that several processes share is counted once."""
    total = 0
    for rank in ranks:
        for pid in (rank.pid, *descendants(rank.pid)):
            total += pss(pid)
    return total


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    found = []
    for child in text.split():
        found += [int(child), *descendants(int(child))]
    return found


def pss(pid: int) -> int:
    """A process's proportional share of its memory in bytes (Pss); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def show(results: list[ModeFigures], bytes_of_state: int) -> None:
    """Print the table. The reference of all ratios is Megatron in the foreground."""
    table = Table(title=f"{bytes_of_state / 1e9:.2f} GB of state")
    for column in (
        "mode", "stands still s (first)", "(later)", "until there s (first)", "(later)",
        "still / megatron's", "memory above start GB", "x state", "written GB",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "mode" else "right")
    reference = next((r for r in results if r.mode == "megatron foreground"), results[0])
    for result in results:
        first = result.timings[0]
        table.add_row(
            result.mode,
            f"{first['stood_still']:.2f}", f"{result.later_median('stood_still'):.2f}",
            f"{first['until_there']:.2f}", f"{result.later_median('until_there'):.2f}",
            f"{result.later_median('stood_still') / reference.later_median('stood_still'):.3f}",
            f"{result.memory / 1e9:.2f}", f"{result.memory / bytes_of_state:.2f}",
            f"{result.written / 1e9:.2f}",
        )  # fmt: skip
    CONSOLE.print(table)


def rows(results: list[ModeFigures], bytes_of_state: int, ranks: int) -> Iterator[Quantity]:
    """Yield the quantities for the scale report."""
    how = f"{bytes_of_state / 1e9:.2f} GB of state in {ranks} ranks of one machine, median of the saves after the first"
    for result in results:
        yield Quantity(
            f"training stands still, {result.mode}", result.later_median("stood_still"), "s", how
        )
        yield Quantity(
            f"until the files are there, {result.mode}",
            result.later_median("until_there"),
            "s",
            how,
        )
        above = result.memory / bytes_of_state
        yield Quantity(f"memory above the start over the state, {result.mode}", above, "", how)


def main() -> None:
    """Make the model, measure every mode, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench_checkpoint"))
    parser.add_argument("--gb", type=float, default=2.0, help="of checkpoint")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--expert", type=int, default=2, help="expert parallelism")
    parser.add_argument("--saves", type=int, default=3, help="by each mode, at least 2")
    parser.add_argument(
        "--plain", action="store_true", help="the plain optimizer, not the distributed one"
    )
    parser.add_argument(
        "--before", type=Path, help="another checkout of this project, to measure too"
    )
    parser.add_argument("--rows", type=Path, help="write all of it for tools/scale_report.py here")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    options = parser.parse_args()
    material = options.folder / "model"
    shutil.rmtree(options.folder, ignore_errors=True)
    make_material(material, options.gb)
    settings = {
        "material": str(material), "folder": str(options.folder / "work"), "ranks": options.ranks,
        "expert": options.expert, "saves": options.saves, "distributed": not options.plain,
    }  # fmt: skip
    modes = list(options.modes)
    if options.before:
        modes.append("before")
    results = []
    for mode in modes:
        CONSOLE.print(f"{mode} ...")
        try:
            results.append(measure(mode, settings, options.before))
        except RanksEndedError as error:
            raise SystemExit(f"{mode}: {error}") from error
        CONSOLE.print(f"  stands still for {results[-1].later_median('stood_still'):.2f} s")
    weights = sum(path.stat().st_size for path in material.glob("*.safetensors"))
    state = weights // 2 * BYTES_PER_PARAMETER
    show(results, state)
    if options.rows is not None:
        write_rows(options.rows, "checkpoints", list(rows(results, state, options.ranks)))
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
