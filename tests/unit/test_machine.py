"""What a run needs of a machine, by hand."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.config.machine import Machine, machine_problems, this_machine
from megatron_dppo.config.schema import TrainConfig
from tests.unit.config_files import minimal

GIB = 2**30


def config(tmp_path: Path, **sections) -> TrainConfig:
    tree = minimal(tmp_path)
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return TrainConfig.model_validate(tree)


def machine(**values: int) -> Machine:
    return Machine(**{"cores": 2, "gpus": 0, "memory_bytes": 8 * GIB, "open_files": 1024, **values})


def test_a_small_run_fits_here(tmp_path):
    assert list(machine_problems(config(tmp_path), this_machine())) == []
    assert this_machine().cores >= 1


def test_few_open_files_are_told_with_their_number(tmp_path):
    assert list(machine_problems(config(tmp_path), machine(open_files=128))) == []
    (problem,) = machine_problems(config(tmp_path), machine(open_files=127))
    assert problem == ("open files: this process may have 127, expected at least 128 (ulimit -n)")


def test_gpus_of_ranks(tmp_path):
    settings = config(tmp_path, parallel={"world_size": 4})
    (problem,) = machine_problems(settings, machine(gpus=3))
    assert problem == "GPUs: 4 ranks need one each, this machine has 3"
    assert list(machine_problems(settings, machine(gpus=4))) == []


def test_cores_where_there_is_no_gpu(tmp_path):
    settings = config(tmp_path, parallel={"world_size": 15}, engine={"servers": 2})
    (problem,) = machine_problems(settings, machine())
    assert problem.startswith("cores: 17 processes of ranks and servers on 2 cores")
    assert list(machine_problems(settings, machine(cores=3))) == []
    replayed = config(tmp_path, parallel={"world_size": 16}, rollout={"replay_from": "x"})
    assert list(machine_problems(replayed, machine())) == []


def test_memory_where_there_is_no_gpu(tmp_path):
    """Told by config.json alone: 16 bytes of each parameter are trained, 2 served by each server."""
    settings = config(tmp_path, engine={"servers": 2})
    (tmp_path / "model" / "model.safetensors").unlink()
    attention = 64 * (64 + 2 * 32 + 64) + 2 * 16
    experts = 8 * 3 * 64 * 32 + 8 * 64
    parameters = 2 * 511 * 64 + 64 + 4 * (attention + experts + 2 * 64)
    assert list(machine_problems(settings, machine(memory_bytes=20 * parameters))) == []
    (problem,) = machine_problems(settings, machine(memory_bytes=20 * parameters - 1))
    assert problem.startswith("memory: weights, gradients and optimizer take 0 GiB or more")
    (tmp_path / "model" / "config.json").unlink()
    assert list(machine_problems(settings, machine(memory_bytes=1))) == []
