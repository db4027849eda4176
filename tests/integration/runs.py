"""Start, watch and disturb real runs of ``megatron-dppo train`` on a tiny model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from megatron_dppo.system.fork_server import SharedForkServers
from tests.integration import shared_imports
from tests.patience import UNBOUNDED_S, Patience
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GROUP = 8, 4
TRAIN = "megatron_dppo.train"


def write_material(folder: Path, family: str = "qwen3_moe", **model: Any) -> Path:
    """Write a random tiny model, sums for training and evaluation, and a configuration. Return the configuration's
    path.

    ``model``: changes to the family's tiny model.

    A response with a digit has a reward, so that a random policy sometimes has one.
    """
    save_tiny_model(folder / "model", family, seed=1, **model)
    rng = random.Random(0)
    for name, count in (("train", 64), ("held_out", 4)):
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "run": {"directory": str(folder / "run"), "steps": 4},
        "model": {"hf_checkpoint": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "evaluation": {"sums": str(folder / "held_out.jsonl")},
            "max_prompt_tokens": 32,
        },
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_response_tokens": 12,
            "save": True,
        },
        "reward": {"name": "exact_integer"},
        "algorithm": {"truncated_responses": "as-verified"},
        "parallel": {"world_size": 2, "tensor": 2},
        "training": {"prompts_per_mini_batch": 4, "micro_batch_tokens": 512},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 4, "samples_per_prompt": 2},
        "checkpoint": {"every": 1, "verify_export": True},
        "engine": {"start_timeout_s": UNBOUNDED_S},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class TrainingRun:
    """One ``megatron_dppo.train`` process, or one of ``module``, as a user starts it. The exit of the context kills it.

    With ``shares_imports`` its processes are forks of this process's fork servers, so that only the first run imports
    the libraries. Then only one run may be active at a time: the forks of the fork servers count as its family.

    ``variables``: environment variables of the run, in addition to this process's.
    """

    def __init__(
        self,
        config: Path,
        *overrides: str,
        variables: Mapping[str, str] | None = None,
        shares_imports: bool = True,
        module: str = TRAIN,
    ) -> None:
        settings = dict(yaml.safe_load(config.read_text()))
        given = dict(o.split("=", 1) for o in overrides)
        self.directory = Path(given.get("run.directory", settings["run"]["directory"]))
        self.output = self.directory.with_suffix(f".{time.monotonic_ns()}.out")
        self._shares_imports = shares_imports and module == TRAIN
        self._config, self._overrides = config, overrides
        own_variables = environment_without("PYTEST_CURRENT_TEST")
        self._variables = {**own_variables, "PYTHONPATH": str(ROOT), **(variables or {})}
        self._command = [sys.executable, "-m", module, str(config), *overrides]

    def __enter__(self) -> Self:
        servers = SharedForkServers()
        if self._shares_imports:
            servers = shared_imports.share_imports(self._config, self._overrides, self._variables)
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**self._variables, **servers.variables},
                pass_fds=servers.descriptors,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for member in self.family():
                member.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        """The run's output so far."""
        return self.output.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return the supervisor and all its descendants."""
        try:
            root = psutil.Process(self.process.pid)
            forks = shared_imports.forks() if self._shares_imports else []
            return [*forks, *root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return []

    def find(self, *words: str) -> psutil.Process:
        """Return the descendant whose command line or environment has all ``words``."""
        for member in self.family()[:-1]:
            try:
                variables = [f"{name}={value}" for name, value in member.environ().items()]
                text = " ".join([*member.cmdline(), *variables])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if all(word in text for word in words):
                return member
        raise AssertionError(f"no process with {words} in\n{self.text}")

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a trainer rank."""
        for member in self.family()[:-1]:
            with suppress(psutil.NoSuchProcess):
                if member.name() == f"rank{number}":
                    return member
        raise AssertionError(f"no rank {number} in\n{self.text}")

    def patience(self, seconds: float) -> Patience:
        """Return a limit of ``seconds`` for the run's own processes."""
        return Patience(seconds, lambda: [member.pid for member in self.family()])

    def wait_for(self, condition, timeout: float = 300.0) -> None:
        """Wait until ``condition()`` is true. Fails with the run's output if the run or the patience ends first."""
        patience = self.patience(timeout)
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{self.text}"
            assert not patience.is_exhausted(), f"not within {timeout} s:\n{self.text}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is recorded."""
        self.wait_for(lambda: step in steps_of(self.directory))

    def interrupt(self) -> None:
        """Send SIGINT to the supervisor, as a terminal does at Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def finish(self, code: int = 0, timeout: float = 300.0) -> None:
        """Wait until the run ends. It must end with this exit code, and leave no process behind."""
        family = self.family()
        patience = self.patience(timeout)
        while (exit_code := self.process.poll()) is None:
            assert not patience.is_exhausted(), f"still running after {timeout} s:\n{self.text}"
            time.sleep(0.05)
        assert exit_code == code, f"exit code {exit_code}, expected {code}:\n{self.text}"
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, f"left behind: {left}\n{self.text}"


def records_of(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the run's metrics."""
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_of(directory: Path) -> list[int]:
    """Return the recorded steps, in order."""
    return [record["step"] for record in records_of(directory)]


def summary_of(directory: Path) -> dict[str, Any]:
    """Return the run's ``summary.json``."""
    return json.loads((directory / "summary.json").read_text())


def environment_without(*names: str) -> dict[str, str]:
    """Return this process's environment without the variables ``names``."""
    return {k: v for k, v in os.environ.items() if k not in names}
