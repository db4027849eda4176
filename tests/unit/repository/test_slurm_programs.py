"""A machine without Slurm, emulated by a PATH with a few tools: missing programs, their installation, skipped tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import run_patiently
from tools.slurm_cluster import Cluster, what_is_missing
from tools.slurm_cluster.shell import CommandError

ROOT = Path(__file__).resolve().parents[3]
INSTALL = ROOT / "tools" / "slurm_cluster" / "install.sh"
PROGRAMS = [
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
    "sinfo",
]
BESIDE_SLURM = ["ip", "unshare", "nsenter"]
UPDATE, FETCH = (
    "-o Acquire::Retries=5 update -q",
    "-o Acquire::Retries=5 install -y --no-install-recommends slurm-wlm munge iproute2 util-linux",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH. It has ``ip`` and other tools, but not Slurm."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in ("bash", "paste", "env", "cat", "chmod", "git"):
        (path / tool).symlink_to(
            next(p for p in (Path("/bin"), Path("/usr/bin")) if (p / tool).exists()) / tool
        )
    for name in BESIDE_SLURM:
        write_program(path, name)
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("DAEMON_FOLDERS", "")
    monkeypatch.delenv("CI", raising=False)
    return path


def write_program(folder: Path, name: str, code: str = "") -> None:
    """Write a program that runs ``code``."""
    (folder / name).write_text(f"#!/bin/bash\n{code}\n")
    (folder / name).chmod(0o755)


def fake_apt(folder: Path, installs: list[str]) -> None:
    """Write an ``id`` of root, and an ``apt-get`` that records its calls and whose ``install`` makes programs."""
    write_program(folder, "id", "echo 0")
    make_programs = "".join(
        f'printf "#!/bin/bash\\n" > {folder}/{name}; chmod +x {folder}/{name};' for name in installs
    )
    write_program(
        folder,
        "apt-get",
        f'echo "$@" >> {folder}/calls; case "$*" in *" install "*) {make_programs} :;; esac',
    )


def install() -> subprocess.CompletedProcess[str]:
    return run_patiently([str(INSTALL)], 60)


def test_slurm_is_installed_where_ip_is_there_already(folder):
    fake_apt(folder, PROGRAMS)
    done = install()
    assert done.returncode == 0, done.stderr
    assert (folder / "calls").read_text().splitlines() == [UPDATE, FETCH]
    assert what_is_missing() is None


@pytest.mark.parametrize("absent", [*PROGRAMS, *BESIDE_SLURM])
def test_each_program_is_asked_for_by_itself(folder, absent):
    for name in PROGRAMS:
        write_program(folder, name)
    fake_apt(folder, [absent])
    (folder / absent).unlink()
    assert f"(no {absent})" in str(what_is_missing())
    assert install().returncode == 0
    assert (folder / absent).exists()


def test_where_all_are_there_nothing_is_installed(folder):
    for name in PROGRAMS:
        write_program(folder, name)
    fake_apt(folder, [])
    assert install().returncode == 0
    assert not (folder / "calls").exists()


def test_packages_that_bring_too_little_are_an_error(folder):
    fake_apt(folder, [name for name in PROGRAMS if name != "munged"])
    done = install()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "still not found after slurm-wlm munge iproute2 util-linux were installed: munged"
    )


def test_without_apt_it_says_what_to_install(folder):
    done = install()
    assert done.returncode == 1
    assert done.stderr == (
        f"[slurm] not found: {' '.join(PROGRAMS)}; there is no apt-get here: "
        "install Slurm, munge and iproute2 with this system's packages\n"
    )


def test_a_cluster_names_what_it_lacks(folder):
    with pytest.raises(
        CommandError, match=re.escape(f"no {', '.join(PROGRAMS)}); on Debian and Ubuntu: {INSTALL}")
    ):
        Cluster(1)


def test_without_slurm_every_test_of_it_is_skipped(folder):
    """Tests that make their own clusters are skipped, too."""
    words = ("-m", "pytest", "tests/slurm/test_cluster.py", "-p", "no:cacheprovider")
    done = run_patiently([sys.executable, *words], 300, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"\d+ skipped in .*", done.stdout.splitlines()[-1]), done.stdout
