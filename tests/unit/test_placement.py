"""The placement of ranks, servers and router on hosts: examples worked by hand."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.local import RankGroup, local_placement
from megatron_dppo.launch.placement import Allocation, Host, PlacementError, hosts_needed, place
from megatron_dppo.spec import Roles
from megatron_dppo.spec.placement import TeacherRole
from tests.unit.config_files import minimal, minimal_config


def hosts(count: int, devices: int | None = 8) -> Allocation:
    numbers = range(1, count + 1)
    return Allocation(tuple(Host(f"n{i}", f"10.0.0.{i}", devices) for i in numbers), 21000)


def servers_of(placement) -> list[tuple[str, int, int]]:
    """Return the host, the first device and the number of devices of each server."""
    return [(s.host.name, s.first_device, s.devices) for s in placement.servers]


def test_half_the_nodes_train_and_half_generate():
    placement = place(Roles(16, 8, 2, router=True), hosts(4))
    assert [(r.rank, r.host.name, r.device) for r in placement.ranks[7:10]] == [
        (7, "n1", 7),
        (8, "n2", 0),
        (9, "n2", 1),
    ]
    assert servers_of(placement) == [(n, d, 2) for n in ("n3", "n4") for d in (0, 2, 4, 6)]
    assert [s.port for s in placement.servers] == list(range(21003, 21011))
    assert (placement.master_address, placement.master_port) == ("10.0.0.1", 21000)
    assert placement.router is not None
    assert (placement.router.host.name, placement.router.port, placement.router.metrics_port) == (
        "n1",
        21001,
        21002,
    )
    processes: list[Any] = [placement.router, *placement.servers]
    assert {process.port_step for process in processes} == {11}
    assert placement.unused == ()
    assert [h.name for h in placement.rank_hosts] == ["n1", "n2"]
    assert placement.ranks_per_host == 8


def test_one_node_is_shared_and_a_whole_one_is_spare():
    placement = place(Roles(4, 2, 2), hosts(2))
    assert servers_of(placement) == [("n1", 4, 2), ("n1", 6, 2)]
    assert [host.name for host in placement.unused] == ["n2"]
    assert placement.router is None


def test_teachers_follow_ranks_and_servers_and_end_no_host_in_two():
    teachers = (TeacherRole("big", 1, 8), TeacherRole("small", 2, 2))
    roles = Roles(4, 1, 2, router=True, teachers=teachers)
    placement = place(roles, hosts(3))
    assert servers_of(placement) == [("n1", 4, 2)]
    assert [(t.name, t.host.name, t.first_device, t.devices) for t in placement.teachers] == [
        ("teacher-big-0", "n2", 0, 8),
        ("teacher-small-0", "n3", 0, 2),
        ("teacher-small-1", "n3", 2, 2),
    ]
    # Three fixed ports, one for the server, one for each teacher's server.
    assert [t.port for t in placement.teachers] == [21004, 21005, 21006]
    assert {t.port_step for t in placement.teachers} == {7}
    assert hosts_needed(roles, 8) == 3
    with pytest.raises(
        PlacementError, match=r"1 of 8 for the teacher big and 2 of 2 .* 3 hosts of 8"
    ):
        place(roles, hosts(2))
    with pytest.raises(PlacementError, match=r"teachers\.big\.sglang\.tp_size: got 12"):
        place(Roles(4, teachers=(TeacherRole("big", 1, 12),)), hosts(9))


def test_teachers_share_no_device_with_a_colocated_trainer():
    roles = Roles(4, 2, 1, first_device=0, colocated=True, teachers=(TeacherRole("t", 1, 2),))
    assert servers_of(place(roles, hosts(1))) == [("n1", 0, 1), ("n1", 1, 1)]
    assert place(roles, hosts(1)).teachers[0].first_device == 4
    # One machine without GPUs has room for every process.
    assert place(roles, Allocation(hosts(1, None).hosts)).teachers[0].port is None


def test_a_server_is_not_cut_in_two_by_the_end_of_a_host():
    assert servers_of(place(Roles(5, 2, 2), hosts(2))) == [("n1", 5, 2), ("n2", 0, 2)]
    assert hosts_needed(Roles(5, 2, 2), 8) == 2
    assert hosts_needed(Roles(4, 2, 2), 8) == 1


def test_a_server_larger_than_a_host_takes_all_devices_of_several():
    placement = place(Roles(12 - 4, 2, 16, router=True), hosts(5))
    names = [[host.name for host in server.hosts] for server in placement.servers]
    assert names == [["n2", "n3"], ["n4", "n5"]]
    assert servers_of(placement) == [("n2", 0, 8), ("n4", 0, 8)]
    assert [(s.port, s.meeting_port, s.port_step) for s in placement.servers] == [
        (21003, 21004, 7),
        (21005, 21006, 7),
    ]
    assert placement.router.port_step == 7
    assert [host.name for host in placement.server_hosts] == ["n2", "n3", "n4", "n5"]
    assert placement.unused == ()
    assert placement.table().splitlines()[3:5] == [
        "n2    engine0    0-7      10.0.0.2:21003",
        "n3    engine0    0-7      10.0.0.3",
    ]


def test_a_server_larger_than_a_host_begins_on_a_host_of_its_own():
    assert servers_of(place(Roles(4, 1, 16), hosts(3))) == [("n2", 0, 8)]
    assert hosts_needed(Roles(4, 1, 16), 8) == 3
    shared = place(Roles(8, 1, 16, first_device=0), hosts(2))
    assert [host.name for host in shared.servers[0].hosts] == ["n1", "n2"]
    assert place(Roles(8, 1, 8), hosts(2)).servers[0].meeting_port is None


def test_slots_of_hosts_without_gpus():
    placement = place(Roles(2, 2), hosts(4, 1))
    assert [r.host.name for r in placement.ranks] == ["n1", "n2"]
    assert [r.device for r in placement.ranks] == [0, 0]
    assert servers_of(placement) == [("n3", 0, 1), ("n4", 0, 1)]


def test_servers_may_share_the_ranks_devices():
    assert servers_of(place(Roles(2, 2, first_device=0), hosts(1, 2))) == [
        ("n1", 0, 1),
        ("n1", 1, 1),
    ]


def test_a_port_of_the_configuration_is_kept():
    placement = place(Roles(8, 2, port=9000), hosts(2))
    assert [(s.port, s.port_step) for s in placement.servers] == [(9000, 0), (9001, 0)]


@pytest.mark.parametrize(
    ("roles", "count", "message"),
    [
        (
            Roles(12),
            2,
            "12 ranks on hosts of 8 devices, expected at most 8 or a multiple .*8 or 16",
        ),
        (
            Roles(8, 1, 12),
            4,
            r"sglang.tp_size: got 12 devices for a server on hosts of 8 devices, expected at most 8 or a "
            r"multiple of it, such as 8 or 16",
        ),
        (Roles(8, 2, 16), 4, "8 ranks and 2 servers of 16 do not fit .* what fits: 5 hosts of 8"),
        (
            Roles(16, 8, 2),
            3,
            r"16 ranks and 8 servers of 2 do not fit on 3 hosts of 8; what fits: 4 hosts of 8, or "
            r"engine.servers=4, or sglang.base_gpu_id=0",
        ),
        (Roles(16), 1, "16 ranks do not fit on one host of 8; what fits: 2 hosts of 8$"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(roles, count, message):
    with pytest.raises(PlacementError, match=message):
        place(roles, hosts(count))


def test_the_table_names_everybody():
    assert place(Roles(2, 1, router=True), hosts(4, 1)).table() == (
        "host  role     devices  address\n"
        "n1    rank 0   0        10.0.0.1:21000\n"
        "n2    rank 1   0        10.0.0.2\n"
        "n1    router   -        10.0.0.1:21001\n"
        "n3    engine0  0        10.0.0.3:21003\n"
        "n4    (spare)  -        10.0.0.4"
    )


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({"parallel": {"world_size": 4}}, 5),
        ({"sglang": {"tp_size": 4}}, 5),
        ({"sglang": {"tp_size": 4, "base_gpu_id": 0}}, 4),
        ({"parallel": {"world_size": 4}, "engine": {"servers": 2}, "sglang": {"tp_size": 2}}, 8),
        ({"sglang": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}}, 3),
        ({"parallel": {"world_size": 2}, "engine": {"servers": 9, "device": "cpu"}}, 1),
        ({"parallel": {"world_size": 2}, "rollout": {"replay_from": "x"}}, 2),
    ],
)
def test_gpus_of_one_machine(tmp_path, sections, needed):
    settings = minimal_config(tmp_path, **sections)

    def machine(gpus: int) -> Machine:
        return Machine(cores=2, gpus=gpus, memory_bytes=2**33, open_files=1024)

    roles = Roles.of(settings)
    local_placement(settings, roles, machine(needed))
    if needed > 1:
        with pytest.raises(
            PlacementError, match=r"do not fit on one host|on hosts of 3 devices, expected"
        ):
            local_placement(settings, roles, machine(needed - 1))


def test_a_machine_without_gpus_takes_everything(tmp_path):
    settings = minimal_config(tmp_path, parallel={"world_size": 15}, engine={"servers": 2})
    machine = Machine(cores=2, gpus=0, memory_bytes=2**33, open_files=1024)
    placement = local_placement(settings, Roles.of(settings), machine)
    assert len(placement.ranks) == 15
    assert placement.router is not None
    assert [s.port for s in placement.servers] == [None, None]


def two_groups(first: int, second: int, devices: int = 8) -> Allocation:
    numbers = range(1, first + second + 1)
    return Allocation(
        tuple(Host(f"n{i}", f"10.0.0.{i}", devices, int(i > first)) for i in numbers), 21000
    )


def test_servers_of_a_heterogeneous_job_take_its_second_group():
    placement = place(Roles(4, 2, 4), two_groups(1, 1))
    assert [rank.host.name for rank in placement.ranks] == ["n1"] * 4
    assert servers_of(placement) == [("n2", 0, 4), ("n2", 4, 4)]
    assert [server.host.group for server in placement.servers] == [1, 1]


def test_what_does_not_fit_a_heterogeneous_job():
    with pytest.raises(PlacementError, match=r"parallel\.world_size: got 16 .*at most 8\b"):
        place(Roles(16, 2), two_groups(1, 2))
    with pytest.raises(PlacementError, match=r"sglang.base_gpu_id"):
        place(Roles(4, 2, first_device=0), two_groups(1, 1))
    with pytest.raises(PlacementError, match="3 hosts of 8"):
        place(Roles(4, 4, 4), two_groups(1, 1))


@pytest.mark.parametrize(
    ("staleness", "placement", "beside"),
    [(0, "separate", 0), (1, "separate", 3), (8, "separate", 3), (1, "colocated", 0)],
)
def test_servers_that_generate_beside_training_keep_a_core_each(
    tmp_path, staleness, placement, beside
):
    tree = minimal(tmp_path)
    tree["engine"] = {"servers": 3, "placement": placement}
    tree["rollout"]["max_staleness"] = staleness
    assert Roles.of(TrainConfig.model_validate(tree)).generating == beside
    tree["rollout"]["replay_from"] = "rollouts"
    assert Roles.of(TrainConfig.model_validate(tree)).generating == 0


@pytest.mark.parametrize(("cores", "threads"), [(-1, 1), (1, 1), (4, 2), (5, 2)])
def test_ranks_share_the_cores_that_they_are_given(tmp_path, monkeypatch, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    outputs = [tmp_path / "rank0.out", tmp_path / "rank1.out"]
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    group = RankGroup([sys.executable, "-c", code], outputs, 1, cores=cores)
    group.start()
    while None in group.codes():
        time.sleep(0.01)
    assert [path.read_text() for path in outputs] == [f"{threads}\n"] * 2


def test_ranks_have_ended_only_without_an_error(tmp_path):
    """A rank may fail after the supervisor looked for failures, and before it checks whether the ranks have ended."""
    outputs = [tmp_path / "rank0.out", tmp_path / "rank1.out"]
    code = "import os; raise SystemExit(int(os.environ['RANK']))"
    group = RankGroup([sys.executable, "-c", code], outputs, 1)
    group.start()
    while None in group.codes():
        time.sleep(0.01)
    assert group.codes() == [0, 1]
    assert not group.ended()
