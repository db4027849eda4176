"""Packages that the project's environment does not have, for tests that need them.

``tools/environment/<name>.txt`` pins the packages. They are installed once, into a folder of the user's cache. Child
processes have this folder on their path, or run in a separate environment with only these packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import run_patiently
from tests.ranks import ROOT

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dppo"


LACKS_REASONING_GYM = importlib.util.find_spec("reasoning_gym") is None and not os.environ.get("CI")
"""Whether tests of reasoning-gym, and of GEM, which imports it, are skipped. If ``CI`` is set, they fail instead."""
NEEDS_REASONING_GYM = pytest.mark.skipif(
    LACKS_REASONING_GYM, reason="reasoning-gym is not installed: make setup said why"
)


def extra_packages(name: str) -> Path:
    """The folder with the pins of ``tools/environment/<name>.txt``, and nothing that they depend on."""
    return _install_once(name, lambda folder: ["install", "--target", str(folder)])


def python_of(name: str) -> Path:
    """The Python of a separate environment with only the pins of ``tools/environment/<name>.txt``.

    Use this environment for packages that clash with the project's packages.
    """

    def words(folder: Path) -> list[str]:
        venv.create(folder, symlinks=True)
        return ["--python", str(folder / "bin" / "python"), "install"]

    return _install_once(name, words) / "bin" / "python"


def _install_once(name: str, words: Callable[[Path], list[str]]) -> Path:
    """Return the folder with the pins of this name. ``words``: pip's arguments to install into a given folder."""
    pins = ROOT / "tools" / "environment" / f"{name}.txt"
    made_from = pins.read_bytes() + sys.version.encode()
    folder = _CACHE / f"{name}-{hashlib.sha256(made_from).hexdigest()[:12]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with open(_CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        for old in _CACHE.glob(f"{name}-*"):
            shutil.rmtree(old)
        part = _CACHE / f"{name}-part"
        command = [sys.executable, "-m", "pip", *words(part), "--quiet", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "-r", str(pins)]
        done = run_patiently(command, 900)
        assert done.returncode == 0, f"{pins} can't be installed: {done.stderr}"
        part.rename(folder)
    return folder


def environment_with(name: str, **variables: str) -> dict[str, str]:
    """This process's variables, with these packages and the project on Python's path."""
    path = os.pathsep.join([str(ROOT), str(extra_packages(name))])
    return {**os.environ, "PYTHONPATH": path, **variables}
