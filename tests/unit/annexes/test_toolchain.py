"""The search and the trial of the compiler that SGLang's server calls: with scripts in its place, and the real one."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.cluster.preflight import inspection
from megatron_dppo.cluster.preflight.evidence import Site
from megatron_dppo.cluster.preflight.toolkit import (
    collect_toolkit,
    compiler_faults,
    judge_toolkit,
    toolkit_here,
)
from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.system import gpus, toolkit
from tests.messages import mentions
from tests.patience import run_patiently
from tests.ranks import ROOT
from tests.unit.annexes.test_preflight_judges import NEEDS

REAL = toolkit.toolkit_home(os.environ)
"""The toolkit of this machine."""
NVCC = """#!/bin/sh
[ "$1" = --version ] && {{ echo "Cuda compilation tools, release {version}, V{version}.1"; exit 0; }}
{compile}
"""
COMPILES = 'for word; do output=$word; done; echo "int launch(void) { return 0; }" | cc -x c -fPIC -c - -o "$output"'
CONFLICT = 'echo "cccl: error: CUDA compiler and CUDA toolkit headers are incompatible"; exit 2'


@pytest.fixture(autouse=True)
def hidden_toolkit(monkeypatch, tmp_path):
    """Hide this machine's toolkit, and put a ninja beside the servers' Python."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "USUAL_HOME", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    write_program(tmp_path / "env" / "ninja", "#!/bin/sh\n")


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, *, version="13.0", compile=COMPILES, lib64=True) -> Path:
    write_program(home / "bin" / "nvcc", NVCC.format(version=version, compile=compile))
    write_program(home / "include" / "cuda_runtime.h", "")
    if lib64:
        library = ["cc", "-x", "c", "-", "-shared", "-o", "libcudart.so"]
        (home / "lib64").mkdir()
        subprocess.run(library, cwd=home / "lib64", input=b"int cudart;", check=True)
    return home


def build_library(path: Path, source: str, *needed: Path) -> None:
    """Build the shared library ``path``, which needs the libraries ``needed`` and has no run path to them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "cc",
        "-x",
        "c",
        "-",
        "-shared",
        "-fPIC",
        "-o",
        str(path),
        f"-Wl,-soname,{path.name}",
    ]
    command += ["-Wl,--no-as-needed"]
    for library in needed:
        command += [f"-L{library.parent}", f"-l:{library.name}"]
    subprocess.run(command, input=source.encode(), check=True)


def texts(found) -> list[str]:
    return [str(finding) for finding in found]


def findings(tmp_path, cuda="13.0") -> list[str]:
    evidence = toolkit_here(str(tmp_path / "env" / "python"), cuda)
    return texts(judge_toolkit({"a": evidence}, NEEDS))


def test_the_toolkit_is_found_by_its_variable_by_path_or_where_it_usually_is(tmp_path, monkeypatch):
    assert toolkit.toolkit_home(os.environ) is None
    usual, other = (make_toolkit(tmp_path / name, lib64=False) for name in ("usual", "other"))
    monkeypatch.setattr(toolkit, "USUAL_HOME", usual)
    assert toolkit.toolkit_home(os.environ) == usual
    # This nvcc has no headers beside it.
    wrapper = write_program(tmp_path / "scripts" / "bin" / "nvcc", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert toolkit.toolkit_home(os.environ) == usual
    monkeypatch.setenv("PATH", f"{other}/bin:/usr/bin:/bin")
    assert toolkit.toolkit_home(os.environ) == other
    monkeypatch.setenv("CUDA_HOME", "/chosen")
    assert toolkit.toolkit_home(os.environ) == Path("/chosen")


def test_a_process_hands_its_toolkit_to_the_libraries(tmp_path):
    environment = {"PATH": f"{make_toolkit(tmp_path / 'cuda')}/bin:/bin"}
    assert toolkit.offer_toolkit(environment) == [f"CUDA_HOME={tmp_path / 'cuda'}"]
    assert environment["CUDA_HOME"] == str(tmp_path / "cuda")
    assert "CUDA_HOME is not set" in toolkit.offer_toolkit({"PATH": "/bin"})[0]


def test_a_toolkit_that_compiles_is_nobodys_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "12.4"}, "a: CUDA toolkit: got 12.4 in {home}, expected 13, as torch's CUDA 13.0"),
        (
            {"compile": CONFLICT},
            "a: compiling with {home}: got nvcc exits with code 2: cccl: error: CUDA compiler and CUDA "
            "toolkit headers are incompatible, expected a library of one kernel",
        ),
        ({"lib64": False}, "a: compiling with {home}: got c++ exits with code 1: "),
    ],
)  # fmt: skip
def test_a_toolkit_that_cant_serve_is_named(tmp_path, monkeypatch, changes, told):
    home = make_toolkit(tmp_path / "cuda", **changes)
    monkeypatch.setenv("CUDA_HOME", str(home))
    (finding,) = findings(tmp_path)
    assert finding.startswith(told.format(home=home))
    assert "lib64" in changes or finding == told.format(home=home)


def test_a_missing_toolkit_compiler_or_ninja_is_named(tmp_path, monkeypatch):
    (tmp_path / "env" / "ninja").unlink()
    expected = "nvcc and headers of CUDA 13: SGLang compiles kernels at its start"
    ninja = "a: ninja: got none, expected in the servers' environment, or on PATH: SGLang builds kernels with it"
    got = "no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert findings(tmp_path) == [f"a: CUDA toolkit: got {got}, expected {expected}", ninja]
    monkeypatch.setenv("CUDA_HOME", "/chosen")
    got = "no answer of /chosen/bin/nvcc"
    assert findings(tmp_path)[0] == f"a: CUDA toolkit: got {got}, expected {expected}"


def test_a_driver_that_is_too_old_for_torch_is_named():
    fine = {"ninja": "/n", "home": "/c", "version": "13.0", "failed": None, "cuda": "13.0"}
    fine["preload"] = None
    evidence = {"a": {**fine, "driver": "570.1"}, "b": {**fine, "driver": "580.2"}}
    (finding,) = texts(judge_toolkit(evidence, NEEDS))
    assert mentions(finding, "a: driver", "570.1", 580, "13.0")


def test_a_start_on_this_machines_gpus_asks_for_the_servers_compiler(tmp_path, monkeypatch):
    engine = EngineConfig()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(compiler_faults(engine)) == []
    (tmp_path / "nvidia0").touch()
    (problem,) = compiler_faults(engine)
    assert problem.startswith("this machine: CUDA toolkit: got no CUDA_HOME, no nvcc on PATH")
    assert list(compiler_faults(engine.model_copy(update={"device": "cpu"}))) == []


def test_a_colocated_servers_memory_library_must_load_without_torch(tmp_path):
    saver = tmp_path / "site" / "torch_memory_saver_hook_mode_preload_cu99.abi3.so"
    runtime = tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcudart.so.99"
    build_library(runtime, "int cudart(void) { return 1; }")
    build_library(saver, "int cudart(void); int saver(void) { return cudart(); }", runtime)
    python = write_program(
        tmp_path / "env" / "python",
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/site:{ROOT} exec {sys.executable} "$@"\n',
    )
    assert toolkit_here(str(python), "99.0", memory_saver=True)["preload"] is None
    runtime.unlink()
    evidence = toolkit_here(str(python), "99.0", memory_saver=True)
    finding = next(text for text in texts(judge_toolkit({"a": evidence}, NEEDS)) if "saver" in text)
    assert mentions(finding, "a: torch_memory_saver", "libcudart.so.99")
    saver.unlink()
    assert saver.name[:40] in toolkit_here(str(python), "99.0", memory_saver=True)["preload"]
    assert toolkit_here(str(python), "99.0")["preload"] is None


def test_the_runtimes_folder_comes_after_the_users_folders(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    environment = {"LD_LIBRARY_PATH": "/site"}
    assert toolkit.offer_runtime(environment) == []
    (folder / "libcudart.so.13").touch()
    toolkit.offer_runtime(environment)
    assert environment == {"LD_LIBRARY_PATH": f"/site:{folder}"}


def test_transformer_engines_library_finds_all_parts_of_cudnn(tmp_path):
    home = tmp_path / "nvidia" / "cudnn"
    main, graph = (home / "lib" / f"libcudnn{part}.so.9" for part in ("", "_graph"))
    library = tmp_path / "libtransformer_engine.so"
    build_library(main, "int cudnn(void) { return 1; }")
    build_library(graph, "int graph(void) { return 2; }")
    build_library(library, "int graph(void); int attention(void) { return graph(); }", graph)
    (home / "lib" / "libcudnn_damaged.so.9").write_text("no library")
    program = """if True:
        import ctypes, os, sys
        from megatron_dppo.system import toolkit
        ctypes.CDLL(os.environ["CUDNN_HOME"] + "/lib/libcudnn.so.9", mode=ctypes.RTLD_GLOBAL)
        if sys.argv[2] == "load":
            print(*toolkit.load_cudnn(os.environ))
        print(ctypes.CDLL(sys.argv[1]).attention())
    """

    def load(choice):
        return run_patiently(
            [sys.executable, "-c", program, str(library), choice],
            env=os.environ | {"CUDNN_HOME": str(home), "PYTHONPATH": str(ROOT)},
        )

    assert "libcudnn_graph.so.9: cannot open shared object" in load("leave").stderr
    loaded = load("load")
    assert loaded.stdout.split()[-1] == "2"
    assert "libcudnn_damaged.so.9 does not load" in loaded.stdout


def test_an_installation_without_its_extension_is_incomplete(tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(inspection.sysconfig, "get_path", lambda name: str(tmp_path))
    assert inspection.transformer_engine_fault() is None
    (package / "__init__.py").touch()
    importlib.invalidate_caches()
    assert mentions(inspection.transformer_engine_fault(), package, "make setup GPU=1")
    (package / "wheel_lib" / "transformer_engine_torch.cpython-312.so").touch()
    assert inspection.transformer_engine_fault() is None


@pytest.mark.parametrize(("line", "version"), [("'13.0'", "13.0"), ("None", None)])
def test_an_interpreter_tells_what_its_torch_was_built_for(tmp_path, monkeypatch, line, version):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {line}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert inspection.torch_cuda() == version


def test_runs_without_gpus_or_servers_ask_for_no_toolkit(tmp_path):
    for needs in (replace(NEEDS, gpus=0, pythons={"engine": "python"}), NEEDS):
        evidence = collect_toolkit(Site(needs, None, {}))
        assert evidence == {"skipped": "no server of this run compiles for a GPU"}
        assert list(judge_toolkit({"a": evidence}, needs)) == []


@pytest.mark.skipif(REAL is None, reason="no CUDA toolkit on this machine")
def test_the_real_compiler_makes_a_library(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(REAL))
    evidence = toolkit_here(str(tmp_path / "env" / "python"), None)
    assert texts(judge_toolkit({"a": evidence}, NEEDS)) == []
    (finding,) = texts(judge_toolkit({"a": evidence | {"cuda": "99.0"}}, NEEDS))
    assert finding.endswith("expected 99, as torch's CUDA 99.0")
