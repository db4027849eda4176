"""Run the whole loop on this machine: router replay, the gap between trainer and server, weight updates, the demo."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.diagnostics.gpu_check import (
    Bench,
    CheckRow,
    at_most,
    must_run,
    part,
    run_command,
    tiny_model,
)
from megatron_dppo.diagnostics.gpu_check.runs import (
    gradient_row,
    require_engine,
    start_server,
    tiny_run,
)
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import SUMMARY_FILE, Record, read_records
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import GRACE_S
from megatron_dppo.weights.one_rank import OneRankWeights
from megatron_dppo.weights.transaction import WeightUpdateError, WeightUpdater


def updates_row(label: str, records: Sequence[Record]) -> CheckRow:
    """Return a row that holds if every weight update was verified, with the figures of the last update."""
    updates = sum(record.get(metric_names.WEIGHT_UPDATES) or 0 for record in records)
    verified = sum(record.get(metric_names.WEIGHT_UPDATES_VERIFIED) or 0 for record in records)
    figures: dict[str, float] = {}
    for name, value in records[-1].items():
        if name.startswith("weights/") and isinstance(value, float | int):
            figures[name] = value
    text = f"{verified:.0f} of {updates:.0f} verified tensor by tensor"
    if "weights/bytes_moved" in figures:
        moved_mb = figures["weights/bytes_moved"] / 1e6
        bound_mb = figures["weights/bytes_bound"] / 1e6
        text += f", {moved_mb:.2f} MB moved, bound {bound_mb:.2f}"
    if "weights/canary_max_abs_diff" in figures:
        text += f", canary {figures['weights/canary_max_abs_diff']:.1e} nats"
    holds = bool(updates >= 2 and verified == updates)
    return CheckRow(label, text, "all, at least 2", holds, figures)


def gap_row(record: Record, dtype: Dtype) -> CheckRow:
    """Return a row that holds if mean |pi - mu| at equal weights is in its normal range."""
    normal = BY_METRIC[metric_names.GAP_ON_POLICY]
    gap = record.get(metric_names.GAP_ON_POLICY)
    value = float("nan") if gap is None else gap
    bound = normal.upper(dtype)
    return CheckRow(
        normal.label,
        f"{value:.2g}",
        f"at most {bound:.2g} in {dtype}",
        value <= bound,
        {"gap": value},
    )


@part("router replay: what the server recorded is what the trainer routes by", 500.0)
def r3(bench: Bench) -> Iterator[CheckRow]:
    """Train two steps in bfloat16 with recorded routing; yield routing and gap of step 1, and the weight updates."""
    run = tiny_run(bench, "run", "bfloat16", ["rollout.router_replay=true", "run.steps=2"])
    # The first record is of step 0, the work before training.
    records = read_records(run)
    yield from routing_rows(records[1])
    yield gap_row(records[1], "bfloat16")
    yield gradient_row("gradient norm", records)
    yield updates_row("weight updates", records)


def routing_rows(record: Record) -> Iterator[CheckRow]:
    """Yield whether all tokens have recorded routing, and how often the trainer's routers choose the same experts."""
    unrecorded_share = record.get(metric_names.ROUTING_UNRECORDED)
    yield CheckRow(
        "tokens without recorded routing", _percent(unrecorded_share), "0%", unrecorded_share == 0
    )
    agreement = record.get(metric_names.ROUTING_AGREEMENT_FIRST)
    low = BY_METRIC[metric_names.ROUTING_AGREEMENT].low
    holds = agreement is not None and agreement >= low
    yield CheckRow(
        "trainer's own routing equal to the server's",
        _percent(agreement),
        f"at least {low:.0%}",
        holds,
    )


def _percent(share: float | None) -> str:
    if share is None:
        return "not recorded"
    return f"{share:.2%}"


@part("trainer against server in bfloat16: mean |pi - mu| and its parts", 600.0)
def mismatch(bench: Bench) -> Iterator[CheckRow]:
    """Train a step with saved rollouts and recorded routing, then run ``megatron-dppo doctor --parts`` on its batch."""
    settings = ["rollout.save=true", "rollout.router_replay=true", "rollout.temperature=0.8"]
    run = tiny_run(bench, "run", "bfloat16", settings)
    yield gap_row(read_records(run)[1], "bfloat16")
    ladder = bench.folder / "mismatch.json"
    picture = bench.folder / "mismatch.png"
    arguments = [str(run), "--step=1", f"--json={ladder}", f"--png={picture}"]
    if bench.gpus:
        arguments.append("--no-precision")
        why = "not here: Transformer Engine has no float32 attention of packed sequences"
        yield CheckRow("numerics with a float32 trainer", why)
    must_run(["doctor", "--parts", *arguments])
    yield from cause_rows(json.loads(ladder.read_bytes()))


def cause_rows(ladder: Mapping[str, Any]) -> Iterator[CheckRow]:
    """Yield each cause's part of the gap. The part ``numerics`` must be in the normal range."""
    bound = BY_METRIC[metric_names.GAP_ON_POLICY].upper("bfloat16")
    for cause, gap in ladder["parts"].items():
        # The other parts only inform.
        expected_text, holds = "", None
        if cause == "numerics":
            expected_text, holds = f"at most {bound:.2g}", gap <= bound
        yield CheckRow(f"part: {cause}", f"{gap:.2e}", expected_text, holds, {"part": gap})
    for rung in ladder["rungs"]:
        if rung["fixes"] == "precision":
            gap = rung["gap"]
            yield CheckRow("numerics with a float32 trainer", f"{gap:.2e}", figures={"gap": gap})


UPDATE_LABELS = {
    "distributed": ("shards over gloo", "shards over NCCL"),
    "tensor": ("shared host memory", "CUDA IPC"),
    "disk": ("disk", "disk"),
}
"""Strategy -> its label without a GPU, and with GPUs."""


@part("weight updates in shards, by shared memory and by disk, verified tensor by tensor", 900.0)
def weights(bench: Bench) -> Iterator[CheckRow]:
    """Run one step by each strategy, with two updates. The first update goes into a server that has just started."""
    for strategy, (label_without_gpu, label_with_gpus) in UPDATE_LABELS.items():
        label = label_with_gpus if bench.gpus else label_without_gpu
        if strategy == "distributed" and bench.gpus == 1:
            yield CheckRow(label, "not here: NCCL needs a second GPU")
            continue
        run = tiny_run(bench, strategy, bench.dtype, [f"weight_sync.strategy={strategy}"])
        yield updates_row(label, read_records(run))


@part("trainer and server take turns on one device, weights by shared memory and by disk", 600.0)
def colocated(bench: Bench) -> Iterator[CheckRow]:
    """Train two steps with each strategy. In each turn, one side releases its memory and the other restores its own.

    On a GPU the server releases weights and key-value cache, and the trainer parks its state in host memory. Without a
    GPU, SGLang accepts the calls and releases nothing; the trainer still parks.
    """
    for strategy in ("tensor", "disk"):
        label_without_gpu, label_with_gpus = UPDATE_LABELS[strategy]
        label = label_with_gpus if bench.gpus else label_without_gpu
        settings = ["engine.placement=colocated", "run.steps=2", f"weight_sync.strategy={strategy}"]
        records = read_records(tiny_run(bench, strategy, bench.dtype, settings))
        yield updates_row(label, records)
        yield gap_row(records[-1], bench.dtype)
        yield gradient_row(f"{label}: gradient norm", records)
        yield turns_row(f"{label}: a step in turns", records[-1])


def turns_row(label: str, record: Record) -> CheckRow:
    """Return a row of the seconds of a step's phases, for reading."""
    seconds: dict[str, float] = {}
    for name, value in record.items():
        phase = metric_names.phase_of(name)
        if phase is not None and value is not None:
            seconds[phase] = value
    text = ", ".join(f"{phase} {value:.2g} s" for phase, value in seconds.items())
    return CheckRow(label, text, figures=seconds)


UPDATE_LIMIT_S = 10.0
"""``weight_sync.timeout_s`` of the updates that ``broken_update`` interrupts."""
_ENTER_S = 2.0
"""A server waits for its first message at most this many seconds after its call."""
_FREED_S = 60.0
"""Seconds within which the scheduler of a resumed server must answer."""


@part("a server that is killed, then one that is stopped, in the midst of a weight update", 600.0)
def broken_update(bench: Bench) -> Iterator[CheckRow]:
    """Interrupt a server that waits for a message of an update, as a fault of a node would.

    This process must survive, and a stopped server must work again after it is resumed. Without GPUs, messages go over
    gloo. This part has not yet run on a GPU.
    """
    require_engine()
    if bench.gpus == 1:
        yield CheckRow("broken update over NCCL", "not here: NCCL needs a second GPU")
        return
    model = tiny_model(bench.folder / "model")
    with AsyncRunner() as runner:
        for what, signal_number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            server = InterruptedServer.start(bench, model, runner, what)
            try:
                yield from interrupted_rows(server, what, signal_number)
            finally:
                server.kill()


class InterruptedWeights(OneRankWeights):
    """Weights that call ``before_sending`` once the server waits for them, and forget it."""

    before_sending: Callable[[], None] | None = None

    def values(self) -> Mapping[ParameterKey, torch.Tensor]:
        if self.before_sending is not None:
            time.sleep(_ENTER_S)
            self.before_sending()
            self.before_sending = None
        return super().values()


class InterruptedServer:
    """One SGLang server with a tiny model, and updates of it from this process's device."""

    def __init__(
        self,
        process: EngineProcess,
        engine: EngineWeights,
        source: InterruptedWeights,
        runner: AsyncRunner,
    ) -> None:
        self.process = process
        self.engine = engine
        self.source = source
        self.runner = runner
        self._versions = count(1)

        async def open_engine(url: str) -> EngineWeights:
            return engine

        config = WeightSyncConfig(timeout_s=UPDATE_LIMIT_S, canary_every=0)
        self.updater = WeightUpdater(source, config, lambda fault: fault, open_engine, runner)

    @classmethod
    def start(cls, bench: Bench, model: Path, runner: AsyncRunner, name: str) -> Self:
        """Start a server and wait until it is healthy. If there are GPUs, the server uses the second GPU."""
        started = start_server(bench, model, bench.dtype, name, first_device=min(bench.gpus, 1))
        connect = EngineWeights.connect(
            HttpClient(started.process.url, started.key, started.key),
            started.shape,
            bench.dtype,
            timeout_s=UPDATE_LIMIT_S,
        )
        device = "cuda:0" if bench.gpus else "cpu"
        tensors = {}
        for tensor_name, tensor in load_file(model / "model.safetensors").items():
            tensors[tensor_name] = tensor.to(device, getattr(torch, bench.dtype))
        source = InterruptedWeights(started.shape, tensors)
        return cls(started.process, runner.run(connect), source, runner)

    def send(self, before_sending: Callable[[], None] | None = None) -> None:
        """Send all weights in a new group. Call ``before_sending`` once the server waits for the first message.

        Raises WeightUpdateError that names the server if it is at fault.
        """
        self.updater.attach([self.engine.url])
        self.source.before_sending = before_sending
        self.updater.update(next(self._versions))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(os.getpgid(self.process.pid), number)

    def answers_within(self, limit_s: float) -> bool:
        """Return whether the server's scheduler answers within ``limit_s`` seconds."""
        return self.runner.run(self.engine.is_scheduling(limit_s))

    def kill(self) -> None:
        """End the server, even if it is stopped."""
        self.updater.close(at_once=True)
        self.process.kill()


def interrupted_rows(
    server: InterruptedServer, what: str, signal_number: signal.Signals
) -> Iterator[CheckRow]:
    """Make two updates; during the second, the server gets the signal.

    If the signal stopped the server, resume the server, and make a third update.
    """
    server.send()
    start_time = time.monotonic()
    fault: WeightUpdateError | None = None
    try:
        server.send(lambda: server.signal(signal_number))
    except WeightUpdateError as error:
        fault = error
    seconds = time.monotonic() - start_time
    is_named = fault is not None and fault.engines == (server.engine.url,)
    yield CheckRow(
        f"{what}: the update fails and names the server", str(fault), "it is named", is_named
    )
    # Add a minute for a busy machine. The sum is still far below the 30 minutes after which torch and SGLang would end
    # the transfer themselves.
    limit = _ENTER_S + UPDATE_LIMIT_S + 2 * GRACE_S + 60
    yield at_most(f"{what}: seconds until then", seconds, limit, " s")
    # Wait: if the failure had reached NCCL's watchdog, the watchdog would end this process seconds later.
    time.sleep(GRACE_S)
    # Only a process that survived, with a device that still works, gets past this sum.
    total = sum(float(tensor.sum()) for tensor in server.source.values().values())
    yield CheckRow(f"{what}: this process and its device still work", f"{total:.0f}", "a sum", True)
    if signal_number == signal.SIGSTOP:
        server.signal(signal.SIGCONT)
        answers = server.answers_within(_FREED_S)
        yield CheckRow(
            f"{what}: after it is resumed, its scheduler answers", str(answers), "True", answers
        )
        server.send()
        yield CheckRow(f"{what}: the next update", "received", "received", True)


_FIGURES = ("eval_accuracy_start", "eval_accuracy_end", "mean_abs_prob_gap")


@part("the demo: a tiny mixture of experts learns by DPPO", 1200.0)
def demo(bench: Bench) -> Iterator[CheckRow]:
    """Run the demo, yield its figures and keep its report. The demo's exit code is its own verdict."""
    require_engine()
    run = bench.folder / "run"
    code = run_command(["demo", "--directory", str(run), *bench.overrides])
    yield CheckRow("exit code", str(code), "0", code == 0)
    summary = run / SUMMARY_FILE
    if summary.exists():
        figures = json.loads(summary.read_bytes())
        for name in _FIGURES:
            yield CheckRow(name.replace("_", " "), f"{figures[name]:.3g}")
        verified = figures["weight_updates_verified"]
        updates = figures["weight_updates"]
        yield CheckRow(
            "weight updates verified", f"{verified} of {updates}", "all", verified == updates
        )
        (bench.folder / "report.png").write_bytes((run / "report.png").read_bytes())
