"""The page of the first day on a GPU: current, and rewritten from results by one command."""

import json
import shutil
import sys

from tests.messages import mentions
from tests.patience import run_patiently
from tests.ranks import ROOT

PAGE = ROOT / "docs" / "evidence" / "gpu_first_day.md"


def rewrite(tmp_path, *words):
    page = tmp_path / "page.md"
    shutil.copy(PAGE, page)
    kept = tmp_path / "kept.json"
    options = ["--page", str(page), "--kept", str(kept)]
    done = run_patiently([sys.executable, "tools/gpu_day_page.py", *words, *options], cwd=ROOT)
    return done, page.read_text()


def part(name, *rows):
    return {
        "name": name,
        "shows": "what it shows",
        "verdict": "good",
        "why": "",
        "seconds": 9.0,
        "rows": list(rows),
    }


def row(label, text, **figures):
    return {
        "label": label,
        "measured": text,
        "expected": "planned",
        "holds": None,
        "figures": figures,
    }


def test_the_page_is_that_of_the_kept_results(tmp_path):
    kept = ROOT / "docs" / "evidence" / "gpu_check.json"
    done, page = rewrite(tmp_path, *([str(kept)] if kept.exists() else []))
    assert done.returncode == 0, done.stderr
    assert page == PAGE.read_text()


def test_results_stand_beside_the_plan_and_the_h100(tmp_path):
    results = tmp_path / "gpu_check.json"
    layer = part(
        "full_layer",
        row("an optimiser step", "0.2 s"),
        row("weights", "2 GiB", measured=3, planned=2),
    )
    steps = part("slice", row("4 layers, R3: train", "2 s", seconds=2.0, planned=1.6, ratio=1.25))
    node = {
        "version": "0.1",
        "gpus": 8,
        "overrides": ["run.seed=3"],
        "parts": [layer, steps],
        "not_run": [],
    }
    results.write_text(
        json.dumps({"nodes": {"n1": node, "n2": {"exit_code": 1, "output": "no driver"}}})
    )
    done, page = rewrite(tmp_path, str(results))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "kept.json").read_text())["nodes"]["n1"] == node
    (step,) = [line for line in page.splitlines() if line.startswith("| an optimiser step | 0.2 s")]
    assert mentions(step, "0.283 s, 160 TFLOP/s")
    assert "| weights | 2 GiB | planned | 1.50 | 2.3 GiB |  |" in page
    assert "| 4 layers, R3: train | 2 s | planned | 1.25 |  |  |" in page
    (missing,) = [
        line for line in page.splitlines() if line.startswith("**Not run to the end here**")
    ]
    assert mentions(missing, "generation", "colocated")
    assert "slice" not in missing
    assert mentions(page, "8 GPU(s)", "run.seed=3", "Node n2", "exit code 1")
    assert page.startswith(PAGE.read_text().partition("<!-- gpu-check -->")[0])


def test_another_file_is_refused(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    done, page = rewrite(tmp_path, str(other))
    assert done.returncode == 2
    assert mentions(done.stderr, str(other), "expected a gpu_check.json")
    assert page == PAGE.read_text()
