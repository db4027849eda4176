"""A server that the documented line starts on this machine's CPU. The tests examine it as a run does, and then stop
parts of it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dppo.config.schema import TrainConfig, WeightSyncConfig
from megatron_dppo.engine.client import EngineClient, HttpClient
from megatron_dppo.engine.errors import EngineMismatchError, EngineRequestError
from megatron_dppo.engine.running_server import check_engine
from megatron_dppo.fleet.record import Server
from megatron_dppo.model.families import load_model_shape, missing_engine_keys
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.ports import free_port
from megatron_dppo.system.processes import kill_families, start_process
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.reach import check_reach
from tests.integration.kept_fleet import config_of, proceed, stop_detokenizer, stop_scheduler
from tests.patience import Patience, family_of, own_patience
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def documented_line(**given: str) -> str:
    """Return the shell line of docs/fleet.md for a server on a CPU, with its placeholders filled in."""
    text = (ROOT / "docs" / "fleet.md").read_text()
    found = re.search(
        r"^    (SGLANG_PLATFORM=torch_cpu.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found is not None
    line = found[1].replace("\\\n", " ")
    for place, value in given.items():
        assert place in line
        line = line.replace(place, value)
    return line.replace("python", sys.executable, 1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("attached")
    return config_of(folder / "run", save_tiny_model(folder / "moe", "qwen3_moe", seed=3))


@pytest.fixture(scope="module")
def server(config, runner, tmp_path_factory) -> Iterator[Server]:
    with start_server(config, runner, tmp_path_factory.mktemp("served")) as server:
        yield server


@contextmanager
def start_server(
    config: TrainConfig, runner: AsyncRunner, folder: Path, options: str = ""
) -> Iterator[Server]:
    """Start a server by the documented line with ``options`` added to it."""
    port, keys = free_port(), folder / "KEYS.json"
    keys.write_text(json.dumps({"api_key": "user", "admin_api_key": "admin"}))
    line = documented_line(
        MODEL=config.model.hf_checkpoint, DTYPE="float32", HOST="127.0.0.1", PORT=str(port),
        **{"KEYS.json": f"{keys} {options}"},
    )  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as output:
        shell = ["bash", "-c", f"exec env {line}"]
        process = start_process(shell, environment=os.environ, output=output.fileno())

    async def answers() -> bool:
        async with EngineClient(f"http://127.0.0.1:{port}", "user", "admin") as client:
            return await client.is_answering(2.0)

    try:
        patience = Patience(300.0, lambda: family_of(process.pid))
        while not runner.run(answers()):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert not patience.is_exhausted()
            time.sleep(0.5)
        yield Server("elsewhere", f"http://127.0.0.1:{port}", pid=process.pid)
    finally:
        if process.poll() is None:
            proceed(Server("elsewhere", "", pid=process.pid))
        kill_families([process])


async def examine(config: TrainConfig, url: str, api: str, admin: str) -> None:
    """Examine a server as EngineSession examines a new server."""
    spec = RunSpec.of_checked(config)
    async with EngineClient(url, api, admin) as client:
        await check_engine(spec.model, spec.servers, client)
    shape = load_model_shape(config.model.hf_checkpoint)
    weights = await EngineWeights.connect(
        HttpClient(url, api, admin), shape, "float32", timeout_s=60
    )
    try:
        await weights.check_tensors()
        await check_reach(weights, WeightSyncConfig())
    finally:
        await weights.close()


def test_the_documented_line_starts_a_server_that_fits_on_a_cpu(config, server, runner):
    runner.run(examine(config, server.url, "user", "admin"))
    # The first examination has left nothing behind, so a second one passes, too.
    runner.run(examine(config, server.url, "user", "admin"))


@pytest.mark.parametrize("keys", [("wrong", "admin"), ("user", "wrong")])
def test_a_wrong_key_is_told(config, server, runner, keys):
    with pytest.raises(EngineRequestError, match="401") as refusal:
        runner.run(examine(config, server.url, *keys))
    assert refusal.value.attempts == 1


def test_another_model_of_the_family_is_told_by_its_tensors(config, server, runner, tmp_path):
    other = save_tiny_model(tmp_path / "other", "qwen3_moe", seed=3, layers=3)
    with pytest.raises(
        EngineMismatchError, match=r"holds another model: it lacks .*model\.layers\.2"
    ):
        runner.run(examine(config_of(tmp_path / "run", other), server.url, "user", "admin"))


def test_one_that_cannot_connect_back_is_told(server, runner, monkeypatch, config):
    """The connection times out in the trainer. A real attempt would leave the server's scheduler waiting."""

    async def time_out(self, address, port, *rest, **options):
        raise TimeoutError

    monkeypatch.setattr(EngineWeights, "open_group", time_out)
    with pytest.raises(
        EngineMismatchError, match=r"can't connect back to the trainer at 127\.0\.0\.1"
    ):
        runner.run(examine(config, server.url, "user", "admin"))


@pytest.mark.slow
def test_a_server_of_qwen3_5_without_a_vision_tower_fits(tmp_path, runner):
    """docs/fleet.md gives these options for the family. A server with the vision tower needs torchvision to start."""
    config = config_of(tmp_path / "run", save_tiny_model(tmp_path / "model", "qwen3_5_moe"))
    # In addition to language_model_only, the keys of published files that transformers does not save.
    overrides = json.dumps(missing_engine_keys(config.model.hf_checkpoint))
    assert "language_model_only" in overrides
    on_cpu = "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule"
    options = f"--json-model-override-args '{overrides}' {on_cpu}"
    with start_server(config, runner, tmp_path, options) as server:
        runner.run(examine(config, server.url, "user", "admin"))


@pytest.mark.parametrize("stop_part", [stop_scheduler, stop_detokenizer])
def test_a_stopped_part_is_told_by_the_probes_alone(server, runner, stop_part):
    """``FleetMembership.blame`` uses these probes. HTTP still answers, but scheduler or detokenizer does not."""

    async def ask() -> tuple[bool, bool, bool]:
        async with EngineClient(server.url, "user", "admin") as client:
            is_answering = await client.is_answering(5.0)
            is_scheduling = await client.is_scheduling(5.0)
            is_generating = is_scheduling and await client.generates_again(5.0)
            return is_answering, is_scheduling, is_generating

    async def resume() -> None:
        async with EngineClient(server.url, "user", "admin") as client:
            await client.control("/continue_generation")

    assert runner.run(ask()) == (True, True, True)
    stop_part(server)
    try:
        patience = own_patience(16)
        expected = (True, stop_part is stop_detokenizer, False)
        assert runner.run(ask()) == expected
        assert not patience.is_exhausted()
    finally:
        proceed(server)
        runner.run(resume())
