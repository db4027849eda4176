"""Recorded routing (R3) beside the JSON of an answer: small integers in a file on the server's host.

The answer holds a ``Notice`` in place of the recording. A client on the same host reads the file. Any other client
downloads the file by ``GET /routed_experts/ID``. The module has the notice, the server's files, the client's side, and
hooks for SGLang in servers that ``engine.launch_server`` starts. The hooks have not yet run on a GPU.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from megatron_dppo.engine.errors import AbortedError, EngineAnswerError
from megatron_dppo.engine.protocol import GenerationRequest
from megatron_dppo.engine.server import hooks
from megatron_dppo.system.scratch import SHARED_MEMORY, free_bytes, private_name

FIELD = "routed_experts"
ROUTE = f"/{FIELD}"
FOLDERS_VARIABLE = "MEGATRON_DPPO_RECORDINGS"
"""Variable of a server's processes: the JSON list of the folders for recordings."""
STORED_S = 900.0
"""Seconds after which the server deletes a recording that no client has fetched."""
_LONGEST_GAP_S = 60.0
"""A longer gap between two recordings adds only this many seconds to the age of the stored recordings. A paused server
records nothing, and its clients may read its answers only after the pause. Until then it must keep the recordings."""
Way = Literal["shared memory", "binary HTTP answers"]
"""How a client receives recordings."""

ABORTING = "sglang.srt.managers.scheduler.Scheduler.abort_request"
_MOST_GIVEN_UP = 4096
"""Number of aborted requests that the server remembers. It is larger than the number of a client's requests in flight.
"""
_MAGIC = b"megatron_dppo recording 1 "
Hexadecimal = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 bits."""
_COLLECTED = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)


@dataclass(frozen=True)
class Notice:
    """The notice of one recording [rows, layers, experts a token].

    Attributes:
        id: the file's name.
        folder: the file's folder on the server's host.
        hash: ``content_hash`` of the file's bytes.
    """

    id: Hexadecimal
    folder: str
    dtype: Literal["uint8", "uint16"]
    shape: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    hash: Hexadecimal

    @property
    def size(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def encode(self) -> bytes:
        return _MAGIC + json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Notice:
        """Parse a notice. Raises ValueError if ``content`` is no valid notice."""
        if not content.startswith(_MAGIC):
            raise ValueError(f"routed_experts holds no notice of a recording but {content[:200]!r}")
        try:
            return _NOTICE.validate_json(content[len(_MAGIC) :], strict=True)
        except ValidationError as error:
            raise ValueError(f"a broken notice of a recording: {error.errors()[0]}") from error

    def array(self, content: bytes | bytearray | np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return the recording in a file's ``content``. The recording must have the requested ``shape``.

        Raises ValueError for another shape, another size, or bytes with another hash.
        """
        if self.shape != tuple(shape):
            raise ValueError(f"a recording of shape {self.shape}, expected {tuple(shape)}")
        flat = np.frombuffer(content, np.uint8)
        if len(flat) != self.size:
            raise ValueError(f"{len(flat)} bytes of a recording, expected {self.size}")
        digest = content_hash(flat)
        if digest != self.hash:
            raise ValueError(f"a recording with the hash {digest}, expected {self.hash}")
        return flat.view(self.dtype).reshape(self.shape)


_NOTICE = TypeAdapter(Notice)


def content_hash(flat: np.ndarray) -> str:
    """Return XXH3 (128 bits) of an array's bytes, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(flat).data)


@contextmanager
def recordings_folders() -> Iterator[list[Path]]:
    """Create this process's folders for recordings, and name the folders in the environment; delete them at the end.

    One folder is in shared memory. The other folder is in the temporary folder, for recordings that do not fit into
    shared memory. Only the process's user can enter the folders. ``system.scratch.remove_left_behind`` finds the
    folders of a killed process by their names.
    """
    # In some containers, processes may not write to shared memory.
    bases = [base for base in (SHARED_MEMORY, tempfile.gettempdir()) if os.access(base, os.W_OK)]
    prefix = f"{private_name()}routing-"
    folders = [Path(tempfile.mkdtemp(prefix=prefix, dir=base)) for base in bases]
    os.environ[FOLDERS_VARIABLE] = json.dumps([str(folder) for folder in folders])
    try:
        yield folders
    finally:
        del os.environ[FOLDERS_VARIABLE]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def narrowed(routed: np.ndarray) -> np.ndarray:
    """Convert ``routed`` to uint8, or to uint16 if an id is above 255. Raises ValueError for ids outside of uint16."""
    low = 0
    high = 0
    if routed.size:
        low = int(routed.min())
        high = int(routed.max())
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise ValueError(f"SGLang recorded experts {low} to {high}, expected 0 to 65535")
    if high <= np.iinfo(np.uint8).max:
        return routed.astype(np.uint8)
    return routed.astype(np.uint16)


@dataclass(eq=False)
class RecordingStore:
    """Writes recordings to files, and deletes old recordings.

    A recording goes to the first of ``folders`` with enough ``free_bytes``, or else to the last folder. Recordings
    older than ``stored_s`` are deleted. ``_LONGEST_GAP_S`` limits how much a pause adds to their age.
    """

    folders: Sequence[Path]
    stored_s: float = STORED_S
    clock: Callable[[], float] = time.monotonic
    _written_s: dict[Path, float] = field(default_factory=dict, init=False)
    """When each file was written, in the seconds of ``_counted_s``."""
    _counted_s: float = field(default=0.0, init=False)
    """The sum of all gaps between recordings, each limited to _LONGEST_GAP_S."""
    _last_s: float = field(default=-math.inf, init=False)

    def put(self, routed: np.ndarray) -> Notice:
        """Write a recording to a file and return its notice. Raises OSError if no folder has room."""
        current_time = self.clock()
        self._counted_s += min(current_time - self._last_s, _LONGEST_GAP_S)
        self._last_s = current_time
        self._delete_old()
        array = narrowed(routed)
        path = self._folder_for(array.nbytes) / secrets.token_hex(16)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(array.data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._written_s[path] = self._counted_s
        rows, layers, top_k = array.shape
        shape = (rows, layers, top_k)
        dtype: Any = array.dtype.name
        return Notice(path.name, str(path.parent), dtype, shape, content_hash(array))

    def _folder_for(self, size: int) -> Path:
        for folder in self.folders[:-1]:
            if size <= free_bytes(folder):
                return folder
        return self.folders[-1]

    def _delete_old(self) -> None:
        limit = self._counted_s - self.stored_s
        old_paths = [path for path, time_s in self._written_s.items() if time_s < limit]
        for path in old_paths:
            del self._written_s[path]
            path.unlink(missing_ok=True)


def insert_from_memory(answer: dict[str, Any], request: GenerationRequest) -> Way | Notice | None:
    """Read the recording, if it is in this host's memory, and put it into the answer's ``meta_info`` as an array.

    Returns "shared memory" if the recording was read from shared memory, the notice if the recording must be
    downloaded, and None if the request asked for no recording. Raises AbortedError if the file no longer exists, and
    EngineAnswerError if the recording is damaged or has another shape.
    """
    text = answer.get("meta_info", {}).get(FIELD)
    if FIELD not in request.columns or not isinstance(text, str):
        return None
    try:
        notice = Notice.decode(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error
    expected_shape = _expected_shape(answer, request)
    if notice.shape != expected_shape:
        raise EngineAnswerError(
            f"request {request.key}: a recording of shape {notice.shape}, expected {expected_shape}"
        )
    content = _from_memory(notice, request)
    if content is None:
        return notice
    insert(answer, request, notice, content)
    (Path(notice.folder) / notice.id).unlink(missing_ok=True)
    return "shared memory"


def insert(
    answer: dict[str, Any], request: GenerationRequest, notice: Notice, content: bytes | np.ndarray
) -> None:
    """Put the recording in ``content`` into the answer. Raises EngineAnswerError if ``content`` does not fit
    ``notice``."""
    try:
        answer["meta_info"][FIELD] = notice.array(content, _expected_shape(answer, request))
    except ValueError as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


def _expected_shape(answer: dict[str, Any], request: GenerationRequest) -> tuple[int, int, int]:
    """Return the shape that the recording of an answer must have: rows, layers, experts a token."""
    shape = request.columns[FIELD]
    # The last token has no row, because it is never an input.
    rows = len(request.prompt_ids) + len(answer.get("output_ids", ())) - 1
    return rows - shape.start, shape.hidden_layers, shape.top_k


def _from_memory(notice: Notice, request: GenerationRequest) -> np.ndarray | None:
    """Return the bytes of the recording's file; None if the server's folder is not in this host's memory."""
    folder = Path(notice.folder)
    if not is_private(folder):
        return None
    try:
        descriptor = os.open(folder / notice.id, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        # If the folder is missing too, the server has ended. The download will report this.
        if folder.is_dir():
            raise gone_error(notice, f"request {request.key}") from error
        return None
    with open(descriptor, "rb") as file:
        # Read one byte more, so that a longer file is noticed.
        return np.fromfile(file, np.uint8, notice.size + 1)


def is_private(folder: Path) -> bool:
    """Whether ``folder`` has the name of a server's folder in this host's memory, and belongs to this user.

    The client reads no other folder, so that a server cannot make it read any other file.
    """
    has_name = folder.parent == SHARED_MEMORY and folder.name.startswith(f"mdppo-{os.getuid()}-")
    try:
        return has_name and not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def gone_error(notice: Notice, request_name: str) -> AbortedError:
    """Return the error for a recording that no longer exists; the caller repeats the request."""
    return AbortedError(f"{request_name}: the recorded routing {notice.id} is no longer there")


def register() -> None:
    """Register the hooks, in each process of a server, before SGLang applies its plugins' hooks."""
    folders = [Path(folder) for folder in json.loads(os.environ[FOLDERS_VARIABLE])]
    outlet = Outlet(RecordingStore(folders))
    hooks.register(_COLLECTED, outlet, "after")
    hooks.register(ABORTING, outlet.give_up, "before")


class Outlet:
    """Hook after SGLang has collected a request's recording: puts the recording into ``store``, and the notice into the
    answer."""

    def __init__(self, store: RecordingStore) -> None:
        self._store = store
        # The list drops its oldest request if it is full. If a dropped request finishes later, its recording is stored
        # although no client reads it, and deleted after ``stored_s``.
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)

    def give_up(self, scheduler: Any, aborted: Any) -> None:
        """Hook before an abort: note the requests whose recordings no client will read.

        No client reads the answer of a request that is aborted by its id or by a lost connection. If a weight update
        aborts all requests, clients read the answers.
        """
        if not aborted.abort_all:
            self._given_up.append(aborted.rid)

    def __call__(self, result: Any, processor: Any, request: Any) -> None:
        import torch
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.runtime_context import get_parallel

        recorded = request.routed_experts
        reason = request.finished_reason
        is_aborted = isinstance(reason, FINISH_ABORT)
        # The recording of a response that a weight update aborted is needed: the client continues the response. After a
        # server error the client samples the response again.
        is_server_error = is_aborted and reason.status_code is not None
        # Compare prefixes: SGLang aborts every request whose id begins with the given id.
        if is_aborted and any(request.rid.startswith(rid) for rid in self._given_up):
            request.routed_experts = None
            return
        # Store a recording once: only the first rank answers the client.
        if recorded is None or is_server_error or get_parallel().attn_tp_rank != 0:
            return
        try:
            content = self._store.put(recorded.numpy()).encode()
        except (OSError, ValueError) as error:
            # An exception would end the scheduler with all requests. The client rejects this answer instead.
            content = str(error).encode()
        request.routed_experts = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def offer(folders: Sequence[Path]) -> None:
    """Add routes to this process's HTTP server that send and delete the files in ``folders``, under the API key."""
    from fastapi.responses import FileResponse, Response
    from sglang.srt.entrypoints.http_server import app

    def path_of(recording: str) -> Path | None:
        # An id with a slash or a dot could lead out of the folder.
        if not recording.isalnum():
            return None
        for folder in folders:
            path = folder / recording
            if path.is_file():
                return path
        return None

    async def fetch(recording: str) -> Response:
        path = path_of(recording)
        if path is None:
            return Response(status_code=404)
        return FileResponse(path, media_type="application/octet-stream")

    async def remove(recording: str) -> Response:
        path = path_of(recording)
        if path is not None:
            path.unlink(missing_ok=True)
        return Response(status_code=204)

    route = ROUTE + "/{recording}"
    app.add_api_route(route, fetch, methods=["GET"], response_class=Response)
    app.add_api_route(route, remove, methods=["DELETE"], response_class=Response)
