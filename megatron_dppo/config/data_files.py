"""The files that a data path stands for.

``data.train``, an evaluation set and the command lines of tools have data paths. A path is a file, a folder with data
files, or a glob. Every reader and every check expands it here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.system.text import first_of

_TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".tsv")
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings after a text file's ending: the file is compressed."""
_COMPRESSED_TEXT_ENDINGS = tuple(
    ending + compression for ending in _TEXT_ENDINGS for compression in COMPRESSED_ENDINGS
)
DATA_ENDINGS = (*_TEXT_ENDINGS, *_COMPRESSED_TEXT_ENDINGS, ".parquet", ".arrow")
"""In a folder, only files with these endings (in upper or lower case) are read. A path to one file may have any
ending.
"""
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Names of files that Hugging Face's ``datasets`` writes beside its data. They describe the data and hold none."""
_MAX_LISTED = 5
"""Largest number of file names in a message."""


@dataclass(frozen=True)
class DataFiles:
    """The files that a data path names.

    Attributes:
        path: the path as it was given.
        files: sorted by name. A path that is no folder and no glob is itself the only file, even if it does not exist.
        unread: names of a folder's entries that are no data files, without hidden entries.
    """

    path: str
    files: tuple[Path, ...]
    unread: tuple[str, ...] = ()

    @property
    def is_several(self) -> bool:
        """Whether the path is a folder or a glob. Any other path is its own only file."""
        return self.files != (Path(self.path),)

    @property
    def warning(self) -> str | None:
        """Return a sentence about the folder's entries that are not read; None if all entries are read."""
        if not self.unread:
            return None
        return (
            f"{self.path}: these entries are no data files and are not read: {_listed(self.unread)}"
        )

    @property
    def fault(self) -> str | None:
        """Return what was expected in place of the path, for the message "got PATH, expected ...". None if all files
        exist.
        """
        if not self.files:
            text_endings = ", ".join(_TEXT_ENDINGS)
            endings = (
                f"{text_endings}, these with {', '.join(COMPRESSED_ENDINGS)}, .parquet, .arrow"
            )
            if not os.path.isdir(self.path):
                return f"a file that matches this pattern, relative to {Path.cwd()}"
            found_names = "no file"
            if self.unread:
                found_names = _listed(self.unread)
            return f"data files in this folder ({endings}), found {found_names}"
        missing_files = [file for file in self.files if not os.path.isfile(file)]
        if not missing_files:
            return None
        if self.is_several:
            return f"only files, but {missing_files[0]} is no file"
        return f"a JSONL or Parquet file, relative to {Path.cwd()}"


def data_files(path: str | Path) -> DataFiles:
    """Expand a data path into its files without opening them.

    A folder stands for the data files that are directly in it, not in its subfolders. A glob (``*``, ``?``, ``[...]``;
    ``**`` for folders at any depth) stands for every file that it matches. Hidden files are left out.
    """
    name = str(path)
    if os.path.isdir(name):
        return _files_of_folder(name)
    if os.path.isfile(name) or not glob.has_magic(name):
        return DataFiles(name, (Path(name),))
    matches = sorted(set(glob.glob(name, recursive=True)))
    return DataFiles(name, tuple(Path(match) for match in matches if not os.path.isdir(match)))


def label_of(path: str) -> str:
    """Return the text that names a data path's metrics.

    For a file or a folder, the text is the path itself. A glob is cut into its folders and its file name, and each of
    these parts loses its ending and its wildcards. The text is the last part that has characters left. For example,
    ``train-*.jsonl`` becomes ``train``, and ``math/*.jsonl`` becomes ``math``.
    """
    if os.path.exists(path) or not glob.has_magic(path):
        return path
    for part in reversed(Path(path).parts):
        stem = part
        for ending in COMPRESSED_ENDINGS:
            stem = stem.removesuffix(ending)
        stem = stem.rpartition(".")[0] or stem
        label = "".join(c for c in stem if c not in "*?[]!").strip("-_. ")
        if label:
            return label
    return "data"


def repeated_files(paths: Sequence[str]) -> Iterator[str]:
    """Yield each file that belongs to two different paths, of which at least one is a folder or a glob."""
    first_path_of: dict[Path, DataFiles] = {}
    for path in paths:
        data_path = data_files(path)
        for file in data_path.files:
            first_path = first_path_of.setdefault(file, data_path)
            if first_path.path != path and (first_path.is_several or data_path.is_several):
                yield str(file)


def _files_of_folder(folder: str) -> DataFiles:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    names = [name for name in names if not name.startswith(".")]
    data_names = [name for name in names if _is_data_file(folder, name)]
    unread = tuple(name for name in names if name not in data_names)
    return DataFiles(folder, tuple(Path(folder, name) for name in data_names), unread)


def _is_data_file(folder: str, name: str) -> bool:
    # A broken link counts as a data file, so that a check or the reader reports it.
    if name in DESCRIPTIONS or os.path.isdir(os.path.join(folder, name)):
        return False
    return name.lower().endswith(DATA_ENDINGS)


def _listed(names: Sequence[str]) -> str:
    return first_of(names, _MAX_LISTED, ", ")
