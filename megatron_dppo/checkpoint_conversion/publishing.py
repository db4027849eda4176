"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.files import sync_folder, sync_to_disk

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's: names the checkpoint in a folder of several; ours is `release`."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
SLACK_BYTES = 16 << 20
"""Room for headers, indices and side files."""


class StagedFolder:
    """``with StagedFolder(out, bytes) as folder:`` fill ``folder``; it becomes ``out`` when no error was raised.

    The staging folder ``.<name>.partial`` lies beside ``out``, on the same disk. What a killed run left there is
    removed; a live run holds a lock on it. Raises CheckpointError where ``out`` exists and is not an empty folder, the
    disk has not ``expected_bytes`` free, or another process is writing to the same place.
    """

    def __init__(self, out: str | Path, expected_bytes: int) -> None:
        self.out = Path(out).absolute()
        self.folder = self.out.parent / f".{self.out.name}.partial"
        self._expected = expected_bytes
        self._lock = -1

    def __enter__(self) -> Path:
        self._require_empty()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        return self.folder

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.out}: another process is writing it now") from None
        if not self.folder.exists() or not os.path.samestat(
            os.fstat(self._lock), self.folder.stat()
        ):
            raise CheckpointError(f"{self.out}: another process has just written it")
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        free = shutil.disk_usage(self.folder).free
        if free < self._expected + SLACK_BYTES:
            self.folder.rmdir()
            raise CheckpointError(
                f"{self.out}: needs {self._expected} bytes, its disk has {free} bytes free"
            )

    def _require_empty(self) -> None:
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CheckpointError(f"{self.out}: exists and is not an empty folder")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _publish(self) -> None:
        sync_folder(self.folder)
        self._require_empty()
        os.rename(self.folder, self.out)
        sync_to_disk(self.out.parent)


def side_files(folder: str | Path) -> list[Path]:
    """What lies beside a folder's weights: config, tokenizer, generation files; no weights, no index of them."""
    return [
        path
        for path in sorted(Path(folder).iterdir())
        if path.is_file()
        and path.suffix not in WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and not path.name.startswith(".")
        and path.name != "conversion.json"
    ]


def copy_side_files(source: str | Path, target: Path, dtype: str) -> None:
    """Copy ``side_files`` but for the tracker, which only the writer of a checkpoint knows.

    config.json is copied byte for byte, unless the weights beside it are now of another ``dtype`` than it names.
    """
    for path in (p for p in side_files(source) if p.name != TRACKER):
        shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text())
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    if any(str(config.get(key)).removeprefix("torch.") != dtype for key in named):
        config.update(dict.fromkeys(named, dtype))
        config_path.write_text(json.dumps(config, indent=2) + "\n")
