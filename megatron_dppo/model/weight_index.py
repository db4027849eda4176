"""The index of a Hugging Face folder: the file that has each tensor."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.json_file import read_json

INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255
"""Bytes of the longest file name that file systems accept."""


def read_weight_index(path: Path) -> dict[str, str]:
    """Return tensor name -> name of its file. Raises CheckpointError if ``path`` is no valid index.

    All files are in the folder of the index, so a name with a folder is invalid.
    """
    content = read_json(path, _FORM)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} is damaged, expected {_FORM}")
    for tensor, name in weight_map.items():
        if not _is_file_name(name):
            raise CheckpointError(
                f"{path} is damaged: {tensor!r} is in {str(name)[:80]!r}, expected the name of a file in the same "
                "folder"
            )
    return weight_map


_FORM = '{"weight_map": {tensor name: file name}}'


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="replace")) <= _LONGEST_NAME
