"""The client's side: recordings that an answer only gives notice of, from this host's memory or by HTTP."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_dppo.engine.errors import (
    AbortedError,
    EngineAnswerError,
    EngineLostError,
    EngineRequestError,
)
from megatron_dppo.engine.http_client import HttpClient
from megatron_dppo.engine.recordings.notice import MAGIC, Notice
from megatron_dppo.engine.requests import GenerationRequest
from megatron_dppo.system.scratch import SHARED_MEMORY

FIELD = "routed_experts"
_BEGINNING = base64.b64encode(MAGIC[: len(MAGIC) // 3 * 3]).decode()
_DOWNLOAD_S = 120.0
Way = Literal["shared memory", "binary HTTP answers", "base64 in the JSON"]


def take(answer: dict[str, Any], request: GenerationRequest) -> Way | Notice | None:
    """Put the recording into the answer's ``meta_info``, as an array, where it is in this host's memory.

    Returns the way by which it came, the notice of one that must be downloaded, or None where none was
    asked for. Raises AbortedError where it is gone, EngineAnswerError where it is another or damaged.
    """
    text = answer.get("meta_info", {}).get(FIELD)
    if FIELD not in request.columns or not isinstance(text, str):
        return None
    notice = notice_in(text, request)
    if notice is None:
        return "base64 in the JSON"
    expected = _shape(answer, request)
    if notice.shape != expected:
        raise EngineAnswerError(
            f"request {request.key}: a recording of shape {notice.shape}, expected {expected}"
        )
    content = _from_memory(notice, request)
    if content is None:
        return notice
    place(answer, request, notice, content)
    (Path(notice.folder) / notice.id).unlink(missing_ok=True)
    return "shared memory"


def place(
    answer: dict[str, Any],
    request: GenerationRequest,
    notice: Notice,
    content: bytes | np.ndarray,
) -> None:
    """Put the recording with this ``content`` into the answer. Raises EngineAnswerError for another."""
    try:
        answer["meta_info"][FIELD] = notice.array(content, _shape(answer, request))
    except ValueError as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


async def download(client: HttpClient, notice: Notice) -> bytes:
    """The content of a recording that is on the server's host, which forgets it then.

    Raises AbortedError where it is gone, EngineAnswerError for another number of bytes, and the client's
    errors.
    """
    path = f"/routed_experts/{notice.id}"
    try:
        content = await client.download(path, notice.size, timeout_s=_DOWNLOAD_S)
    except EngineRequestError as error:
        if error.status == 404:
            raise _gone(notice, client.url) from error
        raise
    with contextlib.suppress(EngineLostError, EngineRequestError):
        await client.request("DELETE", path)
    return content


def _shape(answer: dict[str, Any], request: GenerationRequest) -> tuple[int, int, int]:
    """Of the recording that belongs to the answer."""
    shape = request.columns[FIELD]
    tokens = len(request.prompt_ids) + len(answer.get("output_ids", ())) - 1
    return tokens, shape.hidden_layers, shape.top_k


def _from_memory(notice: Notice, request: GenerationRequest) -> np.ndarray | None:
    """The file's bytes; None where the server's folder is not on this host."""
    folder = Path(notice.folder)
    if not is_private(folder):
        return None
    try:
        descriptor = os.open(folder / notice.id, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        if folder.is_dir():
            raise _gone(notice, f"request {request.key}") from error
        return None  # the server has ended
    with open(descriptor, "rb") as file:
        return np.fromfile(file, np.uint8, notice.size + 1)


def notice_in(text: str, request: GenerationRequest) -> Notice | None:
    """The notice that an answer's field holds; None where it holds a recording. Raises EngineAnswerError."""
    if not text.startswith(_BEGINNING):
        return None
    try:
        return Notice.decode(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise EngineAnswerError(f"request {request.key}: {error}") from error


def is_private(folder: Path) -> bool:
    """Whether it is a server's folder on this host: this user's own, and named so. A server can't have
    another file read."""
    named = folder.parent == SHARED_MEMORY and folder.name.startswith(f"mdppo-{os.getuid()}-")
    try:
        return named and not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _gone(notice: Notice, where: str) -> AbortedError:
    return AbortedError(f"{where}: the recorded routing {notice.id} is no longer there")
