"""Variables that hold keys: where they are visible, and which processes get them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from megatron_dppo.launch.library_checks import check_in_child
from megatron_dppo.launch.local import RankGroup
from megatron_dppo.launch.remote_process import RemoteCommand, header
from megatron_dppo.rewards import RewardInput
from megatron_dppo.rewards.verifier import Verifier, VerifierError
from megatron_dppo.system.secret_variables import (
    is_secret,
    program_environment,
    redact,
    withheld_hint,
    worker_environment,
)
from tests.patience import Patience, family_of
from tests.ranks import ROOT
from tests.verifiers import verifier_of

KEYS = {
    "WANDB_API_KEY": "wandb-4711",
    "HF_TOKEN": "hf-4711",
    "https_proxy": "http://me:pw-4711@x:1",
}
PLAIN = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "MODEL_URL": "http://x:1"}
NOBODY = 65534
PLANTED = "tests.unit.planted_rewards:"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_PAT", "PGPASSWORD", "MYSQL_PWD", "KAGGLE_KEY",
        "MLFLOW_TRACKING_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "SLURM_JWT", "redis_auth",
        "AZURE_STORAGE_CONNECTION_STRING", "MEGATRON_DPPO_LEASE", "MEGATRON_DPPO_STARTED_KEYS",
        "MEGATRON_DPPO_API_KEY", "MEGATRON_DPPO_ADMIN_API_KEY", "DB_PASS", "HF_TOKEN_2", "HF_TOKEN2", "OPENAI_KEY_1",
        "GITHUB_TOKEN_OLD", "DOCKER_AUTH_CONFIG", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "REDIS_PW", "AWS_CREDS",
    ],
)  # fmt: skip
def test_a_name_tells_a_key(name):
    assert is_secret(name, "x")


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "PWD", "OLDPWD", "HOME", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "SGLANG_PER_TOKEN_GROUP_QUANT",
        "KEYBOARD", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "HF_HOME", "MEGATRON_DPPO_FLEET", "MASTER_ADDR",
        "HF_TOKEN_PATH", "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "COMPASS", "TORCH_COMPILE_CACHE_KEY_TAG", "KEY_COUNT",
    ],
)  # fmt: skip
def test_other_names_are_no_keys(name):
    assert not is_secret(name, "http://x:1/a@b")


# The forms of published keys, joined here so that no tool takes this file for a leak.
KEY_VALUES = [
    "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f", "sk-" + "1234567890abcdef", "sk-proj-" + "aB3_dE5-gH7jK9mN1pQ3",
    "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f", "AKIA" + "IOSFODNN7EXAMPLE", "glpat-" + "aB3dE5gH7jK9mN1pQ3sT",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        *KEY_VALUES,
        *(f"--token {key} --quiet" for key in KEY_VALUES),
        "https://aB3dE5gH@git.example/team/repository.git",
        "git+https://aB3dE5gH@git.example/team/repository.git",
        "postgres://me:word@db/x",
        "https://x.example/a?sig=aB3dE5gH",
        "Authorization=Bearer aB3dE5gH",
        "-----BEGIN PRIVATE KEY-----\nMII",
    ],
)
def test_a_value_shows_a_key_whatever_its_name(value):
    assert is_secret("NOTE", value)


@pytest.mark.parametrize(
    "value",
    [
        "hf_transfer", "hf_models_of_the_team_2024", "/data/disk-0123456789abcdef01", "ssh://git@git.example/a.git",
        "sk-learn-experiments-2024", "task-0123456789abcdef01", "postgres://me@db/x", "me@x.example", "https://x:1/a@b",
        "https://x.example/a?tokens=3",
    ],
)  # fmt: skip
def test_other_values_show_no_key(value):
    assert not is_secret("NOTE", value)


@pytest.mark.parametrize("key", KEY_VALUES)
def test_keys_that_a_server_echoes_are_replaced(key):
    assert redact(f"bad key mine, {key}.", ["mine"]) == "bad key <api key>, <api key>."


def test_a_program_and_a_worker_get_no_keys():
    common = {"PATH": "/bin", "PYTHONPATH": "/x", "LC_ALL": "C", "http_proxy": "http://x:3"}
    environment = {**KEYS, **common, "MODEL_URL": "http://x:1", "MEGATRON_DPPO_FLEET": "http://x:2"}
    assert program_environment(environment) == common
    assert worker_environment(environment) == {**common, "MODEL_URL": "http://x:1"}


# --- in /proc

# Become an ordinary user, as after a login, if the tests run as root.
DEFINE_BECOME_USER = f"""
import ctypes, json, os, subprocess, sys
from megatron_dppo.system.secret_variables import hide_secrets
def become_user():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
        os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
"""
HIDE_AND_REPORT = """
hide_secrets()
hide_secrets()
names = ("WANDB_API_KEY", "HF_TOKEN", "https_proxy", "MODEL_URL")
inherited = subprocess.run(["env"], capture_output=True, text=True).stdout
print(json.dumps([{name: os.environ.get(name) for name in names}, inherited]), flush=True)
sys.stdin.read()
"""
OPEN_FILES = """
become_user()
opened = []
for name in ("environ", "mem", "maps"):
    try:
        open(f"/proc/{sys.argv[1]}/{name}", "rb").close()
        opened.append(name)
    except PermissionError:
        pass
print(json.dumps(opened))
"""


@contextmanager
def run_code(environment: Mapping[str, str], code: str) -> Iterator[tuple[int, list]]:
    """Run a process that hides its keys. Yield its id and its report."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEFINE_BECOME_USER + code], env=dict(environment), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.kill()


def test_a_process_that_hides_its_keys_keeps_them_and_shows_none():
    with run_code({**KEYS, **PLAIN}, HIDE_AND_REPORT) as (pid, (kept, inherited)):
        assert kept == {**KEYS, "MODEL_URL": "http://x:1"}
        assert "4711" not in inherited
        assert "MODEL_URL=http://x:1" in inherited
        if os.geteuid() == 0:
            shown = Path(f"/proc/{pid}/environ").read_text()
            assert "4711" not in shown
            assert "MODEL_URL=http://x:1" in shown


@pytest.mark.parametrize(
    ("variables", "opened"),
    [({}, []), ({"MEGATRON_DPPO_DUMPABLE": "1"}, ["environ", "mem", "maps"])],
)
def test_the_same_users_processes_can_not_read_one_that_has_keys(variables, opened):
    with run_code({**KEYS, **PLAIN, **variables}, f"become_user()\n{HIDE_AND_REPORT}") as (pid, _):
        command = [sys.executable, "-c", DEFINE_BECOME_USER + OPEN_FILES, str(pid)]
        done = subprocess.run(command, env=PLAIN, check=True, capture_output=True)
        assert json.loads(done.stdout) == opened


def test_the_same_users_processes_can_not_read_the_starter_of_a_hosts_commands():
    """The starter's standard input has the keys of all commands of the host."""
    command = RemoteCommand(["sleep", "60"], PLAIN, '{"HF_TOKEN": "hf-4711"}', "/dev/null", "/")
    code = (
        "from megatron_dppo.launch.remote_process import main\n"
        "become_user()\n"
        "reading, writing = os.pipe()\n"
        f"os.write(writing, {header([command])!r})\n"
        "os.dup2(reading, 0)\n"
        "print('[]', flush=True)\n"
        "sys.exit(main())\n"
    )
    with run_code(PLAIN, code) as (pid, _):
        patience = Patience(60, lambda: family_of(pid))
        while not any(child.name() == "sleep" for child in psutil.Process(pid).children()):
            assert not patience.is_exhausted()
            time.sleep(0.02)
        reader = [sys.executable, "-c", DEFINE_BECOME_USER + OPEN_FILES, str(pid)]
        done = subprocess.run(reader, env=PLAIN, check=True, capture_output=True)
        assert json.loads(done.stdout) == []


# --- the processes of a run


def test_a_rank_is_started_without_keys_and_reads_them(tmp_path, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os\n"
        "begun = open('/proc/self/environ').read()\n"
        "from megatron_dppo.system.secret_variables import hide_secrets\n"
        "hide_secrets()\n"
        "print('4711' in begun or 'the nonce' in begun, os.environ['HF_TOKEN'], os.environ['MEGATRON_DPPO_LEASE'])\n"
    )
    output = tmp_path / "rank0.out"
    variables = {"MEGATRON_DPPO_LEASE": "the nonce"}
    group = RankGroup([sys.executable, "-c", code], [output], 1, variables)
    group.start()
    while None in group.codes():
        time.sleep(0.01)
    assert output.read_text() == "False hf-4711 the nonce\n"


def test_the_child_that_checks_a_start_has_the_keys(tmp_path, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "checking.py").write_text(
        "import os, sys\n"
        "begun = open('/proc/self/environ').read()\n"
        "from megatron_dppo.system.secret_variables import hide_secrets\n"
        "hide_secrets()\n"
        "sys.exit(10 * ('4711' in begun) + (os.environ['HF_TOKEN'] != 'hf-4711'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert check_in_child("checking", []) == 0


NAMES = "WANDB_API_KEY HF_TOKEN JUDGE_TOKEN MODEL_URL MEGATRON_DPPO_LEASE"


@pytest.fixture
def keys(monkeypatch):
    for name in NAMES.split():
        monkeypatch.setenv(name, f"{name} of the run")


def read_variables(verifier: Verifier) -> list[list[str]]:
    """Return the variables of the reward's process, and those of a program that it starts."""
    (score,) = verifier.score([RewardInput(NAMES, "")])
    return json.loads(score.reason)


@pytest.mark.usefixtures("keys")
def test_a_reward_gets_the_keys_that_are_passed_and_what_it_starts_gets_none():
    with verifier_of(PLANTED + "variables_seen", 60.0, 1) as verifier:
        assert read_variables(verifier) == [["MODEL_URL"], ["MODEL_URL"]]
        # The worker's limits and options are not in its command line either.
        (worker,) = verifier._pool.workers
        command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")
        assert command[-3:-2] == [b"megatron_dppo.rewards.verifier"]
        assert command[-2].isdigit()
    with verifier_of(
        PLANTED + "variables_seen", 60.0, 1, passed_variables=["HF_TOKEN", "NOT_SET"]
    ) as verifier:
        assert read_variables(verifier) == [["HF_TOKEN", "MODEL_URL"], ["MODEL_URL"]]


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("passed", "options", "here"),
    [
        ((), {}, ["MODEL_URL"]),
        (("WANDB_API_KEY",), {}, ["WANDB_API_KEY", "MODEL_URL"]),
        ((), {"key_variable": "JUDGE_TOKEN"}, ["JUDGE_TOKEN", "MODEL_URL"]),
        (("MODEL_URL",), {}, ["MODEL_URL"]),
    ],
)
def test_an_environment_gets_the_keys_that_are_passed_and_so_do_its_programs(passed, options, here):
    name = "tests.unit.planted_environments:Variables"
    spec = EnvironmentSpec(name, {"names": NAMES, **options}, 60.0, passed_variables=passed)

    async def ask() -> str:
        pool = EnvironmentPool(spec, workers=1)
        try:
            environment = await pool.open()
            return str(await environment.reset(Problem(1, "3+5", "8", (1,))))
        finally:
            pool.close()

    in_programs = [*passed, *options.values()]
    assert json.loads(asyncio.run(ask())) == [here, in_programs]


@pytest.mark.usefixtures("keys")
def test_a_key_that_options_name_is_passed():
    options = {"api_key_variable": "JUDGE_TOKEN"}
    with verifier_of(PLANTED + "VariablesSeen", 60.0, 1, options=options) as verifier:
        assert read_variables(verifier) == [["JUDGE_TOKEN", "MODEL_URL"], ["MODEL_URL"]]


@pytest.mark.usefixtures("keys")
def test_a_reward_that_misses_a_key_is_told_how_to_get_it():
    with (
        verifier_of(PLANTED + "key_on_request", 60.0, 1) as verifier,
        pytest.raises(VerifierError, match=r"HF_TOKEN.*passed_variables"),
    ):
        verifier.score([RewardInput("HF_TOKEN", "")])
    with verifier_of(
        PLANTED + "key_on_request", 60.0, 1, passed_variables=["HF_TOKEN"]
    ) as verifier:
        (score,) = verifier.score([RewardInput("HF_TOKEN", "")])
    assert score.value == len("HF_TOKEN of the run")


@pytest.mark.usefixtures("keys")
def test_an_error_about_a_key_that_was_passed_has_no_hint():
    passed = ["HF_TOKEN"]
    assert withheld_hint("no HF_TOKEN", [], "the list")
    assert withheld_hint("no HF_TOKEN", passed, "the list") == ""
    reward = PLANTED + "key_named_in_an_error"
    with (
        verifier_of(reward, 60.0, 1, passed_variables=passed) as verifier,
        pytest.raises(VerifierError, match="HF_TOKEN") as caught,
    ):
        verifier.score([RewardInput("HF_TOKEN", "")])
    assert "passed_variables" not in str(caught.value)
