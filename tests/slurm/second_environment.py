"""A second Python environment, for servers that don't share the trainer's."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

WITHOUT = ("megatron", "megatron_core")


def make_second_environment(folder: Path) -> Path:
    """Make a virtual environment with this one's packages except Megatron-Core, and return its interpreter."""
    venv.create(folder, symlinks=True)
    source = Path(sysconfig.get_path("purelib"))
    target = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in source.iterdir():
        if package.name.partition("-")[0] not in WITHOUT:
            (target / package.name).symlink_to(package)
    return folder / "bin" / "python"
