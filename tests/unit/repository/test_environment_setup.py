"""The set-up scripts: which Python they choose (stand-ins are on PATH), which environments they make or refuse."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import run_patiently

ENVIRONMENT = Path(__file__).resolve().parents[3] / "tools" / "environment"
SCRIPT = ENVIRONMENT / "find_python.sh"


@pytest.fixture
def find(tmp_path):
    """A function that runs find_python.sh with ``programs`` (name -> shell code) on PATH: exit code, output, errors."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("mktemp", "rm"):
        (folder / tool).symlink_to(
            f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}"
        )

    def run(programs, words=(), **environment):
        for name, code in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{code}\n")
            path.chmod(0o755)
        answer = run_patiently(
            ["/bin/bash", str(SCRIPT), *words],
            env={"PATH": str(folder), "TMPDIR": str(tmp_path), **environment},
        )
        return answer.returncode, answer.stdout.strip(), answer.stderr

    return run


def python(version: str) -> str:
    """Return the shell code of a stand-in for Python."""
    return f"echo {version}"


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({"python3.11": "3.11", "python3.12": "3.12", "python3": "3.12"}, "python3.11"),
        ({"python3.12": "3.12", "python3.13": "3.13"}, "python3.12"),
        ({"python3.13": "3.13", "python3": "3.14"}, "python3.13"),
        ({"python3": "3.13"}, "python3"),
        ({"python3": "3.9", "python": "3.11"}, "python"),
    ],
)
def test_the_first_that_fits(find, installed, chosen):
    assert find({name: python(v) for name, v in installed.items()})[:2] == (0, chosen)


def test_a_shim_without_its_python_is_passed_over(find):
    code, chosen, _ = find({"python3.11": "exit 127", "python3.12": python("3.12")})
    assert (code, chosen) == (0, "python3.12")


def test_python_names_one(find, tmp_path):
    find({"python3.11": python("3.11"), "mine": python("3.13"), "old": python("3.10")})
    mine, old = (str(tmp_path / "bin" / name) for name in ("mine", "old"))
    assert find({}, PYTHON=mine)[:2] == (0, mine)
    code, chosen, errors = find({}, PYTHON=old)
    assert (code, chosen) == (1, "")
    assert errors == f"[setup] PYTHON={old} is not Python 3.11, 3.12 or 3.13, but '3.10'\n"


UV = 'case "$2" in install) echo downloading;; find) echo /cache/python3.12;; esac'


def test_uv_fetches_one(find):
    code, chosen, errors = find({"python3": python("3.14"), "uv": UV})
    assert (code, chosen) == (0, "/cache/python3.12")
    assert "fetching one with uv" in errors


def test_pip_fetches_uv(find, tmp_path):
    """``pip install --target FOLDER uv`` makes FOLDER/bin/uv, which is used and removed."""
    pip = (
        'case "$*" in *"install --quiet --target "*) ;; *) echo 3.10; exit;; esac\n'
        'for word; do [ "$last" = --target ] && folder=$word; last=$word; done\n'
        '/bin/mkdir "$folder/bin"\n'
        f"printf '%s\\n' '#!/bin/sh' {UV!r} > \"$folder/bin/uv\"; /bin/chmod +x \"$folder/bin/uv\""
    ).replace(repr(UV), "'" + UV.replace("'", "'\\''") + "'")
    assert find({"python3": pip})[:2] == (0, "/cache/python3.12")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_without_uv_it_says_what_to_install(find):
    code, chosen, errors = find({"python3": 'case "$1" in -m) exit 1;; *) echo 3.14;; esac'})
    assert (code, chosen) == (1, "")
    assert errors.splitlines()[-1].startswith("[setup] install Python 3.11, 3.12 or 3.13 (or uv")


def test_the_script_may_be_run():
    assert os.access(SCRIPT, os.X_OK)


def pins(name: str) -> dict[str, str]:
    """Return the version of each package in a file whose lines are ``name==version``."""
    lines = [li for li in (ENVIRONMENT / name).read_text().splitlines() if not li.startswith("#")]
    found: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        assert not requirement.extras, requirement
        (exact,) = requirement.specifier
        assert exact.operator == "==", requirement
        found[canonicalize_name(requirement.name)] = exact.version
    assert len(found) == len(lines)
    return found


def test_the_gpu_pins_meet_what_the_project_asks_for():
    gpu = pins("gpu.txt")
    project = tomllib.loads((ENVIRONMENT.parents[1] / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        line for extra in ("gpu", "gpu-engine") for line in project["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, asked):
        if requirement.name == "transformer-engine-torch":  # compiled, after the others
            continue
        version = gpu[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
    assert gpu["transformer-engine"] == gpu["transformer-engine-cu13"]


def test_the_lock_of_uv_is_of_the_gpu_pins():
    """The lock lacks two pins that only builds from source need. It adds the project and a compiled package."""
    packages = tomllib.loads((ENVIRONMENT.parents[1] / "uv.lock").read_text())["package"]
    versions = {package["name"]: package.get("version") for package in packages}
    gpu, dev = pins("gpu.txt"), pins("dev.txt") | pins("trackers.txt")
    dev |= pins("reasoning_gym.txt")
    assert {name for name in gpu if name not in versions} == {"pybind11", "wheel"}
    different = {n: v for n, v in (gpu | dev).items() if n in versions and versions[n] != v}
    assert not different
    additional = versions.keys() - gpu.keys() - dev.keys()
    assert additional == {"megatron-dppo", "transformer-engine-torch"}
    assert versions["transformer-engine-torch"] == gpu["transformer-engine"]


def test_cpu_and_gpu_run_the_same_libraries():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    for name in ("megatron-core", "sglang", "smg", "transformers", "tokenizers", "safetensors"):
        assert cpu[name] == gpu[name], name
    assert [name for name in gpu if "nccl-cu" in name] == ["nvidia-nccl-cu13"]


PYTHON_FOR_GPUS = """#!/bin/sh
case "$*" in
*version.cuda*) echo {cuda} ;;
*toolkit_home*) echo {home} ;;
*fused_weight_gradient_mlp_cuda* | *transformer_engine.pytorch*) [ -e {marker} ] ;;
*get_path*) echo {home} ;;
*" install "*) for word; do echo "$word"; done > {asked}; {build} ;;
esac
"""


def run_build_script(script, tmp_path, cuda, build, nvcc="echo release 13.0, V13.0.88", words=()):
    """Run a build script with a stand-in for a Python whose torch has CUDA ``cuda``, and a toolkit of CUDA 13.0.

    Return the finished process, and the paths that its output may name.
    """
    names = {"home": tmp_path, "marker": tmp_path / "built", "asked": tmp_path / "asked"}
    python = PYTHON_FOR_GPUS.format(cuda=cuda, build=build.format(**names), **names)
    for path, text in (("python", python), ("bin/nvcc", f"#!/bin/sh\n{nvcc}\n")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    run = run_patiently(
        ["bash", str(ENVIRONMENT / script), *words],
        env={
            "PATH": os.environ["PATH"],
            "PYTHON": str(tmp_path / "python"),
            "TMPDIR": str(tmp_path),
        },
    )
    return run, names


@pytest.mark.parametrize(
    ("cuda", "build", "code", "said"),
    [
        ("13.0", "touch {marker}", 0, "[apex] ready after"),
        ("", "touch {marker}", 1, "is built for CPUs"),
        ("12.8", "touch {marker}", 1, "apex asks for torch's own CUDA, 12.8; {home} has 13.0"),
        ("13.0", "echo no headers; false", 1, "no headers"),
        ("13.0", "true", 1, "fused_weight_gradient_mlp_cuda does not load"),
    ],
)
def test_apex_is_built_from_nvidias_source(tmp_path, cuda, build, code, said):
    run, names = run_build_script("build_apex.sh", tmp_path, cuda, build)
    assert run.returncode == code, run
    assert said.format(**names) in run.stdout + run.stderr
    if code == 0:
        asked = names["asked"].read_text().splitlines()
        assert re.fullmatch(
            r"apex @ git\+https://github.com/NVIDIA/apex.git@[0-9a-f]{40}", asked[-1]
        )
        assert {"--no-deps", "--no-build-isolation"} <= set(asked)


@pytest.mark.parametrize(
    ("cuda", "build", "headers", "code", "said"),
    [
        (
            "13.0",
            'echo "$CUDA_HOME $CPATH" > {marker}',
            True,
            0,
            "[transformer engine] ready after",
        ),
        ("", "true", True, 1, "is built for CPUs"),
        ("12.8", "true", True, 1, "torch is built for CUDA 12.8; {home} has 13.0"),
        ("13.0", "true", False, 1, "no headers in {home}/nvidia/cudnn/include"),
        ("13.0", "echo no compiler; false", True, 1, "no compiler"),
        ("13.0", "true", True, 1, "transformer_engine.pytorch does not load"),
    ],
)
def test_transformer_engine_is_built_against_the_torch_that_is_there(
    tmp_path, cuda, build, headers, code, said
):
    site = [tmp_path / "nvidia" / name / "include" for name in ("cudnn", "nccl")]
    for folder in site if headers else []:
        folder.mkdir(parents=True)
    script = "build_transformer_engine.sh"
    run, names = run_build_script(script, tmp_path, cuda, build)
    assert run.returncode == code, run
    assert said.format(**names) in run.stdout + run.stderr
    if code == 0:
        asked = names["asked"].read_text().splitlines()
        assert asked[-1] == f"transformer-engine-torch=={pins('gpu.txt')['transformer-engine']}"
        assert {"--no-deps", "--no-build-isolation"} <= set(asked)
        home, path = names["marker"].read_text().split()
        last = tmp_path / "nvidia" / "cu13" / "include"  # after the toolkit's own
        assert (home, path) == (str(tmp_path), ":".join(map(str, [*site, last])))


def test_another_installer_gets_the_builds_variables(tmp_path):
    """uv builds the same package, and needs variables that name the headers of its installed packages."""
    for name in ("cudnn", "nccl"):
        (tmp_path / "nvidia" / name / "include").mkdir(parents=True)
    script = "build_transformer_engine.sh"
    run, names = run_build_script(script, tmp_path, "13.0", "true", words=["--variables"])
    assert run.returncode == 0, run
    assert not names["asked"].exists()
    printed = run_patiently(
        ["bash", "-c", f"{run.stdout}\nenv"], env={"PATH": os.environ["PATH"]}, check=True
    )
    variables = dict(line.split("=", 1) for line in printed.stdout.splitlines() if "=" in line)
    includes = [tmp_path / "nvidia" / name / "include" for name in ("cudnn", "nccl", "cu13")]
    assert variables["CPATH"] == ":".join(map(str, includes))
    assert variables["CUDA_HOME"] == str(tmp_path)
    assert variables["NVTE_FRAMEWORK"] == "pytorch"
    assert variables["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert int(variables["MAX_JOBS"]) > 0


def test_the_toolkit_is_looked_for_in_one_script():
    searching = [path.name for path in ENVIRONMENT.glob("*.sh") if "nvcc" in path.read_text()]
    assert searching == ["cuda_build.sh"]


@pytest.mark.parametrize("script", ["build_apex.sh", "build_transformer_engine.sh"])
def test_a_toolkit_without_a_compiler_is_named(tmp_path, script):
    run, _ = run_build_script(script, tmp_path, "13.0", "true", nvcc="exit 1")
    assert (run.returncode, run.stderr.splitlines()[-1].partition("] ")[2]) == (
        1,
        f"{tmp_path} has no nvcc that answers",
    )


STUBS = ("torch", "sglang", "transformers", "megatron/core")


@pytest.fixture
def clone(tmp_path):
    """A clone with the scripts, empty pin files and a project of one package. Empty libraries lie beside the clone."""
    folder, stubs = tmp_path / "one", tmp_path / "stubs"
    shutil.copytree(ENVIRONMENT, folder / "tools" / "environment")
    for name in ("cpu.txt", "gpu.txt", "dev.txt"):
        (folder / "tools" / "environment" / name).write_text(f"# {name}\n")
    (folder / "megatron_dppo").mkdir()
    (folder / "megatron_dppo" / "__init__.py").touch()
    (folder / "megatron_dppo" / "trainer.py").touch()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "megatron-dppo"\nversion = "1"\nscripts.tool = "megatron_dppo:main"\n'
        '[tool.setuptools]\npackages = ["megatron_dppo"]\n'
    )
    for name in STUBS:
        (stubs / name).mkdir(parents=True)
        (stubs / name / "__init__.py").touch()
    site = Path(sysconfig.get_path("purelib"))
    # Python's standard library has no distutils from 3.12 on. setuptools provides it through this hook.
    for path in (*site.glob("setuptools*"), site / "_distutils_hack"):
        (stubs / path.name).symlink_to(path)
    return folder


def set_up(folder, *words, **environment):
    """Run the set-up in a clone. Return its exit code, output and errors."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    base |= {"PYTHON": sys.executable, "PYTHONPATH": str(folder.parent / "stubs")}
    base |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [folder / "tools" / "environment" / "setup.sh", *words],
        env=base | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def where_the_project_is(folder):
    command = [
        folder / ".venv" / "bin" / "python",
        "-c",
        "import megatron_dppo as m; print(m.__file__)",
    ]
    answer = run_patiently(command, cwd="/", check=True).stdout
    return Path(answer.strip()).parents[1]


def scripts_of(folder):
    """Return the text of all scripts of the environment. Links to programs are left out."""
    paths = [*(folder / ".venv" / "bin").iterdir(), folder / ".venv" / "pyvenv.cfg"]
    return "\n".join(path.read_text() for path in paths if not path.is_symlink())


def test_a_clone_that_was_moved_or_copied_runs_its_own_code(clone):
    code, said, errors = set_up(clone)
    assert code == 0, said + errors
    assert set_up(clone) == (0, "", "")
    moved, copy = clone.with_name("two"), clone.with_name("th&ree")
    clone.rename(moved)
    # The quickest copies consist of hard links.
    subprocess.run(["cp", "-al", moved, copy], check=True)
    for folder in (moved, copy):
        code, said, errors = set_up(folder)
        assert code == 0, said + errors
        assert f"made for {clone}: it is pointed at {folder}" in said
        assert "pinned packages" not in said
        assert where_the_project_is(folder) == folder
        assert str(clone) not in scripts_of(folder)
        assert f"{folder}/.venv" in scripts_of(folder)
        assert set_up(folder) == (0, "", "")
    assert where_the_project_is(moved) == moved
    assert str(copy) not in scripts_of(moved)


def test_another_clones_environment_behind_a_link_is_left_alone(clone):
    assert set_up(clone)[0] == 0
    before = scripts_of(clone)
    second = clone.with_name("second")
    shutil.copytree(clone, second, ignore=shutil.ignore_patterns(".venv"))
    (second / ".venv").symlink_to(clone / ".venv")
    code, _, errors = set_up(second)
    assert code == 1
    assert f".venv is a link to {clone}/.venv, the environment of the clone {clone}" in errors
    assert scripts_of(clone) == before
    assert where_the_project_is(clone) == clone


def write_stamp(folder, kind, pins="other"):
    """Write the write_stamp of an environment that the set-up made from ``pins``."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".installed").write_text(f"kind={kind}\nplace={folder}\npins={pins}\n")


@pytest.mark.parametrize(
    ("there", "words", "line"),
    [
        ("cpu", ["gpu"], ".venv is the environment without GPUs, and nothing is installed over it"),
        (
            "gpu",
            [],
            ".venv is the environment for GPUs, made from other pins than this clone's: make setup GPU=1",
        ),
        (None, [], ".venv was not made by make setup"),
        (None, ["gpu"], ".venv was not made by make setup"),
    ],
)
def test_nothing_is_installed_over_another_environment(clone, there, words, line):
    if there:
        write_stamp(clone, there)
    else:
        (clone / ".venv" / "bin").mkdir(parents=True)
    before = sorted((clone / ".venv").rglob("*"))
    code, said, errors = set_up(clone, *words)
    assert (code, said) == (1, "")
    assert errors.startswith(f"[setup] {line}")
    assert errors.count("\n") == 1
    assert sorted((clone / ".venv").rglob("*")) == before


def test_the_environment_for_gpus_is_used_as_it_is(clone):
    named = ("gpu.txt", "dev.txt", "reasoning_gym.txt")
    parts = [clone / "tools/environment" / name for name in named]
    parts += [clone / "pyproject.toml"]
    parts += [clone / "tools/environment" / name for name in ("setup.sh", "find_python.sh")]
    write_stamp(
        clone, "gpu", hashlib.sha256(b"\n" + b"".join(p.read_bytes() for p in parts)).hexdigest()
    )
    assert set_up(clone) == (0, "", "")
    assert set_up(clone, "gpu") == (0, "", "")


def test_the_environment_for_gpus_takes_its_one_python(find):
    find({"python3.11": python("3.11"), "python3.12": python("3.12")})
    assert find({}, words=["3.12"])[:2] == (0, "python3.12")


def test_gpu_makes_the_environment_for_gpus(clone):
    """The set-up installs GPU pins, development pins, the project, Transformer Engine. Stand-ins record the calls."""
    calls = clone / "calls"
    record_call = f'#!/bin/sh\necho "$@" >> {calls}\n'
    make_venv = 'mkdir .venv/bin; cp "$0" .venv/bin/python'
    programs = {
        "tools/environment/build_transformer_engine.sh": f"#!/bin/sh\necho builds >> {calls}\n",
        "df": "#!/bin/sh\necho x; echo x x x 99999\n",
        "python": f'{record_call}case "$*" in -c*version_info*) echo 3.12;; "-m venv "*) {make_venv};; esac\n',
    }
    for name, text in programs.items():
        (clone / name).write_text(text)
        (clone / name).chmod(0o755)
    path = f"{clone}:{os.environ['PATH']}"
    code, said, errors = set_up(clone, "gpu", PYTHON=str(clone / "python"), PATH=path)
    assert code == 0, said + errors
    options = "-m pip --disable-pip-version-check --no-input install"
    in_order = [
        f"{options} -r tools/environment/gpu.txt",
        f"{options} --no-deps -r tools/environment/dev.txt",
        f"{options} --no-deps --no-build-isolation -e .",
        "builds",
    ]
    assert [each for each in calls.read_text().splitlines() if each in in_order] == in_order
    assert (clone / ".venv" / ".installed").read_text().startswith(f"kind=gpu\nplace={clone}\n")
    assert set_up(clone) == (0, "", "")


@pytest.fixture
def wheels(clone):
    """A function that makes a folder with a file in place of the torch wheel that the CPU pins require."""
    (clone / "tools" / "environment" / "cpu.txt").write_text("torch==2.13.0\n")
    write_stamp(clone, "cpu")
    (clone / ".venv" / "bin").mkdir()
    python = clone / ".venv" / "bin" / "python"
    installs = 'case "$*" in *" install "*) echo installs: "$@"; exit 1;; esac'
    python.write_text(f'#!/bin/sh\n{installs}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tags = f"cp{sys.version_info[0]}{sys.version_info[1]}"

    def make(local):
        folder = clone.parent / "wheels"
        folder.mkdir()
        (folder / f"torch-2.13.0{local}-{tags}-{tags}-linux_x86_64.whl").write_bytes(b"not a wheel")
        return str(folder)

    return make


def test_a_build_of_torch_for_cuda_is_refused_before_it_is_fetched(clone, wheels):
    folder = wheels("")
    code, said, errors = set_up(clone, PIP_FIND_LINKS=folder, TORCH_CPU_INDEX="http://127.0.0.1:9")
    assert code == 1, said
    assert "pinned packages" not in said
    assert errors.startswith("[setup] pip would take torch-2.13.0-cp3")
    assert errors.count("\n") == 1
    assert "set TORCH_CPU_INDEX to an index that has torch-2.13.0+cpu" in errors


def test_a_build_of_torch_for_cpus_is_installed(clone, wheels):
    folder = wheels("+cpu")
    code, said, errors = set_up(clone, PIP_FIND_LINKS=folder, TORCH_CPU_INDEX="http://127.0.0.1:9")
    assert code == 1
    assert "installing 1 pinned packages" in said
    assert "installs: -m pip" in errors


@pytest.mark.parametrize("target", ["demo", "arena", "slurm-demo", "test", "unit"])
@pytest.mark.parametrize(("kind", "hidden"), [("cpu", True), ("gpu", False)])
def test_an_environment_for_cpus_leaves_gpus_alone(tmp_path, target, kind, hidden):
    """On a machine with a GPU that its torch can't use, the two commands of the README work all the same."""
    shutil.copy(ENVIRONMENT.parents[1] / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").write_text(f"kind={kind}\nplace=/elsewhere\n")
    lines = run_patiently(["make", "-n", target], cwd=tmp_path, check=True).stdout.splitlines()
    commands = [
        line for line in lines if re.search(r"python -m (megatron_dppo|examples|pytest)", line)
    ]
    assert len(commands) == 1
    assert commands[0].startswith("CUDA_VISIBLE_DEVICES= ") == hidden
