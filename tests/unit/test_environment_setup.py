"""Which Python the set-up takes, with stand-ins on a PATH that holds nothing else."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVIRONMENT = Path(__file__).resolve().parents[2] / "tools" / "environment"
SCRIPT = ENVIRONMENT / "find_python.sh"


@pytest.fixture
def find(tmp_path):
    """Runs the script with ``programs`` (name -> shell code) on PATH; its exit code, output, errors."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("mktemp", "rm"):
        (folder / tool).symlink_to(
            f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}"
        )

    def run(programs, **environment):
        for name, code in programs.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{code}\n")
            path.chmod(0o755)
        answer = subprocess.run(
            ["/bin/bash", str(SCRIPT)],
            env={"PATH": str(folder), "TMPDIR": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return answer.returncode, answer.stdout.strip(), answer.stderr

    return run


def python(version: str) -> str:
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


FOLDER = SCRIPT.parent


def pins(name: str) -> dict[str, str]:
    """Version by package of a file in which every line is ``name==version``."""
    lines = [li for li in (FOLDER / name).read_text().splitlines() if not li.startswith("#")]
    found = {}
    for requirement in map(Requirement, lines):
        assert not requirement.extras, requirement
        (exact,) = requirement.specifier
        assert exact.operator == "==", requirement
        found[canonicalize_name(requirement.name)] = exact.version
    assert len(found) == len(lines)
    return found


def test_the_gpu_pins_meet_what_the_project_asks_for():
    gpu = pins("gpu.txt")
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [
        line for extra in ("gpu", "gpu-engine") for line in project["optional-dependencies"][extra]
    ]
    for requirement in map(Requirement, asked):
        if requirement.name == "transformer-engine-torch":  # compiled, after the others
            continue
        version = gpu[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
    assert gpu["transformer-engine"] == gpu["transformer-engine-cu13"]
    assert (
        f"transformer-engine-torch=={gpu['transformer-engine']}"
        in (FOLDER.parents[1] / "docs" / "environment.md").read_text()
    )


def test_cpu_and_gpu_run_the_same_libraries():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    for name in ("megatron-core", "sglang", "smg", "transformers", "tokenizers", "safetensors"):
        assert cpu[name] == gpu[name], name
    assert [name for name in gpu if "nccl-cu" in name] == ["nvidia-nccl-cu13"]


PYTHON_FOR_GPUS = """#!/bin/sh
case "$*" in
*version.cuda*) echo {cuda} ;;
*toolkit_home*) echo {home} ;;
*fused_weight_gradient_mlp_cuda*) [ -e {marker} ] ;;
*" install "*) for word; do echo "$word"; done > {asked}; {build} ;;
esac
"""


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
    names = {"home": tmp_path, "marker": tmp_path / "built", "asked": tmp_path / "asked"}
    script = PYTHON_FOR_GPUS.format(cuda=cuda, build=build.format(**names), **names)
    for path, text in (
        ("python", script),
        ("bin/nvcc", "#!/bin/sh\necho release 13.0, V13.0.88\n"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    run = subprocess.run(
        ["bash", str(ENVIRONMENT / "build_apex.sh")],
        env={"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python"), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == code, run
    assert said.format(**names) in run.stdout + run.stderr
    if code == 0:
        asked = names["asked"].read_text().splitlines()
        assert re.fullmatch(
            r"apex @ git\+https://github.com/NVIDIA/apex.git@[0-9a-f]{40}", asked[-1]
        )
        assert {"--no-deps", "--no-build-isolation"} <= set(asked)
