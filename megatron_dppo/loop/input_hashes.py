"""The hashes of the input files: compared with the list ``run.sha256_list``, or computed in the background."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.data.balancing import partition_by_cost
from megatron_dppo.metrics.progress import progress
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import sha256_of
from megatron_dppo.trainer.collectives import all_gather_json, on_every_rank, on_rank_0

if TYPE_CHECKING:
    from megatron_dppo.trainer.topology import Topology

log = logging.getLogger(__name__)


_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
"""A line of ``sha256sum``: hash, then ' ' for text or '*' for binary mode, then the file's path."""
_THREADS = 8
_LONG_WAIT_S = 2.0
"""A longer wait for the hashes is logged."""


class InputError(RunError, ValueError):
    """Input files differ from the list of hashes, or the list cannot be read. The message has a line for each file."""


def check_input_hashes(path: str | Path) -> None:
    """Compare every file of the list at ``path`` with its hash. The files' paths are relative to the list's folder.

    Raises InputError with every file that is missing or has other bytes.
    """
    path = Path(path)
    files, hashes = zip(*_listed(path), strict=True)
    with (
        ThreadPoolExecutor(_THREADS, "sha256") as pool,
        progress("check inputs", len(files)) as bar,
    ):
        faults: list[str] = []
        for fault in pool.map(_fault, files, hashes):
            if fault is not None:
                faults.append(fault)
            bar.advance(1)
    if faults:
        raise InputError("\n".join(faults))


def _listed(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and hash of each file in the list at ``path``. Raises InputError for a line of another form."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    if not text:
        raise InputError(f"{path}: expected lines of sha256sum, <hash>  <file>")
    # Only a line feed ends a line: a file's name may have other characters that end lines.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            raise InputError(f"{path}, line {number}: expected a line of sha256sum, <hash>  <file>")
        yield path.parent / match[2], match[1].lower()


class BackgroundHashes:
    """SHA-256 of files that all ranks can read. Each rank hashes a share of them in a thread. Collective.

    A core with SHA instructions hashes 1.3 to 1.8 GB/s. A file is never split, so all hashes take at least the time of
    the largest file.
    """

    def __init__(self, files: Mapping[str, Path], topology: Topology) -> None:
        self.files = files
        sizes = on_rank_0(partial(_sizes_of, files), error=InputError)
        self._bytes = sum(sizes.values())
        names = list(sizes)
        shares = partition_by_cost(list(sizes.values()), topology.world_size)
        own_files = {names[i]: files[names[i]] for i in shares[topology.rank]}
        pool = ThreadPoolExecutor(1, "hash")
        self._own = pool.submit(_hashes_of, own_files)
        # The submitted job still runs; the thread ends after it.
        pool.shutdown(wait=False)

    def wait(self) -> dict[str, str]:
        """Return the hashes of all files, by name, the same on every rank. Collective.

        Raises InputError, on every rank, if a file cannot be read.
        """
        start_time = time.monotonic()
        shares = all_gather_json(on_every_rank(self._own.result, error=InputError))
        waited_s = time.monotonic() - start_time
        if waited_s > _LONG_WAIT_S:
            log.info("start model: %.1f GB hashed, waited %.0f s", self._bytes / 1e9, waited_s)
        hashes: dict[str, str] = {}
        for share in shares:
            hashes |= share
        return hashes


def _sizes_of(files: Mapping[str, Path]) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in files.items()}


def _hashes_of(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: sha256_of(path) for name, path in files.items()}


def _fault(file: Path, expected_hash: str) -> str | None:
    """Return an error if ``file`` does not have the expected hash; None if it has this hash."""
    try:
        digest = sha256_of(file)
    except (OSError, ValueError) as error:
        # Python raises ValueError for a path with a NUL byte.
        return f"{file}: {getattr(error, 'strerror', error)}"
    if digest == expected_hash:
        return None
    return f"{file}: its SHA-256 is {digest[:12]}..., expected {expected_hash[:12]}..."
