"""The real loop on a fleet: two servers, the router, a third attached in mid-run, and their faults."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.fleet.record import FleetRecord, Server
from tests.integration.kept_fleet import kill, stop_scheduler
from tests.integration.runs import GROUP, PROMPTS, ROOT, TrainingRun, records_of, steps_of
from tests.integration.shared_launcher import server_of
from tests.patience import run_patiently, wait_healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

API_KEY, ADMIN_KEY = "elsewhere-user", "elsewhere-admin"


@pytest.fixture(scope="module")
def elsewhere(config) -> Iterator[EngineProcess]:
    """A server that the run does not start. It starts at the same time as the run."""
    loaded = load_config(str(config), [])
    process = server_of(loaded, config.parent / "elsewhere.log", API_KEY, ADMIN_KEY, seed=99)
    process.start()
    try:
        yield process
    finally:
        process.kill()


class FleetRun(TrainingRun):
    """A run with a fleet, and the command of its user."""

    @property
    def record(self) -> FleetRecord:
        return FleetRecord(self.directory)

    def command(self, *words: str) -> str:
        """Return the output of the user's command on this run."""
        command = [sys.executable, "-m", "megatron_dppo.fleet", str(self.directory), *words]
        done = run_patiently(command, cwd=ROOT, check=True)
        return done.stdout

    def server(self, name: str) -> Server:
        return next(s for s in self.record.servers() if s.name == name)

    def serving(self) -> set[str]:
        states = self.record.status().get("servers", {})
        return {name for name, state in states.items() if state == "serves"}

    def wait_until_serving(self, *names: str) -> None:
        self.wait_for(lambda: self.serving() == set(names))

    def wait_until_restarted(self, name: str) -> None:
        """Wait for the second incarnation. A restart takes only a second, so the server's absence may not be seen."""
        self.wait_for(
            lambda: any(s.name == name and s.incarnation == 2 for s in self.record.servers())
        )

    def wait_for_steps(self, count: int) -> None:
        """Wait until ``count`` more steps are recorded."""
        self.wait_for_step(max(steps_of(self.directory), default=0) + count)


@pytest.mark.slow
def test_a_run_outlives_its_servers_and_takes_new_ones_in(config, elsewhere, monkeypatch):
    monkeypatch.setenv("MEGATRON_DPPO_API_KEY", API_KEY)
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", ADMIN_KEY)
    overrides = (
        "engine.servers=2", "engine.hang_timeout_s=8", "weight_sync.timeout_s=30", "run.steps=2000",
        "evaluation.every=2000", "checkpoint.every=2000", "checkpoint.verify_export=false",
    )  # fmt: skip
    with FleetRun(config, *overrides) as run:
        run.wait_until_serving("engine0", "engine1")
        wait_healthy(elsewhere)
        third = run.command("add", elsewhere.url).split()[0]
        run.wait_until_serving("engine0", "engine1", third)
        run.wait_for_steps(2)

        kill(run.server("engine1"))
        run.wait_until_restarted("engine1")
        run.wait_for_steps(1)
        router = run.record.router()
        assert router is not None
        kill(router)
        stop_scheduler(run.server("engine0"))
        run.wait_until_restarted("engine0")
        run.wait_until_serving("engine0", "engine1", third)
        run.wait_for_steps(2)

        run.command("remove", elsewhere.url)
        run.wait_until_serving("engine0", "engine1")
        listing = run.command("list")
        run.wait_for_steps(1)
        run.interrupt()
        run.finish(code=130, timeout=120)
    assert listing.count("serves") == 2
    for words in ("engine1 was killed by SIGKILL", "engine0 runs but was reported lost"):
        assert words in run.text
    assert run.text.count("the router was killed by SIGKILL") == 1
    assert "Traceback" not in run.text
    check_records(run)


def check_records(run: FleetRun) -> None:
    """Assert that every response is counted once, and that verified servers sampled it with the weights of its step."""
    steps = steps_of(run.directory)
    assert steps == list(range(len(steps)))
    for step in steps[1:]:
        batch = load_batch(run.directory / "rollouts", step)
        keys = [(r.problem_id, r.sample_index) for r in batch]
        assert len(keys) == len(set(keys)) == PROMPTS * GROUP
        versions = {span.weight_version for t in batch for span in t.version_spans}
        assert versions == {step - 1}
    gaps = [r["mismatch/mean_abs_prob_gap"] for r in records_of(run.directory)[1:]]
    assert max(gaps) <= 1e-4
