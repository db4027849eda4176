"""The command line of a submission, and the errors that refuse a submission before it is queued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.cluster.rehearsal import paths
from megatron_dppo.cluster.slurm.__main__ import main
from megatron_dppo.cluster.slurm.site import ContainerConfig, SiteConfig, load_site, site_path
from megatron_dppo.cluster.slurm.submit import (
    SBATCH,
    SRUN,
    Submission,
    environment_faults,
    flag_faults,
    memory_verdict,
    node_faults,
    seconds_of,
    time_faults,
)
from megatron_dppo.cluster.slurm.supervise import job_groups, rehearsed_roles
from megatron_dppo.config.errors import ConfigError
from megatron_dppo.launch.placement import Allocation, Host, place
from megatron_dppo.launch.slurm_client import SlurmError
from tests.messages import mentioning
from tests.patience import run_patiently
from tests.unit.config_files import minimal, minimal_config, write_config
from tests.unit.repository.test_recipes import RECIPES

SITE = {"gpus_per_node": 2, "start_s": 60, "checkpoint_margin_s": 60, "time": "10"}


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch) -> Path:
    """Put an ``sbatch`` on the path that prints a job's id, and return the file to which it writes its words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done > {tmp_path}/given\necho 42\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("MEGATRON_DPPO_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "given"


def site(**values) -> SiteConfig:
    return SiteConfig.model_validate({**SITE, **values})


def test_flags_that_only_change_what_is_asked_for():
    flags = ["-C", "h", "-Ch", "--constraint=h", "--hold", "-H", "-kC", "h", "--exclusive", "-N1"]
    assert list(flag_faults(flags, SBATCH)) == []
    assert list(flag_faults(["--label", "-lu", "-W", "5", "-W5", "--mem=0"], SRUN)) == []


def test_a_directory_with_a_percent_sign_is_no_pattern(tmp_path):
    where = {"directory": f"{tmp_path}/a%jb/c%%"}
    words = Submission.plan(minimal_config(tmp_path, run=where), site(), None).command()
    assert f"--output={tmp_path}/a%%jb/c%%%%/logs/slurm-%j.out" in words


def test_an_answer_that_is_no_job_is_told(tmp_path, sbatch, capsys):
    program = tmp_path / "bin" / "sbatch"
    program.write_text("#!/bin/sh\necho slurm-wlm 22.05\n")
    words = ["submit", str(write_config(tmp_path, minimal(tmp_path))), "--set=time=60"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "'slurm-wlm 22.05'" in capsys.readouterr().err
    assert not list(tmp_path.rglob("job"))


def test_the_whole_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = site(
        partition="gpu", account="rl", qos="high", reservation="r", sbatch_flags=["-C", "h"]
    )
    plan = Submission.plan(minimal_config(tmp_path, engine={"servers": 3}), cluster, None)
    run = f"{tmp_path}/run"
    assert plan.nodes == 2
    *words, script, config_file, site_file = plan.command(["--nice"])
    assert words == [
        "sbatch", "--parsable", f"--job-name={tmp_path.name}-run", "--nodes=2", "--gpus-per-node=2",
        "--partition=gpu", "--account=rl", "--qos=high", "--reservation=r", "--time=10",
        "--signal=B:USR1@60", f"--chdir={tmp_path}", f"--output={run}/logs/slurm-%j.out", "-C", "h",
        "--nice",
    ]  # fmt: skip
    assert Path(script).name == "run.sbatch"
    assert Path(script).is_file()
    assert (config_file, site_file) == (f"{run}/submitted.yaml", f"--site={run}/site.yaml")


def test_gpus_are_asked_for_by_gres_where_the_site_says_so(tmp_path):
    plan = Submission.plan(minimal_config(tmp_path), site(gres="gpu:h100:2,shard:1"), None)
    assert "--gres=gpu:h100:2,shard:1" in plan.command()
    assert not any(word.startswith("--gpus-per-node") for word in plan.command())


def test_nodes_without_gpus_are_counted_in_processes(tmp_path):
    cluster = site(gpus_per_node=0, processes_per_node=1)
    plan = Submission.plan(minimal_config(tmp_path), cluster, 3)
    assert "--ntasks-per-node=1" in plan.command()
    assert [host.name for host in plan.placement.unused] == ["node3"]


def test_the_memory_of_nodes_without_gpus_is_not_planned(tmp_path):
    cluster = site(gpus_per_node=0, processes_per_node=2, gpu="h100")
    verdict = memory_verdict(Submission.plan(minimal_config(tmp_path), cluster, 2))
    assert verdict == ("memory: not planned, the nodes have no GPUs", [])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216000), ("1-00:30:05", 88205),
        ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_slurms_times(text, seconds):
    assert seconds_of(text) == seconds


def test_what_is_no_time():
    with pytest.raises(ValueError, match="'1 hour'"):
        seconds_of("1 hour")


def test_a_run_is_submitted(tmp_path, sbatch, capsys):
    path = write_config(tmp_path, minimal(tmp_path))
    words = ["submit", str(path), "run.steps=7", "--set=gpus_per_node=2", "--set=time=1:00:00"]
    (tmp_path / "site.yaml").write_text("account: rl\n")
    assert main([*words, f"--site={tmp_path}/site.yaml"]) == 0
    output = capsys.readouterr().out
    assert "job 42" in output
    assert "node1  rank 0   0        node1\nnode1  engine0  1        node1" in output
    assert "--account=rl" in sbatch.read_text().splitlines()
    run = tmp_path / "run"
    assert "steps: 7" in (run / "submitted.yaml").read_text()
    assert load_site(run / "site.yaml").time == "1:00:00"
    assert (run / "job").read_text() == "42\n"


def test_a_run_whose_job_waits_is_not_submitted_again(tmp_path, sbatch, capsys):
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho PENDING Resources\n")
    squeue.chmod(0o755)
    words = ["submit", str(write_config(tmp_path, minimal(tmp_path)))]
    assert main(words) == 0
    with pytest.raises(SystemExit):
        main(words)
    assert "job 42, " in capsys.readouterr().err


def test_a_dry_run_shows_all_and_leaves_nothing(tmp_path, sbatch, capsys):
    path = write_config(tmp_path, minimal(tmp_path))
    words = ["submit", "--dry-run", str(path), "run.steps=7"]
    assert main([*words, "--print-config"]) == 0
    output = capsys.readouterr().out
    assert "steps: 7" in output
    assert "checkpoint_margin_s: 900" in output
    assert "sbatch --parsable" in output
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "steps: 7" not in output
    assert output.endswith("verdict: would be submitted\n")
    assert not sbatch.exists()
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_placement_and_command_also_where_something_is_missing(
    tmp_path, sbatch, capsys
):
    path = write_config(tmp_path, minimal(tmp_path))
    words = ["submit", "--dry-run", str(path), "model.hf_checkpoint=nowhere", "--set=account=rl"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    output, error = capsys.readouterr()
    assert "node1  rank 0   0        node1" in output
    assert "\nsbatch --parsable" in output
    assert "--account=rl" in output
    assert f"{path} would be refused:\n  model.hf_checkpoint: got 'nowhere'" in error
    assert not (tmp_path / "run").exists()


def test_a_dry_run_plans_memory_without_weights_and_ends_with_its_faults(tmp_path, sbatch, capsys):
    """Neither the weights of the known model nor its data are here. Its config.json is enough for the plan."""
    recipe = RECIPES / "qwen3_30b_a3b_base_r3.yaml"
    words = ["--dry-run", str(recipe), "--set=gpu=h100", f"run.directory={tmp_path / 'run'}"]
    with pytest.raises(SystemExit):
        main(["submit", *words])
    output, error = capsys.readouterr()
    assert "memory: fits on 4 x 8 H100" in output
    assert output.rstrip().splitlines()[-1].startswith("sbatch ")
    assert "\n  model.hf_checkpoint: " in error


def test_a_layout_that_the_model_refuses_is_not_planned(tmp_path):
    parallel = {"world_size": 6, "tensor": 3}
    submission = Submission.plan(
        minimal_config(tmp_path, parallel=parallel), site(gpu="h100"), None
    )
    verdict, faults = memory_verdict(submission)
    assert "parallel.tensor" in verdict
    assert faults == []


def test_a_rehearsal_needs_no_weights_and_has_a_folder_beside_the_run(tmp_path, sbatch, capsys):
    path = write_config(tmp_path, minimal(tmp_path))
    (tmp_path / "run-rehearsal").mkdir()
    (tmp_path / "run-rehearsal" / "rehearsal.json").write_text("{}")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    words = ["submit", str(path), "run.steps=7", "--set=time=60", "--rehearse", "--detach"]
    assert main(words) == 0
    words = sbatch.read_text().splitlines()
    folder = tmp_path / "run-rehearsal"
    assert words[-3:] == [
        f"{folder}/submitted.yaml",
        f"--site={folder}/site.yaml",
        f"--rehearse={path} run.steps=7",
    ]
    assert "--no-requeue" in words
    assert (folder / "job").read_text() == "42\n"
    assert not (folder / "rehearsal.json").exists()
    (earlier,) = tmp_path.glob("run-rehearsal-*/rehearsal.json")
    assert earlier.read_text() == "{}"
    assert not (tmp_path / "run").exists()


def test_servers_of_a_rehearsal_take_the_places_of_the_recipes(tmp_path):
    """The recipe has two servers of four devices on its second node, and the small ones are there, too. A server of 16
    devices fills nodes, and a small one on CPUs has the 8 devices of one node."""
    sections = {"parallel": {"world_size": 8}, "engine": {"servers": 2}, "sglang": {"tp_size": 4}}
    recipe = minimal_config(tmp_path, **sections)
    hosts = tuple(Host(name, name, 8) for name in ("a", "b"))
    for on_gpus in (False, True):
        placement = place(rehearsed_roles(recipe, 8, on_gpus=on_gpus), Allocation(hosts))
        places = [(server.host.name, server.first_device) for server in placement.servers]
        assert places == [("b", 0), ("b", 4)]
    spanning = minimal_config(
        tmp_path, **(sections | {"engine": {"servers": 1}, "sglang": {"tp_size": 16}})
    )
    assert rehearsed_roles(spanning, 8, on_gpus=False).server_devices == 8
    assert rehearsed_roles(spanning, 8, on_gpus=True).server_devices == 16


def test_a_path_that_a_node_does_not_see_is_named_by_its_key(tmp_path, capsys):
    (tmp_path / "config.json").touch()
    data = tmp_path / "data.jsonl"
    data.touch()
    fine = [f"{paths.CHECKPOINT}={tmp_path}", f"data.train={data}"]
    assert paths.main(fine) == 0
    assert paths.main([*fine, "data.evaluation.held=nowhere.jsonl"]) == 2
    assert "data.evaluation.held: got 'nowhere.jsonl'" in capsys.readouterr().out
    assert paths.main([f"{paths.CHECKPOINT}={data}"]) == 2
    assert "model.hf_checkpoint" in capsys.readouterr().out


def test_the_servers_python_is_asked_of_the_sglang_table_before_anything_queues(
    tmp_path, sbatch, capsys
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $* $(cat) > {tmp_path}/asked\necho '[\"sglang.x: bad\"]'\n")
    python.chmod(0o755)
    path = write_config(tmp_path, minimal(tmp_path))
    words = ["submit", str(path), "sglang.load_format=dumy", f"engine.python={python}"]
    with pytest.raises(SystemExit):
        main(words)
    assert "\n  sglang.x: bad" in capsys.readouterr().err
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == '-W ignore -m megatron_dppo.engine.server_arguments {"load_format": "dumy"}'
    # This Python has none of the packages, so only the job itself can check the options.
    python.write_text("#!/bin/sh\nexit 1\n")
    assert main(words) == 0
    assert "the job" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.world_size=12", "parallel.data=3"], "parallel.data: unknown key"),
        (["parallel.world_size=3"], "parallel.world_size: got 3 ranks"),
        (["--nodes=1", "parallel.world_size=2"], "2 ranks and 1 servers"),
        (["model.hf_checkpoint=nowhere"], "model.hf_checkpoint: got 'nowhere'"),
        (["data.train=nowhere"], "data.train: got 'nowhere'"),
        (["run.directory=/proc/here"], "run.directory: /proc can't be written"),
        (["--set=time=1"], "time: got 1, 60 s"),
        (["--set=time=soon"], "time: got 'soon'"),
        (["--set=container.kind=pyxis"], "container.image: missing"),
        (["--set=container.image=a"], "container.kind: got 'none'"),
        (
            ["--set=container.kind=apptainer", "--set=container.image=/nowhere.sif"],
            "container.image: got '/nowhere.sif'",
        ),
        (
            ["--set=container.kind=pyxis", "--set=container.image=a", "run.directory=/var/tmp/run"],
            "container.mounts: run.directory",
        ),
        (["engine.python=/nowhere/python"], "engine.python: got '/nowhere/python'"),
        (["--set=preflight_skip=[disc]"], "preflight_skip: got 'disc'"),
        (["--set=gres=gpu:h100:4"], "gres: got 'gpu:h100:4', 4 GPUs"),
        (["--set=prologue=if true"], "prologue: bash: line 2: syntax error"),
        (["--nodes=0"], "--nodes: got '0'"),
        (["--nodes=1000000000000"], "--nodes: got '1000000000000'"),
        (["--set=gpus_per_node=1000000000000"], "gpus_per_node: got 1000000000000 (int)"),
        (["--set=checkpoint_margin_s=65536"], "checkpoint_margin_s: got 65536 (int)"),
        (["--set=environment={'A=B': c}"], "environment: got the name 'A=B'"),
        (["--set=environment={'': c}"], "environment: got the name ''"),
        (["--set=environment={1A: c}"], "environment: got the name '1A'"),
        (['--set=environment={A: "b\\0c"}'], "environment.A: got 'b\\x00c' (str)"),
        (['--set=account="a\\0b"'], "account: got 'a\\x00b' (str)"),
        (["--set=sbatch_flags=[/bin/true]"], "sbatch_flags: got '/bin/true'"),
        (["--set=sbatch_flags=[--hold, /bin/true]"], "sbatch_flags: got '/bin/true'"),
        (["--set=sbatch_flags=[-C, h, /bin/true]"], "sbatch_flags: got '/bin/true'"),
        (["--set=sbatch_flags=[-C]"], "sbatch_flags: got '-C'"),
        (["--set=sbatch_flags=[-HC]"], "sbatch_flags: got '-HC'"),
        (["--set=sbatch_flags=[--constraint]"], "sbatch_flags: got '--constraint'"),
        (["--set=sbatch_flags=[':']"], "sbatch_flags: got ':'"),
        (["--set=sbatch_flags=['--']"], "sbatch_flags: got '--'"),
        (["--set=sbatch_flags=['-']"], "sbatch_flags: got '-'"),
        (["--set=sbatch_flags=['']"], "sbatch_flags: got ''"),
        (["--set=sbatch_flags=[-HW]"], "sbatch_flags: got '-HW'"),
        (["--sbatch=--wait"], "--sbatch: got '--wait'"),
        (["--sbatch=--test-only"], "--sbatch: got '--test-only'"),
        (["--sbatch=/bin/true"], "--sbatch: got '/bin/true'"),
        (["--set=srun_flags=[/bin/true]"], "srun_flags: got '/bin/true'"),
        (["--set=srun_flags=[-V]"], "srun_flags: got '-V'"),
        (["run.directory=/tmp/a\\b"], "run.directory: /tmp/a\\b"),
        (["--set=partitoin=gpu"], "partitoin: unknown key"),
    ],
)
def test_a_job_that_cannot_work_is_refused(tmp_path, sbatch, capsys, overrides, message):
    path = write_config(tmp_path, minimal(tmp_path))
    (tmp_path / "site.yaml").write_text(
        "gpus_per_node: 2\nstart_s: 60\ncheckpoint_margin_s: 60\ntime: '10'\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["submit", str(path), f"--site={tmp_path}/site.yaml", *overrides])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not sbatch.exists()


EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("shell", "site_file", "flags", "strategy", "refused"),
    [
        (EXPANDABLE, {}, [], "tensor", True),
        ({}, EXPANDABLE, [], "tensor", True),
        (EXPANDABLE, {}, [], "distributed", False),
        (EXPANDABLE, {"PYTORCH_ALLOC_CONF": ""}, [], "tensor", False),
        (EXPANDABLE, {}, ["--export=NONE"], "tensor", False),
        (EXPANDABLE | {"SBATCH_EXPORT": "NONE"}, {}, [], "tensor", False),
        ({}, EXPANDABLE, ["--export=NONE"], "tensor", True),
    ],
)
def test_expandable_segments_that_the_job_would_get(
    tmp_path, shell, site_file, flags, strategy, refused
):
    for gpus in (0, 2):
        cluster = site(environment=site_file, gpus_per_node=gpus)
        problems = list(environment_faults(strategy, cluster, flags, shell))
        assert len(problems) == (refused and gpus > 0)
        assert all(p.startswith("PYTORCH_ALLOC_CONF: got 'expandable_") for p in problems)


def test_a_shell_that_exports_expandable_segments_can_not_submit(
    tmp_path, sbatch, capsys, monkeypatch
):
    monkeypatch.setenv(*next(iter(EXPANDABLE.items())))
    path = write_config(tmp_path, minimal(tmp_path))
    words = ["submit", str(path), "weight_sync.strategy=tensor", "sglang.base_gpu_id=0"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "CUDA IPC" in capsys.readouterr().err
    assert not sbatch.exists()


def test_a_checkpoint_without_its_tokenizer_is_refused(tmp_path, sbatch, capsys):
    path = write_config(tmp_path, minimal(tmp_path))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        main(["submit", str(path)])
    assert "no tokenizer" in capsys.readouterr().err
    assert not sbatch.exists()


PARTITION = {
    "PartitionName": "gpu",
    "MaxTime": "02:00:00",
    "DefaultTime": "NONE",
    "TotalNodes": "4",
}


@pytest.mark.parametrize(
    ("time", "partition", "messages"),
    [
        ("2:00:00", {}, []),
        (
            "2:00:01",
            {},
            ["time: got 2:00:01, expected at most 02:00:00, the limit of partition gpu"],
        ),
        ("UNLIMITED", {}, ["time: got UNLIMITED, expected at most 02:00:00"]),
        (None, {}, []),
        (None, {"DefaultTime": "00:02:00"}, []),
        (
            None,
            {"DefaultTime": "00:01:59"},
            ["time: got none, partition gpu gives 00:01:59, 119 s, expected at least 120 s"],
        ),
        (None, {"MaxTime": "00:01:00"}, ["time: got none, partition gpu gives 00:01:00, 60 s"]),
        ("1", {}, ["time: got 1, 60 s, expected at least 120 s"]),
        ("9-0", {"MaxTime": "UNLIMITED"}, []),
    ],
)
def test_the_time_limits_of_a_partition(time, partition, messages):
    problems = list(time_faults(site(time=time), {**PARTITION, **partition}))
    assert len(problems) == len(messages)
    assert all(problem.startswith(text) for problem, text in zip(problems, messages, strict=True))


def test_a_qos_may_raise_a_partitions_limit_and_no_partition_has_none():
    assert list(time_faults(site(time="9-0", qos="long"), PARTITION)) == []
    assert list(time_faults(site(time=None), None)) == []


def test_a_partition_of_too_few_nodes():
    [problem] = node_faults(5, PARTITION)
    assert problem.startswith("nodes: got 5, ")
    assert list(node_faults(4, PARTITION)) == list(node_faults(9, None)) == []


def test_without_sbatch_nothing_is_submitted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write_config(tmp_path, minimal(tmp_path))
    with pytest.raises(SystemExit):
        main(["submit", str(path)])
    assert "sbatch: " in capsys.readouterr().err


def test_which_site_file_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert site_path(None, {}) is None
    default = tmp_path / ".config" / "megatron_dppo" / "site.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("account: rl\n")
    assert site_path(None, {}) == default
    assert site_path(None, {"MEGATRON_DPPO_SITE": "b.yaml"}) == Path("b.yaml")
    assert site_path("a.yaml", {"MEGATRON_DPPO_SITE": "b.yaml"}) == Path("a.yaml")
    assert load_site(None) == SiteConfig()
    assert load_site(None, ["qos=high", "gpus_per_node=4"]) == SiteConfig(
        qos="high", gpus_per_node=4
    )
    with pytest.raises(ConfigError, match="read"):
        load_site(tmp_path / "missing.yaml")


def test_devices_of_a_node():
    gpus = SiteConfig()
    assert gpus.devices({}) == 8
    assert gpus.devices({"SLURM_GPUS_PER_NODE": "h100:4", "SLURM_GPUS_ON_NODE": "8"}) == 4
    assert gpus.devices({"SLURM_GPUS_ON_NODE": "2"}) == 2
    none = SiteConfig(gpus_per_node=0, processes_per_node=3)
    assert none.devices({"SLURM_GPUS_ON_NODE": "8"}) == 3
    assert none.devices({"SLURM_NTASKS_PER_NODE": "2"}) == 2


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *[("8", 8), ("8(x2)", 8), ("h100:8", 8), ("h100", 1), ("gpu:h100:8(S:0-1)", 8)],
        *[("h100:4,a100:4", 8), ("gpu:a100_1g.5gb:7(IDX:0-2,4-7)", 7)],
    ],
)
def test_every_form_of_a_node_s_devices_is_read(value, count):
    assert SiteConfig().devices({"SLURM_GPUS_PER_NODE": value}) == count


@pytest.mark.parametrize("value", ["4,8(x2)", "h100:", "-1", "h100:4,,a100:4", "(null)"])
def test_a_number_of_devices_that_no_node_has_is_refused(value):
    with pytest.raises(SlurmError, match=mentioning("SLURM_GPUS_PER_NODE", value)):
        SiteConfig().devices({"SLURM_GPUS_PER_NODE": value})


def test_containers():
    site = SiteConfig.model_validate(
        {
            "srun_flags": ["--x"],
            "container": {
                "kind": "pyxis",
                "image": "a",
                "server_image": "b",
                "mounts": ["/data:/data"],
            },
        }
    )
    form = site.form("/here", server=True)
    assert form.prefix == ()
    assert form.flags == (
        "--x", "--container-image=b", "--container-mounts=/here:/here,/data:/data",
        "--container-workdir=/here", "--no-container-mount-home",
    )  # fmt: skip
    apptainer = site.container.model_copy(update={"kind": "apptainer", "server_image": None})
    assert SiteConfig(container=apptainer).form("/here", server=True).prefix == (
        "apptainer", "exec", "--nv", "--pwd=/here", "--bind=/here:/here", "--bind=/data:/data", "a",
    )  # fmt: skip


def test_what_a_container_shows_of_the_host():
    container = ContainerConfig(kind="pyxis", mounts=["/data:/data:ro", "/a:/b", "/c"])
    assert list(map(str, container.seen_inside("/here"))) == ["/here", "/data", "/c"]
    assert container.interpreter == "python3"
    assert ContainerConfig().interpreter == sys.executable


def test_submitting_loads_nothing_heavy():
    code = (
        "import sys, megatron_dppo.cluster.slurm.submit, megatron_dppo.launch.status\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'aiohttp', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_heterogeneous_job_has_its_servers_in_another_partition(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = site(partition="train", server_partition="serve", account="rl")
    settings = minimal_config(tmp_path, parallel={"world_size": 2}, engine={"servers": 4})
    plan = Submission.plan(settings, cluster, None)
    assert (plan.nodes, [server.host.name for server in plan.placement.servers]) == (
        3,
        ["node2", "node2", "node3", "node3"],
    )
    words = plan.command()
    colon = words.index(":")
    assert {"--nodes=1", "--partition=train"} <= set(words[:colon])
    assert words[colon:-3] == [
        ":", "--nodes=2", "--gpus-per-node=2", "--partition=serve", "--exclusive", "--account=rl",
        "--time=10",
    ]  # fmt: skip


def test_groups_of_a_job():
    assert job_groups({"SLURM_JOB_NODELIST": "n[1-2]"}) == {None: "n[1-2]"}
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n1"}
    het |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    assert job_groups(het) == {0: "n1", 1: "n[2-3]"}


def test_a_submission_takes_less_than_two_seconds_of_a_core(tmp_path, sbatch):
    path = write_config(tmp_path, minimal(tmp_path))
    before = os.times()
    command = [sys.executable, "-m", "megatron_dppo.cluster.slurm", "submit", str(path)]
    result = run_patiently(command)
    after = os.times()
    assert result.returncode == 0, result.stderr
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 2
