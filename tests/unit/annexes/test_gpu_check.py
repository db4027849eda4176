"""The check of a GPU machine: its parts are found, run in processes of their own and reported, some without a GPU."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from megatron_dppo.cluster.planner.devices import DEVICES
from megatron_dppo.cluster.slurm.site import SiteConfig
from megatron_dppo.config import load_config
from megatron_dppo.diagnostics.gpu_check import Bench, at_most, discover, random_batch
from megatron_dppo.diagnostics.gpu_check.__main__ import chosen_parts, fresh_folder, main, page
from megatron_dppo.diagnostics.gpu_check.day import STAGES as DAY
from megatron_dppo.diagnostics.gpu_check.day import Stage, run_day
from megatron_dppo.diagnostics.gpu_check.nodes import collected, job_command, node_words
from megatron_dppo.diagnostics.gpu_check.parts.kernels import KernelCase, errors, kernels, mask_rows
from megatron_dppo.diagnostics.gpu_check.parts.loop import (
    cause_rows,
    gap_row,
    routing_rows,
    updates_row,
)
from megatron_dppo.diagnostics.gpu_check.parts.slice import _TIGHT as TIGHT
from megatron_dppo.diagnostics.gpu_check.parts.slice import CONFIG as SLICED_CONFIG
from megatron_dppo.diagnostics.gpu_check.parts.slice import (
    figure_rows,
    mean_figures,
    plan_seconds,
    planned,
    slice_overrides,
)
from megatron_dppo.diagnostics.gpu_check.parts.trainer import LENGTHS, PassResult, compared
from megatron_dppo.diagnostics.gpu_check.parts.trainer import _layout_row as layout_row
from megatron_dppo.diagnostics.gpu_check.parts.trainer import _run_pass as run_pass
from megatron_dppo.diagnostics.gpu_check.runner import run_part
from megatron_dppo.diagnostics.gpu_check.runs import RECIPE, gradient_row, steps_without_checkpoint
from megatron_dppo.metrics import table as names
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.system.toolkit import TORCH_LAYERS_VARIABLE
from megatron_dppo.trainer import platform
from tests.messages import mentioning, mentions
from tests.patience import own_patience
from tests.ranks import ROOT
from tests.tiny_models import save_tiny_model

PLANTED = "tests.unit.annexes.planted_parts"

Row = dict[str, float | None]


def run_planted(name, folder, limit_s=60.0):
    rows = []
    part = next(p for p in discover(PLANTED) if p.name == name)
    result = run_part(part, folder / name, 3, limit_s, rows.append, PLANTED)
    assert rows == result.rows
    return result


@pytest.mark.parametrize(
    ("measured", "holds"),
    [(0.5, True), (0.51, False), (float("-inf"), False), (float("nan"), False)],
)
def test_a_measured_value_must_be_finite_and_within_its_bound(measured, holds):
    assert at_most("error", measured, 0.5).holds is holds


def test_parts_are_found_by_being_there_and_those_with_short_limits_come_first():
    table = [part.name for part in discover(PLANTED)]
    assert table == ["good", "lacking", "crashing", "hanging", "wrong"]
    assert next(part.name for part in discover()) == "machine"


def test_every_part_is_told_of_in_the_docs():
    page_text = (ROOT / "docs" / "gpu_check.md").read_text()
    assert [p.name for p in discover() if f"| `{p.name}` |" not in page_text] == []


def test_parts_are_chosen_by_name():
    parts = discover(PLANTED)
    assert chosen_parts(parts, None) == parts
    assert [part.name for part in chosen_parts(parts, "wrong, good")] == ["good", "wrong"]
    with pytest.raises(ValueError, match=mentioning("nobody", "good", "lacking")):
        chosen_parts(parts, "good,nobody")
    with pytest.raises(ValueError, match=mentioning("good", "lacking")):
        chosen_parts(parts, "")


def test_layers_without_ddp_have_no_gradients_that_apexs_kernel_could_add_to(tmp_path, monkeypatch):
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    options = {"gradient_accumulation_fusion": True}
    fused = replace(platform.current(), transformer_options=options)
    monkeypatch.setattr(platform, "current", lambda: fused)
    batch = random_batch(load_model_shape(folder).vocab_size, LENGTHS)
    try:
        assert run_pass(folder, "float32", batch, torch_layers=False).gradients
    finally:
        torch.distributed.destroy_process_group()


def test_transformer_engines_extension_is_there_once_its_package_is_loaded(tmp_path, monkeypatch):
    """The extension's file is in a folder of the package. Only the import of the package makes its name known."""
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import sys\nfrom types import SimpleNamespace\n"
        "from megatron_dppo.trainer.context_parallel import own_rows\n"
        "sys.modules['transformer_engine_torch'] = SimpleNamespace(thd_get_partitioned_indices=own_rows)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert layout_row(Bench(tmp_path, gpus=1)).holds
    finally:
        # Later tests look for the real package.
        for name in (
            "transformer_engine",
            "transformer_engine.pytorch",
            "transformer_engine_torch",
        ):
            sys.modules.pop(name, None)


def test_a_good_part_leaves_rows_and_files(tmp_path):
    result = run_planted("good", tmp_path)
    assert (result.verdict, result.why, result.is_fault) == ("good", "", False)
    error, gpus = result.rows
    assert (error.measured, error.expected, error.holds) == ("0.25 nats", "at most 0.5 nats", True)
    assert error.figures == {"measured": 0.25}
    assert gpus.measured == "3"
    assert result.files == ["curve.png", "numbers.json"]


def test_a_crash_keeps_what_was_seen_and_quotes_the_log(tmp_path):
    result = run_planted("crashing", tmp_path)
    assert (result.verdict, result.is_fault) == ("crashed", True)
    assert [row.label for row in result.rows] == ["before"]
    assert mentions(result.why, "SIGSEGV")
    assert result.why.splitlines()[1:] == ["about to die"]


def test_a_hang_ends_at_the_limit_with_all_below_it(tmp_path):
    began, patience = time.monotonic(), own_patience(30)
    result = run_planted("hanging", tmp_path, limit_s=20.0)
    assert time.monotonic() - began >= 3.0
    assert not patience.is_exhausted()
    assert (result.verdict, result.is_fault) == ("timed out", True)
    assert mentions(result.why, "20 s")
    child = int(result.rows[0].measured)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_is_lacking_is_no_fault_but_what_is_wrong_before_it_is(tmp_path):
    lacking, wrong = run_planted("lacking", tmp_path), run_planted("wrong", tmp_path)
    assert (lacking.verdict, lacking.why, lacking.is_fault) == ("lacking", "no second GPU", False)
    assert (wrong.verdict, wrong.why, wrong.is_fault) == ("bad", "the rest", True)


def test_the_command_runs_the_parts_that_were_asked_for_and_writes_both_files(tmp_path, capsys):
    folder = tmp_path / "check"
    words = ["--directory", str(folder), "--parts", PLANTED, "--only", "good,wrong"]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert mentions(printed, "[2/2] wrong", "300 s", "NO error", "nan", 0.5, "wrong: wrong")
    report = json.loads((folder / "gpu_check.json").read_text())
    assert [part["verdict"] for part in report["parts"]] == ["good", "bad"]
    assert report["not_run"] == ["lacking", "crashing", "hanging"]
    text = (folder / "gpu_check.md").read_text()
    assert mentions(text, "| error |", "0.25 nats |", "0.5 nats |", "yes |")
    assert "![curve.png](good/curve.png)" in text
    assert main([*words[:-1], "good"]) == 0
    assert len(list(tmp_path.iterdir())) == 2  # the earlier folder was renamed


def test_overrides_reach_the_parts_and_unknown_keys_are_refused(tmp_path, capsys):
    words = ["--directory", str(tmp_path / "check"), "--parts", PLANTED, "--only", "good"]
    assert main([*words, "--set", "optimizer.lr=2e-5", "--set", "run.seed=3"]) == 0
    assert "overrides: optimizer.lr=2e-5 run.seed=3" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*words, "--set", "optimizer.speed=3"])
    assert ended.value.code == 2
    assert mentions(capsys.readouterr().err, "optimizer.speed", "unknown key")


STAGES = (
    Stage("crashing", 60, shows="layers"),
    Stage("lacking", 60, shows="server"),
    Stage("good", 60, needs_server=True),
    Stage("wrong", 60),
)


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Run ``STAGES``; return the results, and the seconds that each part was given."""
    monkeypatch.setenv(TORCH_LAYERS_VARIABLE, "")
    monkeypatch.delenv(TORCH_LAYERS_VARIABLE)
    given_seconds = []

    def run(part, limit_s):
        given_seconds.append(round(limit_s))
        folder = tmp_path / f"{len(given_seconds)}_{part.name}"
        return run_part(part, folder, 0, limit_s, lambda row: None, PLANTED)

    def run_stages(seconds, clock):
        return list(run_day(discover(PLANTED), run, seconds, STAGES, clock)), given_seconds

    return run_stages


def test_a_day_goes_on_with_what_can_still_work(day):
    results, given_seconds = day(1000, lambda: 0.0)
    verdicts = [(result.name, result.verdict) for result in results]
    assert verdicts == [
        ("crashing", "crashed"),
        ("crashing", "crashed"),  # once more, with layers of torch modules
        ("lacking", "lacking"),
        ("good", "lacking"),
        ("wrong", "bad"),
    ]
    assert os.environ[TORCH_LAYERS_VARIABLE] == "1"
    assert given_seconds == [60] * 4
    assert "lacking" in results[3].why


def test_a_day_ends_in_its_time(day):
    now = iter([0.0, 30.0, *[95.0] * 6])
    results, given_seconds = day(100, lambda: next(now))
    assert given_seconds == [60, 10]
    assert [result.verdict for result in results][2:] == ["lacking"] * 3
    assert mentions(results[2].why, "100 s")


def test_a_day_has_parts_that_are_there_in_less_than_their_limits():
    limits = {part.name: part.limit_s for part in discover()}
    assert all(stage.seconds <= limits[stage.part] for stage in DAY)


def test_nodes_get_the_words_of_the_check_but_not_those_of_the_job(tmp_path):
    words = ["--nodes", "2", "--site=s.yaml", "--day", "--directory", "d", "--set", "run.seed=1"]
    assert node_words(words) == ["--day", "--set", "run.seed=1"]
    site = SiteConfig(partition="gpu", time="00:30:00", sbatch_flags=["--constraint=h100"])
    command = job_command(site, 2, tmp_path, node_words(words))
    expected = {"--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=00:30:00", "--wait"}
    assert expected <= set(command)
    assert command[-1].endswith(f"{tmp_path} --day --set run.seed=1")


def test_a_node_without_results_leaves_the_end_of_its_output(tmp_path):
    (tmp_path / "n1").mkdir()
    (tmp_path / "n1" / "gpu_check.json").write_text('{"gpus": 8}')
    (tmp_path / "n2.out").write_text("no driver\n")
    assert collected(tmp_path, {"n1": 0, "n2": 1}) == {
        "nodes": {"n1": {"gpus": 8}, "n2": {"exit_code": 1, "output": "no driver"}}
    }


def slice_plan(tmp_path, layers, device, gpus, *overrides):
    """The plan of the slice's first run, from its config.json alone."""
    bench = Bench(tmp_path, gpus)
    model = tmp_path / "checkpoint" / "model"
    model.mkdir(parents=True)
    config = json.loads(SLICED_CONFIG.read_text()) | {"num_hidden_layers": layers}
    (model / "config.json").write_text(json.dumps(config))
    config = load_config(RECIPE, [*slice_overrides(bench, tmp_path), *overrides])
    return planned(config, DEVICES[device], gpus)


@pytest.mark.parametrize(
    ("layers", "device", "gpus", "overrides", "fits"),
    [
        (4, "h200", 1, (), True),
        (8, "h200", 1, (), False),
        (8, "h200", 1, TIGHT, True),
        (4, "h100", 1, (), False),
        (4, "h100", 1, TIGHT, True),
        (8, "h100", 8, (), True),
    ],
)
def test_a_slice_is_planned_before_it_runs(tmp_path, layers, device, gpus, overrides, fits):
    assert slice_plan(tmp_path, layers, device, gpus, *overrides).fits is fits


def test_a_slices_seconds_are_beside_the_plans_and_the_first_runs(tmp_path):
    plan = slice_plan(tmp_path, 4, "h200", 1)
    seconds = plan_seconds(plan)
    assert min(seconds.values()) > 0
    record = {
        "step": 2, names.phase_seconds("generate"): 4.0, names.phase_seconds("train"): 2.0,
        names.UPDATE_SECONDS: 1.0, names.TOKENS_PER_SECOND: 1000.0, "rollout/tokens": 4000,
        "rollout/response_length": 500.0,
    }  # fmt: skip
    warm_up = {**record, "step": 1, names.phase_seconds("train"): 50.0}
    figures = mean_figures([{"step": 0}, warm_up, record, {**record, "step": 3}])
    assert (figures["generate"], figures["train"], figures["step"]) == (4.0, 2.0, 6.0)
    rows = {row.label: row for row in figure_rows("R3", figures, {**figures, "train": 1.0}, plan)}
    training = rows["R3: train"]
    assert training.figures["of_first_run"] == 2.0
    assert training.figures["ratio"] == pytest.approx(2.0 / seconds["train"])
    assert mentions(rows["R3: generate"].measured, "1,000 tokens/s")


def test_a_run_that_ends_early_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=mentioning("exit code 2", "step 3")):
        steps_without_checkpoint(["optimizer.speed=1"], tmp_path, 3)


def test_a_fresh_folder_never_deletes_an_earlier_one(tmp_path):
    for _ in range(3):
        folder = fresh_folder(tmp_path / "check")
        (folder / "mine").touch()
    assert len(list(tmp_path.glob("*/mine"))) == 3


def test_a_page_says_that_there_is_no_gpu():
    assert page([], ["kernels"], 0).startswith("# GPU check on a machine without a GPU\n")
    assert page([], [], 1).startswith("# GPU check on a machine with 1 GPU\n")


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_the_problem_tells_a_right_kernel_from_one_that_takes_padding_for_tokens(backend):
    case = KernelCase.drawn(8, 990, 34, torch.float32, torch.device("cpu"))
    assert max(vars(errors(case, backend)).values()) < 2e-6
    whole = KernelCase(case.logits, case.targets, case.topk, case.weights, 1024)
    wrong = whole.logits.double().log_softmax(-1).gather(1, case.targets[:, None])
    right = case.logits[:, :990].double().log_softmax(-1).gather(1, case.targets[:, None])
    assert float((wrong - right).abs().max()) > 1.0


def test_a_shard_is_a_copy_of_its_columns():
    case = KernelCase.drawn(4, 100, 28, torch.bfloat16, torch.device("cpu"))
    second = case.shard(1, 2)
    assert torch.equal(second.logits, case.logits[:, 64:])
    second.logits.zero_()
    assert float(case.logits[:, 64:].abs().max()) > 0
    assert float(case.shard(0, 1).logits.data_ptr()) != case.logits.data_ptr()


def test_mask_rows_judge_only_our_own_errors():
    own_result = {
        "name": "policy_stats", "forward_ms": 1.0, "backward_ms": 3.0, "floor_mb": 8.0,
        "floor_share_of_copy_bandwidth": 0.5, "peak_extra_over_logits": 0.0, "max_log_prob_error": 1e-3,
    }  # fmt: skip
    mask = {
        "name": "dppo-binary-tv", "overhead": 0.01, "overhead_iqr": 0.002, "loss_overhead": 0.003,
        "extra_all_reduces": 0,
    }  # fmt: skip
    result = {
        "settings": {"tp": 2},
        "implementations": [own_result, {**own_result, "name": "torch log_softmax"}],
        "masks": [mask, mask],
    }
    own_row, peer_row, mask_row = mask_rows(result)
    assert own_row.measured.startswith("4.00 ms, 2 GB/s (50% of a copy)")
    assert (own_row.holds, peer_row.holds) == (False, None)
    assert re.findall(r"[\d.]+%?", mask_row.measured) == ["1.00%", "0.20%", "0.30%", "0"]


def test_kernels_are_checked_on_a_machine_without_a_gpu(tmp_path):
    result = run_part(kernels, tmp_path / "kernels", 0, 120.0, lambda row: None)
    assert result.verdict == "good", result.why
    labels = [row.label for row in result.rows]
    for name in ("eager, float32", "cpp, bfloat16", "triton in its interpreter, bfloat16"):
        assert name in labels
    assert sum(label.startswith("TP2, 2 processes over gloo") for label in labels) == 2
    assert all(row.holds for row in result.rows)
    assert not list(Path(tmp_path).glob("*.json"))


@pytest.mark.parametrize(
    ("measured", "holds"), [(100, True), (91, True), (90, False), (112, False)]
)
def test_bytes_are_compared_with_the_plan_within_the_tolerance(measured, holds):
    row = compared("weights", measured, 100, 0.1)
    assert row.holds is holds
    assert row.figures == {"measured": measured, "planned": 100}


def test_errors_of_a_pass_are_relative_to_the_norms():
    exact = PassResult(
        torch.tensor([3.0, 4.0]), {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    )
    other = PassResult(
        torch.tensor([3.0, 4.5]), {"a": torch.tensor([3.3]), "b": torch.tensor([4.4])}
    )
    assert other.logit_error(exact) == pytest.approx(0.1)
    assert other.gradient_error(exact) == pytest.approx(0.1)


def test_updates_are_counted_over_the_run_and_all_must_be_verified():
    first: Row = {"step": 0, names.WEIGHT_UPDATES: 1, names.WEIGHT_UPDATES_VERIFIED: 1}
    last: Row = {**first, "step": 1, "weights/bytes_moved": 3e6, "weights/bytes_bound": 2e6}
    row = updates_row("disk", [first, last])
    assert mentions(row.measured, "2 of 2", "3.00 MB", "2.00")
    assert row.holds is True
    assert row.figures["weights/bytes_moved"] == 3e6
    assert updates_row("disk", [first]).holds is False
    assert updates_row("disk", [first, {**last, names.WEIGHT_UPDATES_VERIFIED: 0}]).holds is False


@pytest.mark.parametrize(("gap", "holds"), [(5e-3, True), (5.1e-3, False), (None, False)])
def test_a_gap_has_the_normal_range_of_its_dtype(gap, holds):
    assert gap_row({names.GAP_ON_POLICY: gap}, "bfloat16").holds is holds
    assert gap_row({names.GAP_ON_POLICY: 1e-3}, "float32").holds is False


def test_routing_must_be_recorded_for_every_token_and_mostly_agree():
    record: Row = {names.ROUTING_UNRECORDED: 0.0, names.ROUTING_AGREEMENT_FIRST: 0.75}
    assert [row.holds for row in routing_rows(record)] == [True, True]
    worse: Row = {names.ROUTING_UNRECORDED: 0.01, names.ROUTING_AGREEMENT_FIRST: 0.74}
    assert [row.holds for row in routing_rows(worse)] == [False, False]
    assert [row.measured for row in routing_rows({})] == ["not recorded", "not recorded"]


@pytest.mark.parametrize(("norms", "holds"), [((0.2, 0.1), True), ((0.2, 0.0), False), ((), False)])
def test_a_run_without_a_gradient_in_a_step_is_told(norms, holds):
    records: list[Row] = [{"step": 0}]
    records += [{"step": step, names.GRAD_NORM: norm} for step, norm in enumerate(norms, 1)]
    assert gradient_row("gradient norm", records).holds is holds


def test_the_numerics_are_judged_and_other_parts_of_the_mismatch_told():
    ladder = {
        "parts": {"staleness": 0.01, "routing": 0.002, "numerics": 0.006},
        "rungs": [{"fixes": "nothing fixed", "gap": 0.018}, {"fixes": "precision", "gap": 1e-7}],
    }
    stale, routing, numerics, exact = cause_rows(ladder)
    assert [row.holds for row in (stale, routing, numerics, exact)] == [None, None, False, None]
    assert exact.measured == "1.00e-07"
    assert numerics.expected == "at most 0.005"
