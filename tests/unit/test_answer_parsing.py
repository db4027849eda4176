"""Answers of engines, parsed in a process beside the trainer's: trajectories and errors are the same."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import orjson
import psutil
import pytest

from megatron_dppo.engine import answer_parsing
from megatron_dppo.engine.answer_parsing import (
    AnswerParser,
    ParserLostError,
    ReceivedAnswer,
    answer_to,
    parsed_of,
)
from megatron_dppo.engine.errors import AbortedError, EngineAnswerError, StaleWeightsError
from megatron_dppo.engine.server.recordings import (
    Notice,
    RecordingStore,
    content_hash,
    recordings_folders,
)
from megatron_dppo.system.scratch import (
    SHARED_MEMORY,
    SharedBuffer,
    aligned_offsets,
    free_bytes,
    map_buffer,
    memory_name,
)
from tests.messages import mentioning
from tests.trajectories import same, trajectory
from tests.unit import test_engine_protocol as protocol
from tests.unit.test_engine_protocol import ROUTED, SHAPE, b64
from tests.unit.test_engine_protocol import json_answer as answer
from tests.unit.test_engine_protocol import unrouted_request as request


@pytest.fixture(scope="module")
def process() -> Iterator[AnswerParser]:
    parser = AnswerParser(smallest=0)
    yield parser
    parser.close()


LOCAL_PARSER = AnswerParser(smallest=None)


def parse(parser, payload: object, requests: list, versions=None, downloaded=None):
    body = orjson.dumps(payload)
    received = ReceivedAnswer(body, requests, versions, downloaded or {})
    return asyncio.run(parser.parse(received))


def test_the_process_parses_as_this_one_does(process):
    requests = [request(problem_id=9, sample_index=s) for s in (3, 4)]
    payload = [answer(), answer(output_token_logprobs=[[-1.5, 7, None], [-0.125, 2, None]])]
    local, remote = (parse(p, payload, requests) for p in (LOCAL_PARSER, process))
    assert len(remote.trajectories) == 2
    assert all(same(a, b) for a, b in zip(local.trajectories, remote.trajectories, strict=True))
    assert not any(a.flags.writeable for a in remote.trajectories[0].columns.values())
    assert process._worker is not None
    (parser,) = psutil.Process(process._worker.pid).children()
    pattern = f"mdppo-{os.getuid()}-*-{parser.pid}-*buffer-*"
    assert list(SHARED_MEMORY.glob(pattern)) == []


def test_a_small_answer_is_parsed_where_it_arrives():
    size = len(orjson.dumps(answer()))
    for smallest, uses_process in ((size + 1, False), (size, True)):
        process = AnswerParser(smallest)
        assert parse(process, answer(), [request()]).trajectories
        assert (process._worker is not None) == uses_process
        process.close()
    recordings = AnswerParser(size + 16)
    parse(recordings, answer(), [request()], downloaded={"unused": bytes(16)})
    assert recordings._worker is not None
    recordings.close()


@pytest.mark.parametrize(
    ("changes", "versions", "error", "message"),
    [
        ({"finish_reason": {"type": "abort"}}, None, AbortedError, r"request \(0, 0\): aborted"),
        (
            {"output_token_logprobs": []},
            None,
            EngineAnswerError,
            r"request \(0, 0\): got 0 log-prob",
        ),
        ({}, range(4, 5), StaleWeightsError, r"request \(0, 0\): drawn from weights 3, 4"),
    ],
)
def test_errors_of_parsing_come_back_as_they_are(process, changes, versions, error, message):
    with pytest.raises(error, match=f"^{message}"):
        parse(process, answer(**changes), [request()], versions)


RECORDED_COLUMNS = {"topk": 2, "routed_experts": SHAPE}


def test_a_recording_in_this_hosts_memory_is_read(process):
    with recordings_folders() as folders:
        notice = RecordingStore(folders).put(np.array(ROUTED, np.int32))
        content = answer(routed_experts=b64(list(notice.encode()), "u1"))
        result = parse(process, content, [request(columns=RECORDED_COLUMNS)])
    assert result.ways == {"shared memory"}
    expected = protocol.parse_answer(protocol.answer(), protocol.request())
    assert same(result.trajectories[0], expected)


def test_a_recording_on_another_host_is_named_and_then_brought(process):
    content = np.array(ROUTED, np.uint8).tobytes()
    digest = content_hash(np.frombuffer(content, np.uint8))
    notice = Notice("0" * 32, "/dev/shm/elsewhere", "uint8", (4, 2, 2), digest)
    payload = answer(routed_experts=b64(list(notice.encode()), "u1"))
    requests = [request(columns=RECORDED_COLUMNS)]
    first = parse(process, payload, requests)
    assert (first.missing, first.trajectories) == ([notice], [])
    second = parse(process, payload, requests, downloaded={notice.id: content})
    assert second.missing == []
    assert second.ways == {"binary HTTP answers"}
    expected = protocol.parse_answer(protocol.answer(), protocol.request())
    assert same(second.trajectories[0], expected)
    with pytest.raises(EngineAnswerError, match=mentioning("request (0, 0)", digest)):
        parse(process, payload, requests, downloaded={notice.id: bytes(16)})


def test_the_end_of_the_process_is_told_at_once():
    process = AnswerParser(smallest=0)
    assert parse(process, answer(), [request()]).trajectories
    assert process._worker is not None
    (parser,) = psutil.Process(process._worker.pid).children()
    parser.kill()
    with pytest.raises(ParserLostError, match=mentioning("SIGKILL")):
        parse(process, answer(), [request()])
    process.close()
    process.close()
    with pytest.raises(ParserLostError):
        parse(closed_parser(), answer(), [request()])


def closed_parser() -> AnswerParser:
    process = AnswerParser(smallest=0)
    process.close()
    return process


def test_without_room_in_shared_memory_arrays_follow_in_the_connection(monkeypatch):
    def fail_to_allocate(size: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(answer_parsing, "SharedBuffer", fail_to_allocate)
    reply = answer_to(pickle.dumps((orjson.dumps(answer()), [request()], None, {})))
    assert pickle.loads(reply)[2] is None
    (received,) = parsed_of(reply).trajectories
    assert same(received, parse(LOCAL_PARSER, answer(), [request()]).trajectories[0])


def test_trajectories_are_pickled_around_their_arrays():
    unset_fields = {"advantage": 0.0, "rollout_log_probs": None}
    trajectories = [trajectory([1], [2, 3], advantage=0.0), trajectory([1, 2], [], **unset_fields)]
    trajectories[0] = replace(trajectories[0], text="é", finish_reason="length")
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(trajectories, protocol=5, buffer_callback=arrays.append)
    assert len(arrays) == 5
    restored = pickle.loads(head, buffers=[np.array(array) for array in arrays])
    assert all(same(a, b) for a, b in zip(restored, trajectories, strict=True))
    assert not any(t.token_ids.flags.writeable for t in restored)
    with pytest.raises(ValueError, match=mentioning(2, "rollout_log_probs")):
        pickle.loads(
            pickle.dumps(trajectories[0]).replace(trajectories[0].loss_mask.tobytes(), bytes(3))
        )


def test_each_array_begins_at_a_multiple_of_64_bytes():
    assert aligned_offsets([5, 64, 0, 65]) == ([0, 64, 128, 128], 256)
    assert aligned_offsets([]) == ([], 0)


def test_a_shared_buffer_outlives_its_name():
    buffer = SharedBuffer(5)
    assert buffer.path.stat().st_mode & 0o777 == 0o600
    buffer.array[:] = [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"5 bytes, expected 6"):
        map_buffer(str(buffer.path), 6)
    other = map_buffer(str(buffer.path), 5)
    buffer.hide()
    buffer.hide()
    assert other.tolist() == [1, 2, 3, 4, 5]
    assert not other.flags.writeable
    empty = SharedBuffer(0)
    assert map_buffer(str(empty.path), 0).size == 0
    empty.hide()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        SharedBuffer(free_bytes() + 2**40)
    assert memory_name() == memory_name()
