"""Wrong numbers and files on the command lines of all commands: each is refused in a line, before any work."""

from __future__ import annotations

import json
import time

import pytest

from megatron_dppo.__main__ import main
from megatron_dppo.cluster.plan import main as plan
from tests.messages import mentions
from tests.ranks import ROOT

PLAN = ["plan", "examples/recipes/qwen3_30b_a3b_base.yaml", "--gpu", "h100", "--nodes", "4"]
REHEARSE = ["rehearse", "examples/recipes/qwen3_30b_a3b_base.yaml"]
CASES = [
    *([*PLAN, "--nodes", value] for value in ("0", "-1", "1000000000", "two", "1.5", "nan")),
    *([*PLAN, "--gpus-per-node", value] for value in ("0", "100000")),
    *([*PLAN, "--host-memory-gib", value] for value in ("-1", "nan", "inf", "1e300", "x")),
    *([*PLAN, "--storage-gbps", value] for value in ("0", "nan", "-5")),
    *([*PLAN, "--network-gbps", value] for value in ("0", "inf")),
    [*PLAN, "--network-latency-us", "-1"],
    [*PLAN, "--mean-response", "0"],
    [*PLAN, "--mean-prompt", "nan"],
    [*PLAN, "--png", "/nowhere/at/all.png"],
    [*PLAN, "--png", "/tmp"],
    *([*REHEARSE, "--ranks", value] for value in ("0", "-1")),
    *([*REHEARSE, "--servers", value] for value in ("0", "1000000")),
    [*REHEARSE, "--gpus-per-node", "0"],
    [*REHEARSE, "--nodes", "-1"],
    ["preflight", "x.yaml", "--timeout", "nan"],
    ["preflight", "x.yaml", "--port", "70000"],
    ["convert", "plan", "--hf-config", "x", "--tp", "0"],
    ["convert", "megatron-to-hf", "--megatron", "x", "--hf", "y", "--max-shard-gb", "nan"],
    ["fleet", "x", "add", "http://a:1", "--wait", "nan"],
    ["status", "x", "--follow", "--every", "nan"],
    ["logs", "x", "--lines", "-3"],
    ["watch", "x", "--port", "-1"],
    ["samples", "x", "--limit", "-1"],
    ["explain", "x", "--rows", "-1"],
    ["evaluate", "x.yaml", "--pass-reward", "nan"],
    ["data", "inspect", "x", "--similarity", "nan"],
    ["doctor", "x", "--html", "/nowhere/at/all.html"],
    ["bench-mask", "--masked-share", "2"],
]


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_a_wrong_number_or_file_is_refused_with_its_option(words, capsys):
    *_, option, value = words
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert mentions(line, option.strip("-"), value.strip("-"), "expected")


@pytest.mark.parametrize(
    "word",
    [
        "parallel.world_size=7",
        "parallel.pipeline=1000000",
        "sglang.ep_size=.nan",
        "sglang.tp_size=.inf",
        "sglang.pp_size=2",
        "sglang.max_running_requests=many",
    ],
)
def test_a_plan_names_a_fault_of_the_layout_without_a_search(word, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    cpu_before = time.process_time()
    assert plan([*PLAN[1:], word]) == 2
    assert time.process_time() - cpu_before < 10
    out = capsys.readouterr().out
    assert mentions(out, word.partition("=")[0], "got", word.partition("=")[2].strip("."))
    assert plan([*PLAN[1:], word, "--json"]) == 2
    tree = json.loads(capsys.readouterr().out)
    assert (tree["fits"], tree["proposals"]) == (False, [])
