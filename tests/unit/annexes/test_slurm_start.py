"""A start inside a Slurm job that is refused before a process is started."""

from __future__ import annotations

import json

import pytest

from megatron_dppo.cluster.slurm.site import SiteConfig
from megatron_dppo.cluster.slurm.supervise import Job, Start
from megatron_dppo.launch.placement import Host
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.stops import StopRequests
from tests.unit.config_files import minimal_config


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (2, "PYTORCH_CUDA_ALLOC_CONF: got 'expandable_segments:True' with weight_sync.strategy"),
        (0, "parallel.world_size: got 3 ranks on hosts of 2 devices"),  # the next check's error
    ],
)
def test_a_job_whose_environment_has_expandable_segments_is_refused(
    tmp_path, monkeypatch, caplog, gpus, message
):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sections = {"weight_sync": {"strategy": "tensor"}, "parallel": {"world_size": 3}}
    job = Job("7", 0, (Host("n1", "10.0.0.1", 2, None),), None, gpus)
    with RunDirectory(tmp_path / "run") as directory:
        start = Start(
            minimal_config(tmp_path, **sections), job, SiteConfig(), directory, StopRequests({})
        )
        decision = start.run()
    assert (decision.why, decision.code, decision.requeue) == ("refused", 2, False)
    assert decision.detail.startswith(message)
    assert f"refused: {message}" in caplog.text
    [attempt] = (tmp_path / "run" / "attempts").glob("7-0.json")
    assert json.loads(attempt.read_text())["detail"] == decision.detail
