"""The tiers of the tests, in a small project that has this project's settings of pytest."""

import shutil
import sys

import pytest

from tests.conftest import DAYS
from tests.patience import run_patiently
from tests.ranks import ROOT

FILES = {
    "unit/test_a.py": "def test_fast(): pass\n@pytest.mark.second\ndef test_long(): pass\n",
    "integration/test_b.py": "@pytest.mark.first\ndef test_loop(): pass\ndef test_more(): pass\n",
    "unit/annexes/test_d.py": "def test_annex(): pass\n",
    "slurm/test_c.py": "@pytest.mark.slow\n@pytest.mark.parametrize('n', range(50))\ndef test_s(n): pass\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(f"import pytest\n{text}")
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def collected(project, *words):
    completed = run_patiently(
        [sys.executable, "-m", "pytest", "tests", "--collect-only", *words], cwd=project
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return {line.rpartition("::")[2] for line in completed.stdout.splitlines() if "::" in line}


def test_each_test_belongs_to_one_tier(project):
    makefile = (ROOT / "Makefile").read_text()
    assert "FIRST_TIER = not slow and not second\n" in makefile
    assert collected(project, "-m", "not slow and not second") == {"test_fast", "test_loop"}
    assert collected(project, "-m", "second") == {"test_long", "test_more", "test_annex"}


def test_seven_days_run_every_slow_test_once(project):
    days = [collected(project, "-m", "slow", "--slow-day", str(day)) for day in range(DAYS)]
    assert sorted(name for day in days for name in day) == sorted(f"test_s[{n}]" for n in range(50))
    assert all(days)


def test_a_file_leaves_the_environment_variables_as_they_were(project):
    """Otherwise a run that another file starts would get the variables of a trainer in the test process."""
    folder = project / "tests" / "variables"
    folder.mkdir()
    (folder / "test_1.py").write_text("import os\ndef test_sets(): os.environ['PLANTED'] = '1'\n")
    (folder / "test_2.py").write_text(
        "import os\ndef test_sees(): assert 'PLANTED' not in os.environ\n"
    )
    completed = run_patiently([sys.executable, "-m", "pytest", "tests/variables"], cwd=project)
    assert completed.returncode == 0, completed.stdout + completed.stderr
