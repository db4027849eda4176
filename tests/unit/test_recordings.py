"""Recorded routing beside the JSON: notices, the server's files, and both ways to fetch them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError
from megatron_dppo.engine.protocol import GenerationRequest, RoutedShape, SamplingParams
from megatron_dppo.engine.server import recordings
from megatron_dppo.engine.server.recordings import (
    FOLDERS_VARIABLE,
    Notice,
    RecordingStore,
    insert,
    insert_from_memory,
    is_private,
    narrowed,
    recordings_folders,
)
from megatron_dppo.system.scratch import SHARED_MEMORY
from tests.messages import mentioning

ROUTED = np.arange(24, dtype=np.int32).reshape(3, 2, 4)


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    with recordings_folders() as both:
        assert json.loads(os.environ[FOLDERS_VARIABLE]) == [str(folder) for folder in both]
        assert [folder.parent for folder in both] == [SHARED_MEMORY, Path(tempfile.gettempdir())]
        assert [folder.stat().st_mode & 0o777 for folder in both] == [0o700, 0o700]
        yield both
    assert not any(folder.exists() for folder in both)
    assert FOLDERS_VARIABLE not in os.environ


@pytest.fixture
def folder(folders: list[Path]) -> Path:
    return folders[0]


def request_of(shape: RoutedShape) -> GenerationRequest:
    return GenerationRequest("r", (1, 2), SamplingParams(4), {"routed_experts": shape})


REQUEST = request_of(RoutedShape(2, (0, 1), 4, 32))


def answer_with(content: bytes, tokens: int = 2) -> dict:
    text = base64.b64encode(content).decode()
    return {"output_ids": [5] * tokens, "meta_info": {"routed_experts": text}}


def fetch_from_memory(answer: dict):
    """Return the recording of the answer, which must be in shared memory."""
    assert insert_from_memory(answer, REQUEST) == "shared memory"
    return answer["meta_info"]["routed_experts"]


# --- notices and files


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65535, "uint16")])
def test_the_narrowest_type_that_names_the_largest_expert(folder, largest, dtype):
    routed = ROUTED.copy()
    routed[2, 1, 3] = largest
    notice = RecordingStore([folder]).put(routed)
    assert (notice.dtype, notice.shape) == (dtype, (3, 2, 4))
    assert notice.size == 24 * np.dtype(dtype).itemsize == (folder / notice.id).stat().st_size
    content = (folder / notice.id).read_bytes()
    assert notice.array(content, (3, 2, 4)).tolist() == routed.tolist()
    assert (folder / notice.id).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("value", [-1, 65536])
def test_what_is_no_expert_is_refused(folder, value):
    routed = ROUTED.copy()
    routed[0, 0, 0] = value
    with pytest.raises(ValueError, match="SGLang recorded experts"):
        narrowed(routed)
    with pytest.raises(ValueError, match="SGLang recorded experts"):
        RecordingStore([folder]).put(routed)
    assert list(folder.iterdir()) == []


def test_a_prompt_of_one_token_answered_by_one_has_one_row_and_an_empty_one_none(folder):
    for rows in (0, 1):
        notice = RecordingStore([folder]).put(ROUTED[:rows])
        array = notice.array((folder / notice.id).read_bytes(), (rows, 2, 4))
        assert array.shape == (rows, 2, 4)


def test_what_nobody_fetches_goes_after_its_time(folder):
    now = [0.0]
    store = RecordingStore([folder], stored_s=10, clock=lambda: now[0])
    first = store.put(ROUTED)
    now[0] = 10.0
    second = store.put(ROUTED)
    assert {p.name for p in folder.iterdir()} == {first.id, second.id}
    now[0] = 10.1
    third = store.put(ROUTED)
    assert {p.name for p in folder.iterdir()} == {second.id, third.id}


def test_a_recording_does_not_age_while_its_server_is_paused(folder):
    now = [0.0]
    store = RecordingStore([folder], stored_s=900, clock=lambda: now[0])
    first = store.put(ROUTED)
    # A colocated trainer had the devices. Now the client reads the answers of requests that were aborted before.
    now[0] = 7200.0
    store.put(ROUTED)
    assert (folder / first.id).exists()
    # The pause counts as 60 s. After 29 further gaps of 30 s the recording is older than 900 s.
    for _ in range(29):
        now[0] += 30
        store.put(ROUTED)
    assert not (folder / first.id).exists()


def test_what_has_no_room_in_shared_memory_goes_among_the_temporary_files(folders, monkeypatch):
    class Space:
        f_bavail, f_blocks, f_frsize = 73, 100, 1

    memory, disk = folders
    monkeypatch.setattr(os, "statvfs", lambda path: Space)
    # 24 bytes would leave 49 of 100 free: half of the memory must stay free.
    notice = RecordingStore(folders).put(ROUTED)
    assert notice.folder == str(disk)
    Space.f_bavail = 74
    assert RecordingStore(folders).put(ROUTED).folder == str(memory)
    monkeypatch.undo()
    # A client on the same host fetches the recording on the disk by HTTP: it trusts only folders in shared memory.
    assert insert_from_memory(answer_with(notice.encode()), REQUEST) == notice
    with pytest.raises(FileNotFoundError):
        RecordingStore([disk / "none"]).put(ROUTED)


def test_a_notice_survives_its_encoding_and_a_broken_one_is_refused():
    notice = Notice("0" * 32, "/dev/shm/x", "uint8", (3, 2, 4), "f" * 32)
    assert Notice.decode(notice.encode()) == notice
    for other in (ROUTED.tobytes(), b"No space left on device"):
        with pytest.raises(ValueError, match="routed_experts holds no notice of a recording but b"):
            Notice.decode(other)
    for broken in (
        replace(notice, id="../../etc/passwd"),
        replace(notice, hash="f"),
        replace(notice, dtype="float32"),  # type: ignore[arg-type]
        replace(notice, shape=(3, -2, 4)),
        replace(notice, shape=(3, 2)),  # type: ignore[arg-type]
        replace(notice, shape=(3, 2, True)),
    ):
        with pytest.raises(ValueError, match="a broken notice of a recording"):
            Notice.decode(broken.encode())
    with pytest.raises(ValueError, match="a broken notice of a recording"):
        Notice.decode(notice.encode()[:-1])


# --- fetching


def test_a_recording_comes_through_shared_memory_and_its_file_goes(folder):
    notice = RecordingStore([folder]).put(ROUTED)
    array = fetch_from_memory(answer_with(notice.encode()))
    assert array.dtype == np.uint8
    assert array.tolist() == ROUTED.tolist()
    assert list(folder.iterdir()) == []


def test_a_recording_in_the_json_itself_is_refused():
    for text in (base64.b64encode(ROUTED.tobytes()).decode(), "no base64"):
        answer = {"output_ids": [5, 5], "meta_info": {"routed_experts": text}}
        with pytest.raises(EngineAnswerError, match=r"^request r: "):
            insert_from_memory(answer, REQUEST)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], "23 bytes of a recording, expected 24"),
        (lambda b: b + b"x", "25 bytes of a recording, expected 24"),
        (lambda b: b[:7] + bytes([b[7] ^ 1]) + b[8:], "a recording with the hash"),
    ],
)
def test_damage_is_told(folder, damage, message):
    notice = RecordingStore([folder]).put(ROUTED)
    path = folder / notice.id
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EngineAnswerError, match=f"request r: {message}"):
        fetch_from_memory(answer_with(notice.encode()))


def test_another_responses_recording_is_refused_before_it_is_read(folder):
    notice = RecordingStore([folder]).put(ROUTED)
    message = r"request r: a recording of shape \(3, 2, 4\), expected \(4, 2, 4\)"
    with pytest.raises(EngineAnswerError, match=message):
        fetch_from_memory(answer_with(notice.encode(), tokens=3))


def test_one_that_is_gone_is_asked_for_again(folder):
    notice = RecordingStore([folder]).put(ROUTED)
    (folder / notice.id).unlink()
    with pytest.raises(AbortedError, match=mentioning("request r", notice.id)):
        fetch_from_memory(answer_with(notice.encode()))


def test_no_file_outside_of_a_servers_folder_is_read(tmp_path, folder):
    assert is_private(folder)
    assert not is_private(tmp_path)
    assert not is_private(folder / "..")
    link = folder.with_name(folder.name + "link")
    link.symlink_to(tmp_path)
    try:
        assert not is_private(link)
    finally:
        link.unlink()


class BinaryServer:
    """Serves one recording at ``/routed_experts``, and checks the API key."""

    def __init__(self, content: bytes, status: int = 200) -> None:
        self.content, self.status, self.removed = content, status, 0

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/routed_experts/{id}", self._get)
        app.router.add_delete("/routed_experts/{id}", self._delete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        return web.Response(body=self.content, status=self.status)

    async def _delete(self, request: web.Request) -> web.Response:
        self.removed += 1
        return web.Response(status=204)


def fetch_by_http(server: BinaryServer, notice: Notice) -> np.ndarray:
    async def fetch() -> np.ndarray:
        async with server as url, EngineClient(url, "key") as client:
            answer = answer_with(notice.encode())
            missing = insert_from_memory(answer, REQUEST)
            assert missing == notice
            insert(answer, REQUEST, notice, await client.fetch_recording(notice))
            return answer["meta_info"]["routed_experts"]

    return asyncio.run(fetch())


@pytest.fixture
def remote_recording(folder, monkeypatch) -> tuple[Notice, bytes]:
    """Return the notice and the bytes of a recording in the memory of another host's server."""
    notice = RecordingStore([folder]).put(ROUTED)
    monkeypatch.setattr(recordings, "is_private", lambda folder: False)
    return notice, (folder / notice.id).read_bytes()


def test_another_hosts_recording_comes_by_http_and_is_removed_there(remote_recording):
    notice, content = remote_recording
    server = BinaryServer(content)
    assert fetch_by_http(server, notice).tolist() == ROUTED.tolist()
    assert server.removed == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(25), "more bytes, expected 24"),
        (bytes(23), "23 bytes, expected 24"),
        (bytes(24), "hash"),
    ],
)
def test_what_http_brings_is_bounded_and_checked(remote_recording, content, message):
    with pytest.raises(EngineAnswerError, match=message):
        fetch_by_http(BinaryServer(content), remote_recording[0])


def test_one_that_is_gone_there_is_asked_for_again(remote_recording):
    with pytest.raises(AbortedError, match="is no longer there"):
        fetch_by_http(BinaryServer(b"", status=404), remote_recording[0])
