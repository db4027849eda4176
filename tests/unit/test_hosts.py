"""A run on several hosts through a remote shell. Here the shell is ``env``, which starts programs on this machine."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_dppo.launch import hosts as hosts_module
from megatron_dppo.launch.hosts import HostsConfig, RemoteLauncher, RemoteRanks, RemoteShell
from megatron_dppo.launch.local import rank_command
from megatron_dppo.launch.placement import LaunchError, place
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.spec import Roles
from megatron_dppo.system import network
from tests.patience import happens

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "megatron_dppo.yaml"
SHELL = ["env", "PLACE={host}"]


@pytest.fixture
def start_ranks(tmp_path, monkeypatch):
    """Return a function that starts four ranks on two hosts; ``how`` says how they end (``forked_rank.py``)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_TOKEN", "hf-4711")
    all_ranks = []
    with RunDirectory(tmp_path / "run") as directory:

        def start(
            how: str,
            *,
            forks: bool,
            shell: Sequence[str] = SHELL,
            variables: Mapping[str, str] | None = None,
        ) -> RemoteRanks:
            directory.config.write_text(how)
            hosts = HostsConfig(hosts=["a=127.0.0.1", "b=127.0.0.1"], devices_per_host=2)
            placement = place(Roles(4), hosts.allocation())
            command = rank_command("tests.unit.forked_rank", directory)
            remote_shell = RemoteShell(shell, sys.executable, variables or {})
            ranks = RemoteRanks(command, directory, placement, remote_shell, {}, forks=forks)
            all_ranks.append(ranks)
            ranks.start()
            return ranks

        yield start
        for ranks in all_ranks:
            ranks.kill()


@pytest.mark.parametrize("forks", [True, False])
def test_each_host_runs_its_own_ranks(start_ranks, forks, tmp_path):
    ranks = start_ranks("ends", forks=forks)
    assert happens(ranks.ended)
    outputs = [path.read_text() for path in sorted((tmp_path / "run/logs").glob("rank?.out"))]
    assert outputs == [f"{rank} {rank % 2} 4 hf-4711 False True True\n" for rank in range(4)]


@pytest.mark.parametrize("forks", [True, False])
def test_a_key_of_the_hosts_file_is_in_no_environment_that_others_can_read(
    start_ranks, forks, tmp_path
):
    ranks = start_ranks("ends", forks=forks, variables={"HF_TOKEN": "hf-4711-hosts"})
    assert happens(ranks.ended)
    outputs = [path.read_text() for path in sorted((tmp_path / "run/logs").glob("rank?.out"))]
    # The fifth word is whether the rank's first environment has the key.
    assert outputs == [f"{rank} {rank % 2} 4 hf-4711-hosts False True True\n" for rank in range(4)]


def test_a_server_gets_a_key_of_the_hosts_file_only_if_it_is_passed_on():
    shell = RemoteShell(SHELL, sys.executable, {"HF_TOKEN": "hf-0815", "MODE": "fast"})
    for passed, expected in (({}, None), ({"HF_TOKEN": "hf-4711"}, "hf-0815")):
        variables = shell.command(["server"], passed, b"{}", Path("log")).environment
        assert variables["MODE"] == "fast"
        assert variables.get("HF_TOKEN") == expected


@pytest.mark.parametrize("address", ["0.0.0.0", "255.255.255.255", "224.0.0.1"])
def test_an_address_of_no_single_host_is_refused(address):
    with pytest.raises(LaunchError, match=address):
        HostsConfig(hosts=["a=10.0.0.1", f"b={address}"]).allocation()


@pytest.mark.parametrize("second", ["10.0.0.1", "b=10.0.0.1"])
def test_a_host_that_is_there_twice_is_refused(second):
    with pytest.raises(LaunchError, match=r"10\.0\.0\.1, expected each host once"):
        HostsConfig(hosts=["a=10.0.0.1", second]).allocation()


@pytest.mark.parametrize("forks", [True, False])
def test_the_rank_that_failed_is_the_failure(start_ranks, forks):
    ranks = start_ranks("killed", forks=forks)
    assert happens(lambda: ranks.failures(0.0))
    (failure,) = ranks.failures(0.0)
    assert failure.code == 128 + signal.SIGKILL
    assert failure.output.name == ("rank1.out" if forks else "node0.out")


def test_a_host_ends_what_it_runs_with_the_connection(start_ranks):
    before = set(psutil.Process().children(recursive=True))
    ranks = start_ranks("waits", forks=True)
    # Each of the two hosts runs remote_process, node_ranks, a fork server and two ranks.
    assert happens(lambda: sum(p.name().startswith("python") for p in children_since(before)) >= 10)
    family = children_since(before)
    ranks.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []


def children_since(before: set[psutil.Process]) -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p not in before]


def test_a_server_is_asked_to_end_and_gets_its_keys(tmp_path):
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('asked', flush=True)))\n"
        "print(sys.stdin.read(), flush=True)\ntime.sleep(600)\n"
    )
    launcher = RemoteLauncher(
        RemoteShell(SHELL, sys.executable, {"OWN": "1"}),
        HostsConfig(hosts=["a=127.0.0.1"]).allocation().hosts[0],
    )
    log = tmp_path / "server.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = launcher.start(
        [sys.executable, "-c", program], environment=environment, log=log, stdin=b"a key"
    )
    assert happens(lambda: log.exists() and "a key" in log.read_text())
    server.stop(20.0)
    assert "asked" in log.read_text()
    assert server.poll() == 0


def test_the_kubernetes_example_is_whole():
    """Its parts refer to each other by their names, and this package accepts its hosts file."""
    parts = {p["kind"]: p for p in yaml.safe_load_all(MANIFEST.read_text())}
    pods, service = parts["StatefulSet"]["spec"], parts["Service"]
    template = pods["template"]
    assert template["metadata"]["labels"] == pods["selector"]["matchLabels"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert pods["serviceName"] == service["metadata"]["name"]
    assert template["spec"]["serviceAccountName"] == parts["ServiceAccount"]["metadata"]["name"]
    permissions = set()
    for rule in parts["Role"]["rules"]:
        permissions |= set(itertools.product(rule["resources"], rule["verbs"]))
    assert ("pods/exec", "create") in permissions
    (container,) = template["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    hosts = HostsConfig.model_validate(yaml.safe_load(parts["ConfigMap"]["data"]["hosts.yaml"]))
    name, domain = parts["StatefulSet"]["metadata"]["name"], service["metadata"]["name"]
    pods_of_set = [f"{name}-{n}={name}-{n}.{domain}" for n in range(pods["replicas"])]
    assert hosts.hosts == pods_of_set
    assert str(hosts.devices_per_host) == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert hosts.shell[:3] == ["kubectl", "exec", "-i"]
    assert container["name"] in hosts.shell


def test_a_host_that_calls_itself_loopback_gets_an_address_for_the_others(monkeypatch):
    """Debian's /etc/hosts maps a host's own name to 127.0.1.1."""
    known = {"nodea": "127.0.1.1", "nodeb": "192.0.2.7"}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: known.get(name, name))
    monkeypatch.setattr(network, "source_address", {"192.0.2.7": "192.0.2.1"}.__getitem__)
    hosts = HostsConfig(hosts=["nodea", "nodeb"]).allocation().hosts
    assert [host.address for host in hosts] == ["192.0.2.1", "192.0.2.7"]
    # On one machine every process reaches the loopback device.
    hosts = HostsConfig(hosts=["nodea", "b=127.0.0.1"]).allocation().hosts
    assert [host.address for host in hosts] == ["127.0.1.1", "127.0.0.1"]


def test_the_start_of_ranks_does_not_wait_for_a_deaf_shell(start_ranks, monkeypatch):
    """The environment of the ranks is longer than a pipe holds."""
    monkeypatch.setenv("LONG_VARIABLE", "x" * 100_000)
    monkeypatch.setattr(hosts_module, "_END_S", 0.2)
    ranks = start_ranks(
        "ends", forks=False, shell=[sys.executable, "-c", "import time; time.sleep(600)"]
    )
    assert not ranks.ended()
    assert ranks.failures(0.0) == []
    ranks.kill()
    assert all(process.poll() is not None for process in ranks._processes)


def test_a_host_without_an_address_is_named():
    with pytest.raises(LaunchError, match=r"nowhere\.invalid"):
        HostsConfig(hosts=["nowhere.invalid"]).allocation()
