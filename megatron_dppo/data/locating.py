"""The files and rows that ``--from`` stands for: a file, a folder, or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.data.json_lines import DataError
from megatron_dppo.data.published import PublishedSet, Schema, columns_read, schema_of
from megatron_dppo.data.records import columns_of, stream_records

_FORMATS = (".parquet", ".jsonl", ".json", ".arrow")
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|dev)(?=[/_.-]|$)", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Part:
    """Rows with one schema, and where they are from. ``name``: of the file, or on the hub."""

    name: str
    schema: Schema
    records: Iterator[dict[str, Any]]


def parts_of(published: PublishedSet, source: str, split: str | None) -> list[Part]:
    """What ``source`` holds of the set, file by file.

    Args:
        published: the set.
        source: path of a file or a folder, or a name on the hub.
        split: that is read instead of the set's own.

    Raises:
        DataError: nothing is there, or no file has a known schema.
    """
    path = Path(source)
    if path.exists():
        files = [path] if path.is_file() else _files_in(path, published, split or published.split)
        return [_part(published, file) for file in files]
    if _HUB_NAME.fullmatch(source):
        return _from_hub(published, source, split or published.split)
    raise DataError(f"{source}: no such file or folder. {_how_to_get(published)}")


def _part(published: PublishedSet, file: Path) -> Part:
    columns = columns_of(file)
    schema = schema_of(published, columns, file)
    return Part(str(file), schema, stream_records(file, columns_read(schema, columns)))


def _files_in(folder: Path, published: PublishedSet, split: str | None) -> list[Path]:
    """The folder's data files, of one configuration and one split where paths name several."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _FORMATS and path.name not in _NO_DATA and path.is_file()
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    chosen = [p for p in found if set(p.relative_to(folder).parts) & set(published.configs)]
    found = chosen or found
    if split is not None and any(_split_of(path, folder) for path in found):
        found = [path for path in found if _split_of(path, folder) in (None, split)]
    if not found:
        wanted = f" of the split {split}" if split else ""
        raise DataError(
            f"{folder}: no {', '.join(_FORMATS)} file{wanted} in it. {_how_to_get(published)}"
        )
    return found


def _split_of(path: Path, folder: Path) -> str | None:
    named = _SPLIT.findall(str(path.relative_to(folder)))
    return named[0].lower() if named else None


def _how_to_get(published: PublishedSet) -> str:
    return (
        f"Wanted is {published.file} of https://huggingface.co/datasets/{published.hub}: download "
        "it where there is a network, and give its path or its folder's"
    )


def _from_hub(published: PublishedSet, name: str, split: str | None) -> list[Part]:
    """A repository of the hub, through ``datasets``, which keeps what it has downloaded."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: no such file or folder, and the hub is read through datasets, which is not "
            f"installed (pip install datasets). {_how_to_get(published)}"
        ) from error
    parts = []
    try:
        offered = datasets.get_dataset_config_names(name)
        for config in [c for c in published.configs if c in offered] or offered:
            loaded = datasets.load_dataset(name, config)
            for key, rows in loaded.items():
                if split in (None, key) or len(loaded) == 1:
                    where = f"{name} ({config}, {key})"
                    schema = schema_of(published, rows.column_names, where)
                    kept = rows.select_columns(columns_read(schema, rows.column_names))
                    parts.append(Part(where, schema, iter(kept)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name}: can't be read from the hub: {type(error).__name__}: {reason}. "
            f"{_how_to_get(published)}"
        ) from error
    if not parts:
        raise DataError(f"{name}: has no split {split}. {_how_to_get(published)}")
    return parts
