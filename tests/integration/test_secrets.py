"""A program that an agent runs can see no keys of the run, in a real run with servers, a router and ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from megatron_dppo.system.lease import LeaseFiles
from tests.integration.runs import ROOT, TrainingRun, records_of, write_material

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

KEYS = {
    "WANDB_API_KEY": "wandb-key-of-the-test",
    "HF_TOKEN": "hf-token-of-the-test",
    "MEGATRON_DPPO_API_KEY": "api-key-of-the-test",
    "MEGATRON_DPPO_ADMIN_API_KEY": "admin-key-of-the-test",
    "SEARCH_API_KEY": "search-key-of-the-test",
}
PASSED = "SEARCH_API_KEY"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> TrainingRun:
    path = write_material(tmp_path_factory.mktemp("secrets"))
    found = path.parent / "found"
    found.mkdir()
    spy = ROOT / "tests" / "unit" / "spying_agent.py"
    settings = yaml.safe_load(path.read_text())
    settings["environment"] = {
        "name": "agent",
        "options": {"agent": f"{sys.executable} {spy} {found}"},
        "max_observation_tokens": 48,
        "passed_variables": [PASSED],
    }
    settings["rollout"] |= {"prompts_per_step": 2, "group_size": 2, "save": False}
    settings["training"]["prompts_per_mini_batch"] = 2
    settings["engine"] |= {"router": True}
    settings["evaluation"]["samples_per_prompt"] = 1
    path.write_text(yaml.safe_dump(settings))
    with TrainingRun(path, "run.steps=1", variables=KEYS, shares_imports=False) as run:
        run.finish()
    return run


def found_by_agents(run: TrainingRun) -> list[dict]:
    return [json.loads(path.read_text()) for path in (run.directory.parent / "found").iterdir()]


def test_the_run_has_its_keys_and_its_agents_play(run):
    (record,) = [r for r in records_of(run.directory) if r["step"] == 1]
    assert record["reward/mean"] == 1.0
    assert len(found_by_agents(run)) >= 4


def test_an_agents_command_gets_no_key_of_the_run_but_what_is_passed(run):
    for found in found_by_agents(run):
        variables = found["variables"]
        assert variables[PASSED] == KEYS[PASSED]
        assert not (KEYS.keys() - {PASSED}) & variables.keys()
        assert not [name for name in variables if name.startswith("MEGATRON_DPPO_")]
        assert variables["PATH"] == os.environ["PATH"]


def test_no_process_of_the_run_shows_a_key_in_its_environment_or_command_line(run):
    """The agent runs as the user of the tests. root may read every process, so the keys must not be there at all."""
    holder = LeaseFiles(run.directory).holder()
    assert holder is not None
    hidden = [*(value for name, value in KEYS.items() if name != PASSED), holder.nonce]
    for found in found_by_agents(run):
        visible_text = "\n".join(found["processes"].values())
        # The agent saw the run's processes: ranks, a server and the router.
        if os.geteuid() == 0:
            for program in ("megatron_dppo.train", "launch_server", "smg::router"):
                assert program in visible_text
        assert [value for value in hidden if value in visible_text] == []


def test_no_file_of_the_run_holds_a_key(run):
    for path in Path(run.directory).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert [v for v in KEYS.values() if v.encode() in content] == [], path
