"""Checkpoint folders of a run: complete folders, leftovers of crashes, publishing and deletion.

    checkpoints/step_000020/               complete: its manifest names every file with its size
    checkpoints/step_000040.partial-7/     being written, or left by a crash
    checkpoints/step_000040.replaced-7/    a folder that is being deleted
    checkpoints/step_000040.damaged-1/     a damaged checkpoint that a start skipped; it is never deleted
    checkpoints/step_000040.suspect/       complete, but saved when a numerical fault ended the run. No
                                           start loads it, ``megatron-dppo doctor`` reads it, and the next suspect
                                           folder replaces it

A checkpoint is written into a partial folder (manifest last), synced to the disk and then renamed. So a folder with a
name like ``step_000020`` is complete. The functions of this module are not collective: only global
rank 0 calls them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_dppo.metrics.records import step_name
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.json_file import read_json
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import sha256_of, sync_to_disk, write_synced

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_COMPLETE_NAME = re.compile(r"step_(\d+)")
_SUSPECT_SUFFIX = ".suspect"
_LEFTOVER_NAME = re.compile(r"step_\d+\.(?:partial|replaced)-(\d+)")
"""The name of a folder that is written or deleted, or that a crash left; its group is the serial of a save."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint folder. ``serial`` numbers the saves of a directory, from 1."""

    path: Path
    step: int
    serial: int


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are missing or differ from its manifest, or their format is unknown."""


@dataclass(frozen=True)
class UnusableCheckpoint:
    """A folder with the name of a complete checkpoint that cannot be loaded. ``reason`` names the faulty file."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointSurvey:
    """The contents of a directory: complete checkpoints, in the order of writing, and unusable checkpoints."""

    complete: tuple[StoredCheckpoint, ...]
    unusable: tuple[UnusableCheckpoint, ...]


class CheckpointDirectory:
    """The checkpoint folders of one run. Only the ``keep`` checkpoints that were written last are kept.

    The folders are ordered by ``serial`` instead of step. So a run that restarted from an earlier step in the same
    directory resumes from its own checkpoints, although the directory may have older checkpoints of later steps.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.directory = Path(directory).absolute()
        self.keep = keep

    def complete(self) -> list[StoredCheckpoint]:
        """List the complete checkpoints, in the order of writing.

        A published folder whose manifest or files are missing or altered is logged and skipped.
        """
        survey = self.survey()
        for folder in survey.unusable:
            log.warning("not a usable checkpoint, ignored: %s", folder.reason)
        return list(survey.complete)

    def survey(self) -> CheckpointSurvey:
        """List complete and unusable checkpoints. Only manifests and file sizes are read, not the files' content."""
        complete: list[StoredCheckpoint] = []
        unusable: list[UnusableCheckpoint] = []
        for path in self._folders():
            if match := _COMPLETE_NAME.fullmatch(path.name):
                step = int(match[1])
                try:
                    manifest = read_manifest(path)
                    check_sizes(path, manifest)
                except (CheckpointError, OSError) as error:
                    unusable.append(UnusableCheckpoint(path, step, str(error)))
                else:
                    complete.append(StoredCheckpoint(path, step, manifest["serial"]))
        complete.sort(key=attrgetter("serial"))
        return CheckpointSurvey(tuple(complete), tuple(unusable))

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that nothing loads or deletes it, and return its new path."""
        for number in itertools.count(1):
            target = path.with_name(f"{path.name}.damaged-{number}")
            if not target.exists():
                break
        return path.rename(target)

    def begin(self, step: int) -> StoredCheckpoint:
        """Remove the leftovers of crashed saves, then create and return a new partial folder for ``step``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        serial = 1 + max([stored.serial for stored in self.complete()], default=0)
        for path in self._folders():
            if match := _LEFTOVER_NAME.fullmatch(path.name):
                # A leftover may have a larger serial than every complete checkpoint.
                serial = max(serial, int(match[1]) + 1)
                log.warning("removing what an interrupted save left: %s", path)
                shutil.rmtree(path)
        folder = self.directory / f"{step_name(step)}.partial-{serial}"
        folder.mkdir()
        failpoint("checkpoint/begun")
        return StoredCheckpoint(folder, step, serial)

    def publish(
        self, partial: StoredCheckpoint, manifest: dict[str, Any], *, suspect: bool = False
    ) -> Path:
        """Write the manifest and rename the folder to its final name.

        Args:
            partial: the folder that :meth:`begin` returned.
            manifest: its ``files`` must name every file, and all of them must already be synced to the disk.
            suspect: publish under a name that :meth:`survey` ignores, and delete the older suspect folders.

        Returns:
            The final path.
        """
        write_manifest(partial.path, {**manifest, "step": partial.step, "serial": partial.serial})
        # Sync the manifest's directory entry before the rename: a power cut must not leave a published folder
        # without a manifest.
        sync_to_disk(partial.path)
        if suspect:
            target = suspect_folder(self.directory, partial.step)
            for path in suspect_folders(self.directory):
                shutil.rmtree(path)
        else:
            target = self.directory / step_name(partial.step)
        replaced = self.directory / f"{step_name(partial.step)}.replaced-{partial.serial}"
        if target.exists():
            # A rename cannot replace a folder that is not empty, so two renames are needed. A crash between them
            # leaves no checkpoint of this step, but all other checkpoints remain.
            os.rename(target, replaced)
            failpoint("checkpoint/replaced")
        failpoint("checkpoint/publish")
        os.rename(partial.path, target)
        failpoint("checkpoint/published")
        sync_to_disk(self.directory)
        return target

    def prune(self) -> None:
        """Delete all checkpoints except the ``keep`` that were written last, and the leftovers of crashes.

        Each folder is renamed first, so that a partly deleted folder is never read as a checkpoint.
        """
        for stored in self.complete()[: -self.keep]:
            failpoint("checkpoint/prune")
            os.rename(stored.path, self.directory / f"{stored.path.name}.replaced-{stored.serial}")
            failpoint("checkpoint/pruned")
        for path in self._folders():
            if _LEFTOVER_NAME.fullmatch(path.name):
                shutil.rmtree(path)

    def discard(self, partial: StoredCheckpoint) -> None:
        """Remove the partial folder of a save that failed."""
        failpoint("checkpoint/discard")
        shutil.rmtree(partial.path, ignore_errors=True)

    def _folders(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if path.is_dir())


def suspect_folder(directory: Path, step: int) -> Path:
    """Return the folder for the checkpoint of ``step`` that is saved when a numerical fault ends the run."""
    return directory / f"{step_name(step)}{_SUSPECT_SUFFIX}"


def suspect_folders(directory: Path) -> list[Path]:
    """List the checkpoints that were saved when a numerical fault ended a run, sorted by step."""
    folders = directory.glob(f"step_*{_SUSPECT_SUFFIX}")
    return sorted(folders, key=lambda folder: int(folder.stem.removeprefix("step_")))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write ``content`` with the format version and a checksum of both."""
    # Encode and decode first, so that the checksum covers the values that a reader decodes.
    content = json.loads(json.dumps({"format": FORMAT, **content}))
    text = json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True)
    write_synced(folder / MANIFEST, text + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a published folder. Raise DamagedCheckpointError if it is missing or altered."""
    path = folder / MANIFEST
    content = read_json(path, "the manifest of a finished save", DamagedCheckpointError)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given_format = content
        if isinstance(content, dict):
            given_format = content.get("format")
        raise DamagedCheckpointError(
            f"{path}: format is {given_format!r}, this version reads {FORMAT}"
        )
    if content.pop("sha256", None) != _digest(content):
        raise DamagedCheckpointError(
            f"{path}: altered: its content does not match its own checksum"
        )
    return content


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise DamagedCheckpointError for the first file that is missing or has another size than recorded."""
    for name, record in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path}: missing")
        if (size := path.stat().st_size) != record["bytes"]:
            raise DamagedCheckpointError(f"{path}: has {size} bytes, expected {record['bytes']}")


def check_content(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise DamagedCheckpointError for the first of ``files`` whose SHA-256 is not the recorded one."""
    for name, record in files.items():
        if sha256_of(folder / name) != record["sha256"]:
            raise DamagedCheckpointError(
                f"{folder / name}: altered: its content does not match the manifest's checksum"
            )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
