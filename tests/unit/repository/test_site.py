"""The documentation as a site, built by the real mkdocs with links checked; and the notebook, run by a real kernel.

In the fast test the notebook only draws a finished run. In the slow test it runs one step of the demo.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.config.machine import this_machine
from megatron_dppo.demo.material import ROOT as ROOT_OF_MATERIAL
from megatron_dppo.demo.material import STAMP, fingerprint, make_data, make_model, trainer_overrides
from megatron_dppo.diagnostics.report import write_report
from tests.extras import environment_with
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.annexes.test_watch import write_run
from tests.unit.small_hub import small_hub

PAGES = sorted((ROOT / "docs").rglob("*.md"))
NOTEBOOK = ROOT / "examples" / "tiny_moe" / "demo.ipynb"


def build(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(folder)]
    variables = environment_with("docs", NO_MKDOCS_2_WARNING="1")
    return run_patiently(command, 300, env=variables)


def test_the_site_is_built_and_every_link_in_it_leads_somewhere(tmp_path):
    done = build(tmp_path / "site", ROOT / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in PAGES}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert built == pages | {Path("404")}
    assert (site / "evidence" / "findings" / "mask-needed.png").stat().st_size > 10_000
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"] if "policy/entropy" in entry["text"]}
    assert "metrics.html" in {location.split("#")[0] for location in found}
    home = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', home)
    assert loaded == []


CODE = r"^```.*?^```|^    .*?$"
LINK = r"\[[^\]]*\]\([^)]*\)"


def test_a_page_that_is_named_in_prose_is_a_link():
    """Code may name a page as a file, and a page may name itself."""
    for path in PAGES:
        text = re.sub(CODE, "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        named = re.findall(r"\bdocs/(?:\w+/)*(\w+\.md)\b", re.sub(LINK, "", text))
        assert set(named) <= {path.name}, path


def test_keys_in_tables_stay_in_one_piece(tmp_path):
    done = build(tmp_path / "site", ROOT / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "configuration.html").read_text()
    (style,) = re.findall(r'href="(site\.css)"', page)
    (rule,) = re.findall(r"td code[^{]*{([^}]*)}", (tmp_path / "site" / style).read_text())
    assert "white-space: nowrap" in rule


def test_a_broken_link_ends_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](there.md) [below](#below)\n")
    text = (ROOT / "mkdocs.yml").read_text().split("nav:\n  - Home")[0]
    (tmp_path / "mkdocs.yml").write_text(text)
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode == 1
    assert "there.md" in done.stderr
    assert "#below" in done.stderr


EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=float(sys.argv[2]), kernel_name="python3").execute()
outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
print(json.dumps([[list(o.get("data", {})), o.get("text", "")] for o in outputs]))
"""


def execute_notebook(folder: Path, seconds: float, **variables: str) -> list[tuple[list[str], str]]:
    """Execute the notebook, and return the kinds and the text of each output. The kernel starts as in Jupyter,
    in the notebook's folder of the clone ``folder``."""
    start = folder / NOTEBOOK.parent.relative_to(ROOT)
    start.mkdir(parents=True)
    kernels = folder / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    variables = environment_with(
        "docs", JUPYTER_PATH=str(folder / "jupyter"), IPYTHONDIR=str(folder / "ipython"),
        MPLBACKEND="module://matplotlib_inline.backend_inline", **variables,
    )  # fmt: skip
    done = run_patiently(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(seconds)],
        seconds + 60,
        env=variables,
        cwd=start,
    )
    assert done.returncode == 0, done.stderr
    return [(kinds, "".join(text)) for kinds, text in json.loads(done.stdout.splitlines()[-1])]


def test_the_notebook_draws_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", 4)
    write_report(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{}")
    outputs = execute_notebook(tmp_path, 200, DEMO_RUN="run")
    assert sum("image/png" in kinds for kinds, _ in outputs) == 2
    assert any("sample of training, step 2" in text for _, text in outputs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs_the_demo(tmp_path):
    """The notebook's cell runs one small step from a model that is not warmed up, and sends the export to a hub."""
    material = tmp_path / ROOT_OF_MATERIAL / "seed-1"
    material.mkdir(parents=True)
    make_data(material, 1)
    make_model(material / "warm", 1)
    stamp = fingerprint(1, trainer_overrides(this_machine().gpus))
    (material / STAMP).write_text(json.dumps(stamp))
    overrides = [
        *("run.steps=1", "rollout.prompts_per_step=16", "training.prompts_per_mini_batch=16"),
        *("evaluation.samples_per_prompt=1", "checkpoint.upload=me/sums"),
    ]
    with small_hub() as hub:
        outputs = execute_notebook(
            tmp_path, 1500, DEMO_OVERRIDES=" ".join(overrides), HF_ENDPOINT=hub.url,
            HF_TOKEN="hf_x", HF_HUB_DISABLE_XET="1",
        )  # fmt: skip
    run = tmp_path / "runs" / "notebook"
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    log = (run / "logs" / "rank0.log").read_text()
    assert f"runs/notebook/hf is sent: {hub.url}/me/sums/commit/abc" in log
    assert sum("image/png" in kinds for kinds, _ in outputs) == 2
    ((path, body),) = [(path, body) for path, body in hub.asked if "/commit/" in path]
    assert path == "/api/models/me/sums/commit/main"
    files = [json.loads(line)["value"].get("path") for line in body.splitlines()]
    assert {"config.json", "model.safetensors"} <= set(files)


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
