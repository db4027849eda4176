#!/usr/bin/env python3
"""Benchmark of this project's generation client against SGLang's benchmark client, on the same server.

Both request the same number of responses to prompts of the same lengths, each `--response-tokens` long (end of
sequence ignored), with log-probabilities, the same sampling and the same concurrency. Both take turns; the order
alternates between rounds, and the server's cache is flushed before each turn. The peer is
`python -m sglang.benchmark.serving --backend sglang`, once without streaming (as this client) and once with streaming,
its default. The peer's wall time is the duration that the peer reports, and the peer's CPU time is the CPU time in this
duration: the start of the peer's process is not counted. CPU times cover the client's and the server's processes. On a
shared machine, CPU times are more reliable than wall times.

    python tools/bench_generation.py HF_CHECKPOINT [--rounds 5] [--prompts 256] [--concurrency 64]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams
from megatron_dppo.fleet.generation import GenerationLimits, generate_many
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.ports import free_port

ADMIN_KEY = "bench"
OURS, PEER, STREAMING = "ours", "sglang", "sglang, streaming"
QUANTITIES = {
    "wall s": "seconds",
    "client's CPU s": "client_cpu_s",
    "server's CPU s": "server_cpu_s",
    "both CPU s": "cpu_s",
}
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Work:
    """Requests of one turn. ``per_call``: responses per HTTP call, in this project's client."""

    model: str
    prompts: int
    concurrency: int
    prompt_tokens: int
    response_tokens: int
    topk: int
    per_call: int

    @property
    def tokens(self) -> int:
        """Number of response tokens of a turn."""
        return self.prompts * self.response_tokens

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all clients. All values are set: otherwise the server would take
        missing values from the model's folder.
        """
        return SamplingParams(self.response_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Turn:
    """Wall seconds of one turn, and CPU seconds of the client and of the server's processes.

    The server's CPU time includes the time in which a peer's process starts, but the server only idles then.
    """

    seconds: float
    client_cpu_s: float
    server_cpu_s: float = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU seconds of client and server."""
        return self.client_cpu_s + self.server_cpu_s


def prompts(work: Work, seed: int) -> list[tuple[int, ...]]:
    """Prompts as in the peer's data set `random-ids`: consecutive ids from random starts."""
    size = json.loads((Path(work.model) / "config.json").read_text())["vocab_size"]
    starts = np.random.default_rng(seed).integers(0, size, work.prompts).tolist()
    return [
        tuple((s + i + j) % size for j in range(work.prompt_tokens)) for i, s in enumerate(starts)
    ]


def run_ours(work: Work, url: str, seed: int) -> Turn:
    """Run one turn of this project's ``generate_many`` with a new client. It checks every answer."""
    requests = [
        GenerationRequest(i, ids, work.sampling, {"topk": work.topk} if work.topk else {})
        for i, ids in enumerate(prompts(work, seed))
    ]
    limits = GenerationLimits(work.concurrency, responses_per_call=work.per_call)
    with AsyncRunner() as runner:
        client = EngineClient(url)
        start, cpu = time.perf_counter(), time.process_time()
        results = runner.run(generate_many(client, requests, limits))
        turn = Turn(time.perf_counter() - start, time.process_time() - cpu)
        runner.run(client.close())
    tokens = sum(t.sampled for t in results.values())
    return _checked(turn, tokens, work, OURS)


def run_peer(work: Work, url: str, seed: int, *, stream: bool) -> Turn:
    """Run one turn of SGLang's client in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        result, clock = Path(folder) / "result.jsonl", Path(folder) / "cpu"
        words = {
            "--backend": "sglang",
            "--base-url": url,
            "--model": work.model,
            "--dataset-name": "random-ids",
            "--num-prompts": work.prompts,
            "--random-input-len": work.prompt_tokens,
            "--random-output-len": work.response_tokens,
            "--random-range-ratio": 1.0,
            "--max-concurrency": work.concurrency,
            "--top-logprobs-num": work.topk,
            "--extra-request-body": json.dumps({"sampling_params": work.sampling.as_json()}),
            "--warmup-requests": 0,
            "--seed": seed,
            "--output-file": result,
        }
        flags = ["--tokenize-prompt", "--return-logprob", "--disable-tqdm"]
        if not stream:
            flags.append("--disable-stream")
        command = [sys.executable, os.path.abspath(__file__), "--as-peer", str(clock), *flags]
        for option, value in words.items():
            command += [option, str(value)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode or not result.exists():
            sys.exit(
                f"sglang.benchmark.serving failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        reported = json.loads(result.read_text())
        turn = Turn(reported["duration"], float(clock.read_text()))
    return _checked(turn, reported["total_output_tokens"], work, PEER)


def run_as_peer(clock: Path, words: Sequence[str]) -> None:
    """Run SGLang's command line in the child, and write the CPU seconds of the measured part to ``clock``."""
    if importlib.util.find_spec("datasets") is None:
        # SGLang's client imports this library for a data set that is not used here.
        sys.modules["datasets"] = ModuleType("datasets")
        sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]
    from sglang.benchmark import serving

    benchmark = serving.benchmark

    async def timed_benchmark(*args: object, **kwargs: object) -> object:
        start = time.process_time()
        try:
            return await benchmark(*args, **kwargs)
        finally:
            clock.write_text(str(time.process_time() - start))

    serving.benchmark = timed_benchmark
    sys.argv = ["sglang.benchmark.serving", *words]
    serving.cli_main()


def _checked(turn: Turn, tokens: int, work: Work, client: str) -> Turn:
    """Return ``turn``. Exit the program if the client received another number of tokens than it requested."""
    if tokens != work.tokens:
        sys.exit(f"{client} got {tokens} response tokens, expected {work.tokens}")
    return turn


def start_server(work: Work, dtype: str, folder: Path) -> EngineProcess:
    """Start a CPU server as a run does and wait until it is healthy."""
    config = TrainConfig.model_validate(
        {
            "run": {"directory": str(folder), "steps": 1},
            "model": {"hf_checkpoint": work.model, "dtype": dtype},
            "data": {"train": "none.jsonl"},
            "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 64},
            "training": {"prompts_per_mini_batch": 1, "micro_batch_tokens": 1024},
            "optimizer": {"lr": 1e-6},
            "engine": {"device": "cpu"},
        }
    )
    server = EngineProcess(
        config,
        RunSpec.of_checked(config).servers,
        port=free_port("127.0.0.1"),
        log_path=folder / "engine.log",
        seed=1,
        api_key=None,
        admin_api_key=ADMIN_KEY,
    )
    server.start()
    server.wait_healthy()
    return server


CONTENDERS: dict[str, Callable[[Work, str, int], Turn]] = {
    OURS: run_ours,
    PEER: partial(run_peer, stream=False),
    STREAMING: partial(run_peer, stream=True),
}


def bench(work: Work, rounds: int, dtype: str) -> dict[str, list[Turn]]:
    """All turns of every contender, by round. An extra first round warms up the server, and is not counted."""
    turns: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        server = start_server(work, dtype, Path(scratch))
        try:
            for number in range(rounds + 1):
                order = list(CONTENDERS)
                if number % 2 == 0:
                    order.reverse()
                for name in order:
                    _flush(server.url)
                    load = os.getloadavg()[0]
                    before = server_cpu(server.pid)
                    turn = CONTENDERS[name](work, server.url, number)
                    turn = replace(turn, server_cpu_s=server_cpu(server.pid) - before)
                    CONSOLE.print(
                        f"round {number}, {name}: {turn.seconds:.3f} s, CPU {turn.client_cpu_s:.3f} + "
                        f"{turn.server_cpu_s:.3f} s (load average before {load:.1f})"
                    )
                    if number:
                        turns[name].append(turn)
        finally:
            server.kill()
    return turns


def server_cpu(pid: int) -> float:
    """CPU seconds of the server's process tree so far."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def _flush(url: str) -> None:
    """Flush the server's cache."""

    async def ask(client: EngineClient) -> None:
        await client.control("/flush_cache")
        await client.close()

    with AsyncRunner() as runner:
        runner.run(ask(EngineClient(url, admin_api_key=ADMIN_KEY)))


def ratios(turns: Sequence[Turn], reference: Sequence[Turn], what: str) -> list[float]:
    """For each round, the ratio of the field ``what`` of the turn to the same field of the reference turn."""
    pairs = zip(turns, reference, strict=True)
    return [getattr(a, what) / getattr(b, what) for a, b in pairs]


def show(work: Work, turns: dict[str, list[Turn]]) -> None:
    """Print medians, and the ratio of this client to each other client with its range over rounds."""
    table = Table("", *turns)
    seconds = {name: statistics.median(t.seconds for t in turns[name]) for name in turns}
    table.add_row("tokens/s", *(f"{work.tokens / s:.0f}" for s in seconds.values()))
    for row, what in QUANTITIES.items():
        medians = [statistics.median(getattr(t, what) for t in turns[name]) for name in turns]
        table.add_row(row, *(f"{value:.3f}" for value in medians))
        compared = [_spread(ratios(turns[OURS], turns[name], what)) for name in turns]
        table.add_row(
            "  ours / it", *("" if n == OURS else c for n, c in zip(turns, compared, strict=True))
        )
    CONSOLE.print(table)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Parse the command line, measure, print."""
    if sys.argv[1:2] == ["--as-peer"]:
        run_as_peer(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each client that count")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64, help="responses in flight")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--topk", type=int, default=0, help="Top-K log-probabilities to carry")
    parser.add_argument(
        "--per-call", type=int, default=1, help="responses that share an HTTP call, in ours"
    )
    parser.add_argument("--json", type=Path, help="write every figure there, too")
    options = parser.parse_args()
    names = [f.name for f in fields(Work) if f.name != "model"]
    work = Work(model=options.checkpoint, **{name: getattr(options, name) for name in names})
    turns = bench(work, options.rounds, options.dtype)
    show(work, turns)
    if options.json:
        figures = {name: [asdict(t) for t in measured] for name, measured in turns.items()}
        options.json.write_text(
            json.dumps({"work": asdict(work), "turns": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
