"""The documentation as a site, built by the real mkdocs with links checked; and the notebook, run by a real kernel.

The notebook is given a finished run, which it only draws: the demo itself takes minutes, and is `make demo`'s command.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from megatron_dppo.metrics.report import write_report
from tests.extras import environment_with
from tests.ranks import ROOT
from tests.unit.test_watch import write_run

NOTEBOOK = ROOT / "examples" / "tiny_moe" / "demo.ipynb"


def build(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(folder)]
    variables = environment_with("docs", NO_MKDOCS_2_WARNING="1")
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_site_is_built_and_every_link_in_it_leads_somewhere(tmp_path):
    done = build(tmp_path / "site", ROOT / "mkdocs.yml")
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} == pages | {"404"}
    assert (tmp_path / "site" / "findings" / "mask-needed.png").stat().st_size > 10_000
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"] if "policy/entropy" in entry["text"]}
    assert "metrics.html" in {location.split("#")[0] for location in found}
    home = (tmp_path / "site" / "index.html").read_text()
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', home)
    assert loaded == []


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
NotebookClient(book, timeout=200, kernel_name="python3").execute()
outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
print(json.dumps([[list(o.get("data", {})), o.get("text", "")] for o in outputs]))
"""


def test_the_notebook_draws_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", 4)
    write_report(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{}")
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    variables = environment_with(
        "docs", DEMO_RUN=str(tmp_path / "run"), JUPYTER_PATH=str(tmp_path / "jupyter"),
        IPYTHONDIR=str(tmp_path / "ipython"), MPLBACKEND="module://matplotlib_inline.backend_inline",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK)], env=variables, capture_output=True,
        text=True, check=False, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    assert sum("image/png" in kinds for kinds, _ in outputs) == 2
    assert any("sample of training, step 2" in "".join(text) for _, text in outputs)


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
