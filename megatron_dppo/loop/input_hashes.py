"""SHA-256 of the files that a run starts from: those of ``run.sha256_list``, which must be known ones, and those of
its start model, which a resumed run compares with what they were when it began.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.errors import RunError
from megatron_dppo.trainer.collectives import all_gather_json, on_every_rank, on_rank_0

if TYPE_CHECKING:
    from megatron_dppo.trainer.topology import Topology

log = logging.getLogger(__name__)

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_THREADS = 8
_TOLD_FROM_S = 2.0


_READ = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Of a Hugging Face folder: what somebody reads. Other formats of the weights and texts for people are left out."""
WEIGHTS = ".safetensors"


class InputError(RunError, ValueError):
    """Inputs are not those that the list names, or the list can't be read. One line for each."""


def check_input_hashes(path: str | Path) -> None:
    """Compare every file of the list at ``path`` with its hash; names are relative to the list's folder.

    Raises InputError with every file that is missing or has other bytes.
    """
    path = Path(path)
    expected = dict(_listed(path))
    with (
        ThreadPoolExecutor(_THREADS, "sha256") as pool,
        progress("check inputs", len(expected)) as bar,
    ):
        problems = []
        for problem in pool.map(_problem, expected.keys(), expected.values()):
            problems += [problem] if problem else []
            bar.advance(1)
    if problems:
        raise InputError("\n".join(problems))


def _listed(path: Path) -> Iterator[tuple[Path, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"{path}, line {number}: expected a line of sha256sum, <hash>  <file>")
        yield path.parent / match[2], match[1].lower()
    if not lines:
        raise InputError(f"{path}: expected lines of sha256sum, <hash>  <file>")


def model_files(config: TrainConfig) -> dict[str, Path]:
    """The files of the start model, and of the adapters to start from, under names with their key in front."""
    folders = {"model.hf_checkpoint": config.model.hf_checkpoint}
    if config.lora.start_from is not None:
        folders["lora.start_from"] = config.lora.start_from
    return {
        f"{key}/{path.name}": path
        for key, folder in folders.items()
        for path in sorted(Path(folder).iterdir())
        if path.suffix in _READ and not path.name.startswith(".") and path.is_file()
    }


def side_files(config: TrainConfig) -> dict[str, Path]:
    """Those of ``model_files`` that hold no weights: read in milliseconds."""
    return {n: path for n, path in model_files(config).items() if path.suffix != WEIGHTS}


def sha256_of(file: Path) -> str:
    """SHA-256 (hex) of a file's bytes. Raises OSError."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class BackgroundHashes:
    """SHA-256 of files that all ranks see, each rank's share of them in a thread of its own. Collective.

    A core takes 1.3 to 1.8 GB/s where it has the instructions for it; the largest file bounds the time.
    """

    def __init__(self, files: Mapping[str, Path], topology: Topology) -> None:
        sizes = on_rank_0(
            lambda: {name: path.stat().st_size for name, path in files.items()}, error=InputError
        )
        self._bytes = sum(sizes.values())
        shares = _shares(sizes, topology.world_size)
        pool = ThreadPoolExecutor(1, "hash")
        own = shares[topology.rank]
        self._own = pool.submit(lambda: {name: sha256_of(files[name]) for name in own})
        pool.shutdown(wait=False)

    def wait(self) -> dict[str, str]:
        """The hashes of all files, by name, the same on every rank. Collective. Raises InputError on all."""
        began = time.monotonic()
        shares = all_gather_json(on_every_rank(self._own.result, error=InputError))
        if (waited := time.monotonic() - began) > _TOLD_FROM_S:
            log.info("start model: %.1f GB hashed, waited %.0f s", self._bytes / 1e9, waited)
        return {name: digest for share in shares for name, digest in share.items()}


def _shares(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Names by rank: the largest file first, each to the rank with the least."""
    loads, shares = [0] * ranks, [list[str]() for _ in range(ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


def _problem(file: Path, expected: str) -> str:
    try:
        found = sha256_of(file)
    except OSError as error:
        return f"{file}: {error.strerror}"
    if found == expected:
        return ""
    return f"{file}: its SHA-256 is {found[:12]}..., expected {expected[:12]}..."
