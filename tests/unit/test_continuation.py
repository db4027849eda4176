"""Continuation of responses that a weight update aborted, with values worked out by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from megatron_dppo.data.columns import COLUMNS, Column, Rows, declare, usable_rows
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import FinishReason, Trajectory, VersionSpan
from megatron_dppo.engine.errors import (
    AbortedError,
    EngineLostError,
    GenerationInterruptedError,
    ServerLostError,
)
from megatron_dppo.engine.protocol import (
    GenerationRequest,
    RoutedShape,
    SamplingParams,
    parse_answer,
    request_body,
)
from megatron_dppo.engine.server.continuation import (
    Continuation,
    first_tokens,
    join,
    request_after,
    rest_of,
    seam_end,
    text_of,
)
from megatron_dppo.fleet.generation import GenerationLimits, generate_many
from megatron_dppo.system.async_runner import AsyncRunner

SHAPE = RoutedShape(hidden_layers=1, moe_layers=(0,), top_k=2, experts=100)
PROMPT = (4, 5, 6)
LETTERS = dict(enumerate("_abcdefghijklmnopqrstuvwxyz"))
"""The text of each token. Token 0 is a special token."""


def decode(token_ids: Any, /, *, special: bool = True) -> str:
    return "".join(LETTERS[int(i)] for i in token_ids if special or i)


def make_request(limit: int = 8, **sampling: Any) -> GenerationRequest:
    columns = {"topk": 1, "routed_experts": SHAPE}
    return GenerationRequest("key", PROMPT, SamplingParams(limit, **sampling), columns)


def rows(tokens: int, version: int, start: int = 0) -> np.ndarray:
    """Recorded routing: row t has experts t and 50 + ``version``; rows before ``start`` are zero, as if not sent."""
    experts = np.stack([np.arange(tokens), np.full(tokens, 50 + version)], axis=-1)
    experts[:start] = 0
    return experts[:, None].astype(np.uint8)


def answer_to(
    request: GenerationRequest, tokens: list[int], version: int, reason: FinishReason = "aborted",
    *, has_routing: bool = True,
) -> Trajectory:  # fmt: skip
    """An answer of ``tokens`` by one version. Token i of the response has log-probability -i - version / 10."""
    input_length = len(request.prompt_ids)
    kept = input_length - len(PROMPT)
    numbers = np.arange(kept, kept + len(tokens), dtype=np.float32)
    columns: dict[str, Any] = {
        "rollout_log_probs": -numbers - np.float32(version / 10),
        "weight_version": np.full(len(tokens), version, np.int32),
        "topk_ids": np.array(tokens, np.int32)[:, None],
        "topk_log_probs": np.full((len(tokens), 1), -version, np.float32),
    }
    if has_routing:
        start = request.columns["routed_experts"].start
        columns["routed_experts"] = rows(input_length + len(tokens) - 1, version, start)
    if not tokens:
        columns = {}
    return Trajectory.of_response(
        request.prompt_ids, tokens, columns=columns, finish_reason=reason, text="the engine's"
    )


def take_parts(request: GenerationRequest, *parts: tuple[Any, ...]) -> Trajectory | None:
    """Answer ``request`` and its continuations with ``parts``: (tokens, version[, reason]).

    Returns the response, or None if the parts do not complete it.
    """
    continuation, response = Continuation(decode), None
    for tokens, *version_and_reason in parts:
        part = answer_to(continuation.rest(request), tokens, *version_and_reason)
        response = continuation.take(request, part)
    assert bool(continuation.partials) == (response is None)
    return response


def test_parts_of_several_versions_are_one_trajectory():
    """Version 1 samples 7 and 8, version 2 samples 9, version 3 samples 10 and 11. The last token of each
    aborted part (20, 21) is discarded."""
    response = take_parts(make_request(), ([7, 8, 20], 1), ([9, 21], 2), ([10, 11], 3, "stop"))
    assert response is not None
    assert response.prompt_ids.tolist() == [4, 5, 6]
    assert response.response_ids.tolist() == [7, 8, 9, 10, 11]
    assert response.loss_mask.tolist() == [False] * 3 + [True] * 5
    assert response.finish_reason == "stop"
    assert response.version_spans == (
        VersionSpan(1, 0, 2),
        VersionSpan(2, 2, 3),
        VersionSpan(3, 3, 5),
    )
    expected = [-0.1, -1.1, -2.2, -3.3, -4.3]
    np.testing.assert_allclose(response.columns["rollout_log_probs"], expected, rtol=1e-6)
    assert response.columns["topk_ids"].tolist() == [[7], [8], [9], [10], [11]]
    # Row t is of the token at position t, which predicts the next one. Version 1 recorded rows 0 to 3 (row 3, of token
    # 7, predicts 8), version 2 recorded row 4, and version 3 recorded rows 5 and 6.
    assert response.columns["routed_experts"][:, 0].tolist() == [
        [0, 51], [1, 51], [2, 51], [3, 51], [4, 52], [5, 53], [6, 53],
    ]  # fmt: skip
    assert usable_rows(response.loss_mask, response.columns).all()
    assert response.discarded_rows == 0
    response.check()


def test_the_rest_is_asked_for_with_what_is_held():
    request = make_request(8, seed=5, temperature=0.5)
    continuation = Continuation(decode)
    assert continuation.rest(request) == replace(request, continues=True)
    assert continuation.take(request, answer_to(request, [7, 8, 20], 1)) is None
    body = orjson.loads(request_body([continuation.rest(request)], "rid", adapter="policy-2"))
    assert body["input_ids"] == [4, 5, 6, 7, 8]
    assert body["sampling_params"]["max_new_tokens"] == 6
    assert body["sampling_params"]["sampling_seed"] == 5
    # The rows of tokens 4 to 7 are kept. The next row is of token 8, which predicts the next token.
    assert body["routed_experts_start_len"] == 4
    assert body["lora_path"] == "policy-2"
    assert continuation.redrawn == 1


@pytest.mark.parametrize("tokens", [[], [20]])
def test_a_response_of_which_nothing_is_kept_is_asked_for_as_before(tokens):
    continuation = Continuation(decode)
    assert continuation.take(make_request(), answer_to(make_request(), tokens, 1)) is None
    assert continuation.partials == {}
    assert continuation.redrawn == len(tokens)
    assert continuation.rest(make_request()).prompt_ids == PROMPT
    response = continuation.take(make_request(), answer_to(make_request(), [7], 2, "stop"))
    assert response is not None
    assert response.version_spans == (VersionSpan(2, 0, 1),)
    assert response.text == "the engine's"


def test_an_update_right_after_an_update_keeps_what_there_was():
    for unkept_tokens in ([], [21]):
        response = take_parts(make_request(), ([7, 20], 1), (unkept_tokens, 2), ([8], 3, "length"))
        assert response is not None
        assert response.response_ids.tolist() == [7, 8]
        assert response.version_spans == (VersionSpan(1, 0, 1), VersionSpan(3, 1, 2))
        assert response.finish_reason == "length"
        assert usable_rows(response.loss_mask, response.columns).all()


def test_an_end_token_that_the_server_did_not_look_at_ends_nothing():
    """Token 0 ends a response. The server sends the token with the abort, before it checks the token for an end."""
    continuation, request = Continuation(decode), make_request()
    continuation.take(request, answer_to(request, [7, 8, 0], 1))
    assert continuation.partials["key"].response_ids.tolist() == [7, 8]
    response = continuation.take(request, answer_to(continuation.rest(request), [9, 0], 2, "stop"))
    assert response is not None
    assert response.response_ids.tolist() == [7, 8, 9, 0]
    assert response.text == "ghi"


def test_the_last_token_of_the_limit_may_be_asked_for_alone():
    continuation, request = Continuation(decode), make_request(3)
    continuation.take(request, answer_to(request, [7, 8, 9], 1))
    rest = continuation.rest(request)
    assert rest.sampling.max_new_tokens == 1
    response = continuation.take(request, answer_to(rest, [10], 2, "length"))
    assert response is not None
    assert response.response_ids.tolist() == [7, 8, 10]
    assert response.text == "ghj"


def test_a_part_of_two_versions_was_recorded_by_the_weights_it_ended_with():
    """Version 1 sampled 7 and 8. The server went on with 9 under version 2, and then recorded all rows again."""
    continuation, request = Continuation(decode), make_request()
    part = answer_to(request, [7, 8, 9, 20], 2)
    versions = np.array([1, 1, 2, 2], np.int32)
    assert continuation.take(request, part.with_columns(weight_version=versions)) is None
    response = continuation.take(request, answer_to(continuation.rest(request), [10], 3, "stop"))
    assert response is not None
    assert response.columns["weight_version"].tolist() == [1, 1, 2, 3]
    assert response.columns["routing_version"].tolist() == [2, 2, 2, 3]


# --- stop texts


@pytest.mark.parametrize(
    ("tokens", "seam", "stop", "end"),
    [
        ("xab" + "cde", 3, ("abc",), 4),
        ("xa" + "bcde", 2, ("abc",), 4),
        ("xxa" + "abcd", 3, ("abc",), 6),  # within the second part: the server finds it
        ("xab" + "xabc", 3, ("abc",), None),  # begins after the seam
        ("xab" + "dab", 3, ("abc",), None),
        ("xab" + "c", 3, ("zz", "bc"), 4),
        ("abc" + "d", 3, ("abc",), None),  # before the seam: the server would have ended there
        ("ab" + "cd", 2, (), None),
    ],
)
def test_a_stop_text_that_spans_the_seam_is_found(tokens, seam, stop, end):
    ids = np.array(["_abcdefghijklmnopqrstuvwxyz".index(letter) for letter in tokens])
    found_end = seam_end(ids, seam, stop, decode)
    if tokens == "xxaabcd":
        # Both are right, because the server itself ends this response.
        assert found_end in (end, None)
    else:
        assert found_end == end


def test_a_response_ends_with_the_token_that_completes_a_stop_text_across_the_seam():
    """The first part ends in "ab", the second begins with "c". The server looks for "abc" only within one part."""
    continuation, request = Continuation(decode), make_request(stop=("abc",))
    assert continuation.take(request, answer_to(request, [7, 1, 2, 20], 1)) is None
    second_part = answer_to(continuation.rest(request), [3, 24, 25], 2, "length")
    response = continuation.take(request, second_part)
    assert response is not None
    assert response.response_ids.tolist() == [7, 1, 2, 3]
    assert (response.finish_reason, response.text) == ("stop", "g")
    assert response.version_spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    assert response.columns["routed_experts"][:, 0].tolist()[-2:] == [[4, 51], [5, 52]]
    # One token of the first part and two after the stop text are discarded.
    assert continuation.redrawn == 3


def test_a_stop_text_across_the_seam_ends_a_response_that_was_aborted_again():
    response = take_parts(make_request(stop=("abc",)), ([1, 2, 20], 1), ([3, 24, 25], 2))
    assert response is not None
    assert response.response_ids.tolist() == [1, 2, 3]
    assert (response.finish_reason, response.text) == ("stop", "")


def test_the_text_ends_as_the_engine_s_does():
    def text(ids: list[int], reason: FinishReason, stop: tuple[str, ...] = ()) -> str:
        return text_of(Trajectory.of_response(PROMPT, ids, finish_reason=reason), stop, decode)

    assert text([1, 0, 2], "length") == "ab"
    assert text([1, 2, 0], "stop") == "ab"
    assert text([1, 2, 3], "stop") == "ab"  # 3 is a stop token
    assert text([1, 2, 3], "stop", ("zz", "bc")) == "a"


def test_turns_keep_the_topk_of_their_own_calls_and_what_is_between_has_none():
    """The turns are 7, 8 and 9, 10, with 20, 21, 22 between them. K = 2, with the sampled token first."""
    request = make_request()
    turn = answer_to(request, [7, 8], 1, "stop").with_columns(
        topk_ids=[[7, 1], [8, 2]], topk_log_probs=[[-0.1, -2.1], [-0.2, -2.2]]
    )
    next_request = request_after(request, turn, 5, [20, 21, 22])
    assert next_request.prompt_ids == [4, 5, 6, 7, 8, 20, 21, 22]
    assert next_request.columns["topk"] == 1
    last_turn = answer_to(next_request, [9, 10], 2, "stop").with_columns(
        topk_ids=[[9, 3], [10, 4]], topk_log_probs=[[-0.3, -2.3], [-0.4, -2.4]]
    )
    response = join(turn, last_turn)
    assert response.token_ids.tolist() == [4, 5, 6, 7, 8, 20, 21, 22, 9, 10]
    assert response.columns["topk_ids"].tolist() == [[7, 1], [8, 2], [9, 3], [10, 4]]
    log_probs = [[-0.1, -2.1], [-0.2, -2.2], [-0.3, -2.3], [-0.4, -2.4]]
    expected = np.array(log_probs, np.float32)
    np.testing.assert_array_equal(response.columns["topk_log_probs"], expected)
    response.check()
    # The loss reads row t for token t + 1. Only the rows of sampled tokens have a Top-K.
    batch = pack([response])
    assert batch.loss_mask.tolist() == [False, False, True, True, *[False] * 3, True, True, False]
    ids = [[-1, -1]] * 2 + [[7, 1], [8, 2]] + [[-1, -1]] * 3 + [[9, 3], [10, 4]] + [[-1, -1]]
    assert batch.columns["topk_ids"].tolist() == ids
    sampled_rows = batch.columns["topk_log_probs"][batch.loss_mask].numpy()
    np.testing.assert_array_equal(sampled_rows, expected)


# --- recorded routing that was lost


def test_a_part_without_recorded_routing_loses_its_own_rows_alone():
    """The second of three parts went back to the server's queue, and the server then freed its recording."""
    continuation, request = Continuation(decode), make_request()
    continuation.take(request, answer_to(request, [7, 8, 20], 1))
    rest = continuation.rest(request)
    continuation.take(request, answer_to(rest, [9, 10, 21], 2, has_routing=False))
    rest = continuation.rest(request)
    assert rest.columns["routed_experts"].start == len(PROMPT) + 4 - 1
    response = continuation.take(request, answer_to(rest, [11], 3, "stop"))
    assert response is not None
    assert response.columns["routing_version"].tolist() == [1, 1, -1, -1, 3]
    usable = usable_rows(response.loss_mask, response.columns)
    assert usable.tolist() == [True] * 4 + [False, False, True]
    assert response.discarded_rows == 2
    assert response.columns["routed_experts"][usable, 0].tolist() == [
        [0, 51], [1, 51], [2, 51], [3, 51], [6, 53],
    ]  # fmt: skip
    response.check()


def test_where_the_first_part_has_no_recording_the_next_one_records_all():
    continuation, request = Continuation(decode), make_request()
    continuation.take(request, answer_to(request, [7, 8, 20], 1, has_routing=False))
    rest = continuation.rest(request)
    assert rest.columns["routed_experts"].start == 0
    response = continuation.take(request, answer_to(rest, [9], 2, "stop"))
    assert response is not None
    assert response.columns["routing_version"].tolist() == [2, 2, 2]
    usable = usable_rows(response.loss_mask, response.columns)
    assert usable.tolist() == [True, True, False, False, True]


def test_a_response_in_one_part_is_what_the_engine_answered():
    request = make_request()
    single = answer_to(request, [7, 8], 1, "stop")
    assert take_parts(request, ([7, 8], 1, "stop")).columns.keys() == single.columns.keys()
    assert first_tokens(single, 2) is single
    with pytest.raises(AssertionError, match="another request"):
        join(single, single)
    assert rest_of(request, first_tokens(single, 1)).prompt_ids == [4, 5, 6, 7]


def test_a_column_of_all_tokens_that_another_module_declares_is_joined_too():
    """The second answer repeats the rows of the kept tokens. The rows of the first answer are kept."""
    declare(Column("tested_input", ("int32",), Rows.INPUT))
    try:
        partial = Trajectory.of_response(PROMPT, [7], columns={"tested_input": [1, 2, 3]})
        rest = Trajectory.of_response([*PROMPT, 7], [8], columns={"tested_input": [5, 6, 7, 8]})
        assert join(partial, rest).columns["tested_input"].tolist() == [1, 2, 3, 8]
    finally:
        del COLUMNS["tested_input"]


# --- answers of a server


def answer_body(ids: list[int], reason: dict[str, Any], **meta: Any) -> dict[str, Any]:
    entries = [[-0.5, token, None] for token in ids]
    spans = [{"version": "3", "start": 0, "end": len(ids)}]
    common = {"finish_reason": reason, "output_token_logprobs": entries, "weight_versions": spans}
    return {"text": "", "output_ids": ids, "meta_info": common | meta}


ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


def test_an_aborted_answer_is_read_where_the_request_goes_on():
    request = GenerationRequest("key", PROMPT, SamplingParams(8), {"routed_experts": SHAPE})
    rest = replace(request, continues=True)
    partial = parse_answer(answer_body([7, 8], ABORT, routed_experts=rows(4, 3)), rest)
    assert (partial.finish_reason, partial.response_ids.tolist()) == ("aborted", [7, 8])
    assert len(partial.columns["routed_experts"]) == 4
    without_routing = parse_answer(answer_body([7, 8], ABORT), rest)
    assert without_routing.columns.keys() == {"rollout_log_probs", "weight_version"}
    empty = parse_answer(answer_body([], ABORT), rest)
    assert (empty.sampled, empty.finish_reason) == (0, "aborted")
    with pytest.raises(AbortedError):
        parse_answer(answer_body([7, 8], ABORT), request)
    failure = {"type": "abort", "message": "out of memory", "status_code": 500}
    with pytest.raises(AbortedError, match="out of memory"):
        parse_answer(answer_body([7, 8], failure), rest)


def test_rows_before_the_start_are_not_told():
    shape = replace(SHAPE, start=4)
    columns = {"routed_experts": shape}
    request = GenerationRequest("key", (4, 5, 6, 7, 8), SamplingParams(6), columns)
    body = answer_body([9], {"type": "stop"}, routed_experts=rows(5, 3)[4:])
    trajectory = parse_answer(body, request)
    assert trajectory.columns["routed_experts"][:, 0].tolist() == [[0, 0]] * 4 + [[4, 53]]


# --- generate_many


class AbortingClient:
    """A client whose calls return at most ``piece`` tokens of each response, as if an update then aborted the call.

    ``lost_call``: number of the call during which one of several servers is lost. ``fatal_call``: number of the call
    during which the last server is lost.
    """

    def __init__(self, length: int, piece: int, lost_call: int = -1, fatal_call: int = -1) -> None:
        self.length, self.piece = length, piece
        self.lost_call, self.fatal_call = lost_call, fatal_call
        self.calls: list[tuple[int, ...]] = []
        self.rids: list[str] = []

    async def generate(self, requests: Any, rid: str) -> list[Trajectory]:
        number = len(self.calls)
        self.calls.append(tuple(len(r.prompt_ids) for r in requests))
        self.rids.append(rid)
        await asyncio.sleep(0)
        if number == self.lost_call:
            raise ServerLostError("one of many")
        if number == self.fatal_call:
            raise EngineLostError("the last one")
        return [self._answer(r) for r in requests]

    def _answer(self, request: GenerationRequest) -> Trajectory:
        assert request.continues
        assert request.sampling.max_new_tokens == self.length - (len(request.prompt_ids) - 1)
        count = min(request.sampling.max_new_tokens, self.piece)
        is_complete = count == request.sampling.max_new_tokens
        first_id = len(request.prompt_ids)
        return Trajectory.of_response(
            request.prompt_ids, range(first_id, first_id + count), finish_reason="length" if is_complete else "aborted"
        )  # fmt: skip

    async def abort(self, rid: str, count: int) -> None:
        raise AssertionError("nothing is late")

    async def watch(self, hang_timeout_s: float) -> None:
        await asyncio.sleep(60)


def run_generation(
    client: AbortingClient,
    count: int,
    continuation: Continuation,
    per_call: int = 1,
    play: Any = None,
) -> dict:
    limits = GenerationLimits(concurrency=4, responses_per_call=per_call)
    requests = [GenerationRequest(i, (1,), SamplingParams(client.length)) for i in range(count)]
    letters = dict(enumerate("abcdefghij", start=1))

    def decode_letters(ids: Any, /, *, special: bool = True) -> str:
        return "".join(letters[i] for i in ids)

    continuation.decode = decode_letters
    with AsyncRunner() as runner:
        work = generate_many(client, requests, limits, continuation=continuation, play=play)
        return runner.run(work)


@pytest.mark.parametrize("per_call", [1, 2])
def test_responses_are_gone_on_with_until_they_end(per_call):
    """Calls return 3 tokens, of which an aborted response keeps 2. Three calls give a response of 6 tokens."""
    client, continuation = AbortingClient(6, 3), Continuation(decode)
    results = run_generation(client, 4, continuation, per_call)
    assert [t.response_ids.tolist() for t in results.values()] == [[1, 2, 3, 4, 5, 6]] * 4
    first_calls = [(1,) * per_call] * (4 // per_call)
    assert sorted(client.calls) == sorted([*first_calls, *[(3,)] * 4, *[(5,)] * 4])
    assert continuation.redrawn == 4 * 2
    assert len(set(client.rids)) == len(client.rids)
    # A server aborts all requests whose id begins with the id of the abort.
    assert not any(a != b and b.startswith(a) for a in client.rids for b in client.rids)


def test_a_lost_server_costs_what_it_had_not_answered():
    client, continuation = AbortingClient(6, 3, lost_call=1), Continuation(decode)
    (response,) = run_generation(client, 1, continuation).values()
    assert client.calls == [(1,), (3,), (3,), (5,)]
    assert response.sampled == 6


def test_after_the_loss_of_the_last_server_the_rest_alone_is_asked_for():
    continuation = Continuation(decode)
    with pytest.raises(GenerationInterruptedError) as caught:
        run_generation(AbortingClient(6, 3, fatal_call=1), 1, continuation)
    assert caught.value.completed == {}
    assert continuation.partials[0].sampled == 2
    next_client = AbortingClient(6, 6)
    results = run_generation(next_client, 2, continuation, per_call=2)
    assert next_client.calls == [(3,), (1,)]
    assert [t.sampled for t in results.values()] == [6, 6]


def test_an_episode_that_is_played_again_begins_without_the_turn_that_was_lost():
    """The environment starts again and its messages may differ, so the kept tokens cannot be continued."""

    async def play(request: GenerationRequest, ask: Any) -> Trajectory:
        return await ask(request)

    continuation = Continuation(decode)
    with pytest.raises(GenerationInterruptedError):
        run_generation(AbortingClient(6, 3, fatal_call=1), 1, continuation, play=play)
    assert continuation.partials[0].sampled == 2
    redrawn = continuation.redrawn
    next_client = AbortingClient(6, 6)
    results = run_generation(next_client, 1, continuation, play=play)
    assert next_client.calls == [(1,)]
    assert continuation.redrawn == redrawn + 2
    assert [t.sampled for t in results.values()] == [6]
