"""A second Python environment, for servers that don't share the trainer's."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

WITHOUT = ("megatron", "megatron_core")


def make_second_environment(folder: Path) -> Path:
    """A virtual environment with this one's packages, but without Megatron-Core; its interpreter."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib"))
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for package in own.iterdir():
        if package.name.partition("-")[0] not in WITHOUT:
            (there / package.name).symlink_to(package)
    return folder / "bin" / "python"
