"""Runs and servers of the check's parts: the demo's recipe with a part's overrides, then the overrides of the user."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo import EXAMPLES
from megatron_dppo.cluster.preflight.inspection import package_version
from megatron_dppo.cluster.rehearsal.signal import TARGET
from megatron_dppo.config import load_config
from megatron_dppo.demo.material import engine_overrides, make_data
from megatron_dppo.diagnostics.gpu_check import Bench, CheckRow, LackingError, must_run, tiny_model
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import (
    RECORDS_FILE,
    Record,
    decode_records,
    last_step,
    read_lines,
    series,
)
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.ports import free_port
from megatron_dppo.system.processes import kill_families, start_process

RECIPE = str(EXAMPLES / "tiny_moe" / "config.yaml")
WITH_GRADIENTS = (f"reward.name={TARGET}", "algorithm.truncated_responses=as-verified")
"""Overrides that give a random model's responses different rewards. All of them may be wrong, and reach the limit."""
_SMALL = (
    "parallel.world_size=1",
    "parallel.expert=1",
    "rollout.prompts_per_step=16",
    "training.prompts_per_mini_batch=8",
    "evaluation.every=1000",
    "data.evaluation={}",
    "checkpoint.verify_export=false",
)
SERVER_RESPONSE_TOKENS = 64
"""Tokens of the longest response of a server that a part starts itself."""
_POLL_S = 0.2


def require_engine() -> None:
    """Raise LackingError if SGLang is not installed."""
    if package_version("sglang") is None:
        raise LackingError("sglang is not installed")


def tiny_run(bench: Bench, name: str, dtype: Dtype, overrides: Sequence[str]) -> Path:
    """Train the demo's random model, one step unless ``overrides`` set more; return the run's directory."""
    require_engine()
    material = bench.folder / "material"
    if not material.exists():
        tiny_model(material / "model")
        make_data(material, seed=1)
    directory = bench.folder / name
    must_run(
        [
            "train",
            RECIPE,
            f"run.directory={directory}",
            "run.steps=1",
            f"model.hf_checkpoint={material / 'model'}",
            f"model.dtype={dtype}",
            f"data.train={material / 'train.jsonl'}",
            *_SMALL,
            *WITH_GRADIENTS,
            *engine_overrides(bench.gpus),
            *overrides,
            *bench.overrides,
        ]
    )
    return directory


def gradient_row(label: str, records: Sequence[Record]) -> CheckRow:
    """Return a row that holds if every step of a run had a gradient."""
    _, norms = series(records, metric_names.GRAD_NORM)
    text = ", ".join(f"{norm:.2g}" for norm in norms) or "none"
    return CheckRow(label, text, "above 0 in every step", bool(norms) and min(norms) > 0)


def steps_without_checkpoint(arguments: Sequence[str], directory: Path, steps: int) -> list[Record]:
    """Run ``megatron-dppo train`` with ``arguments`` until it has recorded ``steps`` steps, and return the records.

    The run is killed then, because a run that ends saves a checkpoint, which may be larger than the disk. Raises
    RuntimeError if the run ends earlier.
    """
    command = [sys.executable, "-m", "megatron_dppo", "train", RECIPE, *arguments]
    print(" ".join(command[2:]), flush=True)
    process = start_process(command, environment=os.environ, output=sys.stdout.fileno())
    try:
        while last_step(directory) < steps:
            code = process.poll()
            if code is not None:
                raise RuntimeError(f"the run ended with exit code {code} before step {steps}")
            time.sleep(_POLL_S)
    finally:
        kill_families([process])
    # The run may have been killed while it wrote a later record.
    complete_lines = [line for line in read_lines(directory / RECORDS_FILE) if line.endswith("\n")]
    records = decode_records(complete_lines, str(directory))
    return [record for record in records if (record["step"] or 0) <= steps]


@dataclass(frozen=True)
class StartedServer:
    """A server that is healthy.

    ``key``: its key for generation and for changes. ``shape``: shape of its model.
    """

    process: EngineProcess
    key: str
    shape: ModelShape


def start_server(
    bench: Bench, model: Path, dtype: Dtype, name: str, first_device: int = 0
) -> StartedServer:
    """Start a server of ``model``, and wait until it is healthy; ``name`` is part of its log's name."""
    config = load_config(
        RECIPE,
        [
            f"run.directory={bench.folder / 'run'}",
            f"model.hf_checkpoint={model}",
            f"model.dtype={dtype}",
            f"rollout.max_response_tokens={SERVER_RESPONSE_TOKENS}",
            *engine_overrides(bench.gpus),
            *bench.overrides,
        ],
    )
    key = secrets.token_hex()
    spec = RunSpec.of_checked(config)
    process = EngineProcess(
        config,
        spec.servers,
        port=free_port("127.0.0.1"),
        log_path=bench.folder / f"server_{name}.log",
        seed=1,
        api_key=key,
        admin_api_key=key,
        first_device=first_device,
    )
    process.start()
    process.wait_healthy()
    return StartedServer(process, key, spec.model.shape)


@contextmanager
def running_server(bench: Bench, model: Path, dtype: Dtype) -> Iterator[StartedServer]:
    """Run a server of ``model`` for the body."""
    server = start_server(bench, model, dtype, "generation")
    try:
        yield server
    finally:
        server.process.kill()
