"""Material of the demo: data, a random model, and the supervised warm start that RL begins from.

    python -m megatron_dppo.demo.prepare [--seed 1] [--root runs/tiny_moe/material] [key.path=value
    ...]

Makes ``<root>/seed-<seed>/`` with train.jsonl, held_out.jsonl, warm_start.jsonl, ``random/`` (the
initial checkpoint) and ``warm/`` (the policy that RL starts from, a Hugging Face folder). Overrides
apply to the warm start's configuration, warm_start.yaml. A finished folder is used again unless its
sources, seed or overrides have changed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo import EXAMPLES
from megatron_dppo.demo.make_data import make_data

HERE = Path(__file__).resolve().parent
ROOT = Path("runs/tiny_moe/material")
WARM_START = EXAMPLES / "tiny_moe" / "warm_start.yaml"
SOURCES = (HERE / "make_data.py", HERE / "make_model.py", HERE / "prepare.py", WARM_START)
SUPERVISED = "megatron_dppo.supervised"
INTERRUPTED = (129, 130, 143)
"""Exit codes of a run that SIGHUP, Ctrl-C or SIGTERM stopped."""
STAMP = "made_from.json"
"""File that is written last; a folder without it is incomplete."""


@dataclass(frozen=True)
class Material:
    """Paths of the demo's inputs."""

    folder: Path

    @property
    def train(self) -> Path:
        """Problems to train on."""
        return self.folder / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """Problems for evaluation; neither RL nor the warm start trains on them."""
        return self.folder / "held_out.jsonl"

    @property
    def warm_checkpoint(self) -> Path:
        """The policy that RL starts from: a Hugging Face folder."""
        return self.folder / "warm"


def prepare(seed: int, root: Path = ROOT, overrides: Sequence[str] = ()) -> Material:
    """Make the material if needed and return its paths. Raises SystemExit if the warm start fails."""
    folder = root / f"seed-{seed}"
    made_from = fingerprint(seed, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with open(root / f"seed-{seed}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second demo waits
        if _stamp(folder) == made_from:
            print(f"material: {folder} is there", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, seed, overrides)
            (folder / STAMP).write_text(json.dumps(made_from, indent=1) + "\n")
    return Material(folder)


def _make(folder: Path, seed: int, overrides: Sequence[str]) -> None:
    began = time.monotonic()
    counts = make_data(folder, seed)
    lines = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"material: lines of data: {lines}", flush=True)
    _make_random_model(folder / "random", seed)
    _warm_start(folder, seed, overrides)
    print(f"material: {folder} made in {time.monotonic() - began:.0f} s", flush=True)


def fingerprint(seed: int, overrides: Sequence[str]) -> dict[str, object]:
    """All that the material depends on: hashes of its sources, seed and overrides."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES}
    return {"seed": seed, "overrides": list(overrides), "sources": digests}


def _stamp(folder: Path) -> object:
    path = folder / STAMP
    return json.loads(path.read_text()) if path.is_file() else None


def _make_random_model(folder: Path, seed: int) -> None:
    from megatron_dppo.demo.make_model import make_model  # imports torch: only if needed

    print(f"material: a random Qwen3-MoE of {make_model(folder, seed):,} parameters", flush=True)


def _warm_start(folder: Path, seed: int, overrides: Sequence[str]) -> None:
    print("material: supervised warm start", flush=True)
    run = folder / "warm_start"
    command = [
        *(sys.executable, "-m", SUPERVISED, str(WARM_START)),
        f"run.directory={run}",
        f"run.seed={seed}",
        f"model.hf_checkpoint={folder / 'random'}",
        f"data.train={folder / 'warm_start.jsonl'}",
        *overrides,
    ]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the matrices are too small for two
    code = run_to_the_end(command, env=one_thread)
    if code in INTERRUPTED:
        raise SystemExit(code)
    if code != 0:
        raise SystemExit(f"the warm start ended with exit code {code}; its output is above")
    (run / "hf").rename(folder / "warm")


def run_to_the_end(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run ``command`` and return its exit code; what ends the parent does not cut it short.

    A terminal sends Ctrl-C, and SIGHUP when it closes, to parent and child. ``subprocess.run`` would then
    kill the child after 0.25 s; here the parent ignores it and waits until the child has saved its state and
    ended. SIGTERM, which comes to the parent alone, is passed on.
    """
    # Started before signals are ignored: a child inherits that.
    process = subprocess.Popen(command, env=env)
    handlers: dict[int, Any] = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGHUP: signal.SIG_IGN,
        signal.SIGTERM: lambda *_: process.terminate(),
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    arguments = parser.parse_intermixed_args()
    prepare(arguments.seed, arguments.root, arguments.overrides)


if __name__ == "__main__":
    main()
