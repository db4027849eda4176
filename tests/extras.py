"""Packages that the project's environment does not have, for the tests of what works with them: pinned in
``tools/environment/<name>.txt``, installed once into a folder of the user's cache, put on the path of child processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dppo"


def extra_packages(name: str) -> Path:
    """The folder with the pins of ``tools/environment/<name>.txt``, and nothing that they depend on."""
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
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--target", str(part), "-r", str(pins)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, f"{pins} can't be installed: {done.stderr}"
        part.rename(folder)
    return folder


def environment_with(name: str, **variables: str) -> dict[str, str]:
    """This process's variables, with these packages and the project on Python's path."""
    path = os.pathsep.join([str(ROOT), str(extra_packages(name))])
    return {**os.environ, "PYTHONPATH": path, **variables}
