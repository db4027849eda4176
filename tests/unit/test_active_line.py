"""The log lines that name the started processes and the active features."""

from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.local import describe_processes
from megatron_dppo.loop.run_parts import active_line
from megatron_dppo.model.layout import Layout
from tests.unit.config_files import minimal


def active_line_of(tree, algorithm, layout):
    return active_line(TrainConfig.model_validate(tree), algorithm, layout)


def test_what_is_active_in_a_line(tmp_path):
    tree = minimal(tmp_path)
    tree["rollout"] |= {"router_replay": True, "max_staleness": 1, "interrupt": "retract"}
    tree["engine"] = {"placement": "colocated"}
    algorithm = build_algorithm("dppo-binary-tv", {"tv_threshold": 0.25, "ratio_cap": 5.0})
    line = active_line_of(tree, algorithm, Layout(tensor=2, expert=2))
    assert line.startswith("active: dppo-binary-tv (")
    assert "tv_threshold 0.25" in line
    assert "ratio_cap 5" in line
    assert ", R3 on, filter off, staleness 1, retract, colocated, TP2 EP2" in line
    assert line.endswith(", bfloat16")
    tree["rollout"] |= {"replay_from": "runs/x", "max_staleness": 0}
    tree["engine"] = {}
    line = active_line_of(tree, build_algorithm("grpo"), Layout())
    assert "staleness 0, replaying runs/x, single" in line
    assert "inf" not in line


def test_what_is_started_in_words():
    assert describe_processes(1, 1) == "the engine and 1 rank"
    assert describe_processes(3, 2) == "3 servers and 2 ranks"
    assert describe_processes(0, 1) == "1 rank"
