"""`fresh.sh` with a small tree in place of Debian: commands inside it and their end; CI's use of the script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.patience import happens, run_patiently

ROOT = Path(__file__).resolve().parents[3]
INSIDE = ("bash", "sh", "env", "umount", "cat", "ls", "sleep", "true")
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and namespaces are root's")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with some programs and the libraries that they load."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("bin", "proc", "sys", "dev", "root", "tmp"):
        (root / folder).mkdir()
    (root / "usr").mkdir()
    (root / "usr" / "bin").symlink_to("../bin")
    programs = [Path(str(shutil.which(name))) for name in INSIDE]
    listed = run_patiently(["ldd", *programs], check=True).stdout
    for library in map(Path, set(re.findall(r"(/\S+) \(0x", listed))):
        (root / library.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.relative_to("/"))
    for program in programs:
        shutil.copy(program, root / "bin" / program.name)
    return root


class Machine:
    """A repository with the script, a cache, and stand-ins for debootstrap and apt-get first on PATH."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.repository = folder / "repository"
        (self.repository / "tools" / "environment").mkdir(parents=True)
        for name in ("fresh.sh", "progress.sh"):
            shutil.copy(ROOT / "tools/environment" / name, self.repository / "tools/environment")
        (self.repository / "committed").write_text("yes")
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
            subprocess.run([*GIT, *words], cwd=self.repository, check=True)
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.write_program("debootstrap", f'echo "$@" >> {folder}/calls; cp -a {tree} "$4"')
        self.write_program("apt-get", "exit 0")
        self.calls = folder / "calls"
        self.runs = folder / "cache" / "megatron_dppo" / "fresh" / "runs"
        path = f"{self.programs}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}

    def write_program(self, name: str, code: str) -> None:
        (self.programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (self.programs / name).chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        # A shell can't trap a signal that was ignored at its start, as nohup ignores SIGHUP. So reset it.
        return subprocess.Popen(
            ["env", "--default-signal=HUP", "tools/environment/fresh.sh", *words],
            cwd=self.repository, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        )  # fmt: skip

    def run(self, *words: str, given: str = "") -> tuple[int, str, str]:
        """Run the script with ``given`` as its input. Return its exit code, output and error output."""
        process = self.start(*words)
        output, said = process.communicate(given)
        return process.returncode, output, said


@pytest.fixture
def machine(tmp_path: Path, tree: Path) -> Machine:
    return Machine(tmp_path, tree)


@as_root
def test_a_command_runs_in_a_clean_clone_and_leaves_nothing(machine, tmp_path):
    (machine.repository / "not_committed").touch()
    (tmp_path / "wheels").mkdir()
    machine.environment["PIP_FIND_LINKS"] = str(tmp_path / "wheels")
    machine.environment["SECRET"] = "not carried"
    script = (
        "cat; ls; ls /root; ls -d $PIP_FIND_LINKS; echo $$ $SECRET $HOME; (sleep 1000 &); exit 7"
    )
    code, output, said = machine.run("bash", "-c", script, given="given\n")
    assert code == 7, said
    given, *files, wheels, last = output.splitlines()
    assert given == "given"
    assert files == ["committed", "tools", "megatron_dppo"]
    assert wheels == str(tmp_path / "wheels")
    number, home = last.split()
    assert int(number) < 50  # the command has its own process namespace
    assert home == "/root"
    assert "1 files are not committed and left out" in said
    assert list(machine.runs.iterdir()) == []
    assert str(machine.runs) not in Path("/proc/mounts").read_text()


@as_root
def test_the_tree_is_made_once(machine):
    assert [machine.run("--prepare")[:2] for _ in range(2)] == [(0, "")] * 2
    [made] = machine.calls.read_text().splitlines()
    assert made.startswith(
        "--variant=minbase --include=python3,python3-venv,make,g++,git,ca-certificates "
    )
    assert machine.run("--python", "3.13", "true")[0] == 0
    assert " trixie " in machine.calls.read_text().splitlines()[1]


@as_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_and_its_code_comes_back(machine, number):
    name = number.name.removeprefix("SIG")
    process = machine.start(
        "bash", "-c", f"trap 'echo {name}; exit 9' {name}; echo up; sleep 1000 & wait"
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    output, _ = process.communicate()
    assert (process.returncode, output) == (9, f"{name}\n")
    assert list(machine.runs.iterdir()) == []


@as_root
def test_what_a_killed_call_leaves_ends_and_is_removed_by_the_next(machine):
    process = machine.start("bash", "-c", "echo up; sleep 54321")
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.wait()
    assert happens(lambda: "54321" not in map(sleep_argument, Path("/proc").glob("[0-9]*")))
    assert len(list(machine.runs.iterdir())) == 1
    assert machine.run("true")[0] == 0
    assert list(machine.runs.iterdir()) == []


def sleep_argument(process: Path) -> str:
    """Return the argument of a ``sleep`` with this folder in /proc; empty for other processes."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it ended
        return ""
    return words[-2].decode(errors="replace") if words[0].endswith(b"sleep") else ""


@as_root
def test_kept_files_stay_where_it_says(machine):
    _, _, said = machine.run("--keep", "bash", "-c", "echo result > report")
    [kept] = re.findall(r"kept: (\S+)", said)
    assert (Path(kept) / "report").read_text() == "result\n"


@as_root
def test_without_a_tree_it_says_why(machine):
    machine.write_program("debootstrap", "echo E: no mirror; exit 1")
    code, output, said = machine.run("true")
    assert (code, output) == (77, "")
    assert "E: no mirror" in said
    assert "no Debian tree: debootstrap ended with 1" in said.splitlines()[-1]


def test_who_is_not_root_is_told_so(machine):
    machine.write_program("id", "echo 1000")
    assert machine.run("true") == (
        77,
        "",
        "[fresh] needs root (mounts and namespaces): run it with sudo\n",
    )


def test_a_python_that_no_release_has_is_refused(machine):
    code, _, said = machine.run("--python", "3.12", "true")
    assert code == 2
    assert said == "[fresh] no Debian release has Python '3.12': 3.11 (bookworm) or 3.13 (trixie)\n"


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    """A clone with CI's script, and stand-ins for the programs that it runs. Each records its name and arguments."""
    for name in (
        "tools/environment/fresh.sh",
        "tools/slurm_cluster/install.sh",
        "bin/make",
        ".venv/bin/python",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >> {tmp_path}/calls\n')
        path.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    return tmp_path


def run_ci(folder: Path, **variables: str) -> tuple[str, list[str]]:
    # A CI that runs this test has set these variables.
    outer_variables = ("MEGATRON_DPPO_FRESH", "CI_BEGAN")
    environment = {k: v for k, v in os.environ.items() if k not in outer_variables}
    environment |= {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | variables
    done = run_patiently([folder / ".ci" / "run"], env=environment, check=True)
    return done.stdout, (folder / "calls").read_text().splitlines()


def test_ci_goes_to_a_fresh_machine_with_its_clock(ci):
    before = int(time.time())
    _, calls = run_ci(ci)
    assert calls[0] == "fresh.sh --prepare"
    began = re.fullmatch(r"fresh.sh env CI=1 CI_BEGAN=(\d+) .ci/run", calls[1])
    assert began
    assert before <= int(began.group(1)) <= time.time()
    assert len(calls) == 2


def test_ci_runs_here_where_there_is_none(ci):
    (ci / "tools" / "environment" / "fresh.sh").write_text("#!/bin/bash\nexit 77\n")
    output, calls = run_ci(ci)
    assert "not on a fresh machine" in output
    assert calls[:3] == ["install.sh ", "make test", "make test-second"]
    assert re.fullmatch(r"make test-slow DAY=[0-6]", calls[3])


@pytest.mark.parametrize(("earlier_s", "slow"), [(3400, True), (3700, False)])
def test_the_slow_tests_are_run_where_time_is_left(ci, earlier_s, slow):
    began = str(int(time.time()) - earlier_s)
    output, calls = run_ci(ci, MEGATRON_DPPO_FRESH="1", CI_BEGAN=began)
    assert [call.split()[0] for call in calls] == [
        "install.sh",
        "make",
        "make",
        *(["make"] if slow else []),
    ]
    assert ("the slow tests were left out" in output) == (not slow)
