"""Responses that an update ended early and that go on afterwards, with values worked by hand."""

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
from megatron_dppo.engine.continuation import (
    Continuation,
    first_tokens,
    join,
    request_after,
    rest_of,
    seam_end,
    text_of,
)
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
from megatron_dppo.fleet.generation import GenerationLimits, generate_many
from megatron_dppo.system.async_runner import AsyncRunner

SHAPE = RoutedShape(hidden_layers=1, moe_layers=(0,), top_k=2, experts=100)
PROMPT = (4, 5, 6)
LETTERS = dict(enumerate("_abcdefghijklmnopqrstuvwxyz"))
"""A token's text; 0 is a special token."""


def decode(token_ids: Any, *, special: bool = True) -> str:
    return "".join(LETTERS[int(i)] for i in token_ids if special or i)


def request(limit: int = 8, **sampling: Any) -> GenerationRequest:
    columns = {"topk": 1, "routed_experts": SHAPE}
    return GenerationRequest("key", PROMPT, SamplingParams(limit, **sampling), columns)


def rows(tokens: int, version: int, start: int = 0) -> np.ndarray:
    """Row t of weights v: experts (t, 50 + v); rows before ``start`` were not sent."""
    whole = np.stack([np.arange(tokens), np.full(tokens, 50 + version)], axis=-1)
    whole[:start] = 0
    return whole[:, None].astype(np.uint8)


def answer(
    asked: GenerationRequest, tokens: list[int], version: int, reason: FinishReason = "aborted",
    *, recorded: bool = True,
) -> Trajectory:  # fmt: skip
    """``tokens`` by one version: token i of the response has log-probability -i - version / 10."""
    before = len(asked.prompt_ids)
    held = before - len(PROMPT)
    numbers = np.arange(held, held + len(tokens), dtype=np.float32)
    columns: dict[str, Any] = {
        "rollout_log_probs": -numbers - np.float32(version / 10),
        "weight_version": np.full(len(tokens), version, np.int32),
        "topk_ids": np.array(tokens, np.int32)[:, None],
        "topk_log_probs": np.full((len(tokens), 1), -version, np.float32),
    }
    if recorded:
        start = asked.columns["routed_experts"].start
        columns["routed_experts"] = rows(before + len(tokens) - 1, version, start)
    if not tokens:
        columns = {}
    return Trajectory.of_response(
        asked.prompt_ids, tokens, columns=columns, finish_reason=reason, text="the engine's"
    )


def drawn(asked: GenerationRequest, *parts: tuple[Any, ...], **options: Any) -> Trajectory | None:
    """What becomes of answers (tokens, version[, reason]) to ``asked`` and its rests."""
    continuation, whole = Continuation(decode), None
    for tokens, *rest in parts:
        whole = continuation.take(asked, answer(continuation.rest(asked), tokens, *rest, **options))
    assert bool(continuation.partials) == (whole is None)
    return whole


def test_parts_of_several_versions_are_one_trajectory():
    """7 and 8 by version 1, 9 by 2, 10 and 11 by 3; what each part ended with (20, 21) is drawn again."""
    whole = drawn(request(), ([7, 8, 20], 1), ([9, 21], 2), ([10, 11], 3, "stop"))
    assert whole is not None
    assert whole.prompt_ids.tolist() == [4, 5, 6]
    assert whole.response_ids.tolist() == [7, 8, 9, 10, 11]
    assert whole.loss_mask.tolist() == [False] * 3 + [True] * 5
    assert whole.finish_reason == "stop"
    assert whole.version_spans == (
        VersionSpan(1, 0, 2),
        VersionSpan(2, 2, 3),
        VersionSpan(3, 3, 5),
    )
    expected = [-0.1, -1.1, -2.2, -3.3, -4.3]
    np.testing.assert_allclose(whole.columns["rollout_log_probs"], expected, rtol=1e-6)
    assert whole.columns["topk_ids"].tolist() == [[7], [8], [9], [10], [11]]
    # Row t predicts token t + 1: rows 0 to 3 by version 1 (row 3, of token 7, predicts 8), row 4 by 2, 5 and 6 by 3.
    assert whole.columns["routed_experts"][:, 0].tolist() == [
        [0, 51], [1, 51], [2, 51], [3, 51], [4, 52], [5, 53], [6, 53],
    ]  # fmt: skip
    assert usable_rows(whole.loss_mask, whole.columns).all()
    assert whole.discarded_rows == 0
    whole.check()


def test_the_rest_is_asked_for_with_what_is_held():
    asked = request(8, seed=5, temperature=0.5)
    continuation = Continuation(decode)
    assert continuation.rest(asked) == replace(asked, continues=True)
    assert continuation.take(asked, answer(asked, [7, 8, 20], 1)) is None
    body = orjson.loads(request_body([continuation.rest(asked)], "rid", adapter="policy-2"))
    assert body["input_ids"] == [4, 5, 6, 7, 8]
    assert body["sampling_params"]["max_new_tokens"] == 6
    assert body["sampling_params"]["sampling_seed"] == 5
    # Rows of 4, 5, 6 and 7 are there; that of 8 predicts the next token.
    assert body["routed_experts_start_len"] == 4
    assert body["lora_path"] == "policy-2"
    assert continuation.redrawn == 1


@pytest.mark.parametrize("tokens", [[], [20]])
def test_a_response_of_which_nothing_is_kept_is_asked_for_as_before(tokens):
    continuation = Continuation(decode)
    assert continuation.take(request(), answer(request(), tokens, 1)) is None
    assert continuation.partials == {}
    assert continuation.redrawn == len(tokens)
    assert continuation.rest(request()).prompt_ids == PROMPT
    whole = continuation.take(request(), answer(request(), [7], 2, "stop"))
    assert whole is not None
    assert whole.version_spans == (VersionSpan(2, 0, 1),)
    assert whole.text == "the engine's"


def test_an_update_right_after_an_update_keeps_what_there_was():
    for nothing in ([], [21]):
        whole = drawn(request(), ([7, 20], 1), (nothing, 2), ([8], 3, "length"))
        assert whole is not None
        assert whole.response_ids.tolist() == [7, 8]
        assert whole.version_spans == (VersionSpan(1, 0, 1), VersionSpan(3, 1, 2))
        assert whole.finish_reason == "length"
        assert usable_rows(whole.loss_mask, whole.columns).all()


def test_an_end_token_that_the_server_did_not_look_at_ends_nothing():
    """Token 0 ends a response. The server answers it with the abort before it notices."""
    continuation, asked = Continuation(decode), request()
    continuation.take(asked, answer(asked, [7, 8, 0], 1))
    assert continuation.partials["key"].response_ids.tolist() == [7, 8]
    whole = continuation.take(asked, answer(continuation.rest(asked), [9, 0], 2, "stop"))
    assert whole is not None
    assert whole.response_ids.tolist() == [7, 8, 9, 0]
    assert whole.text == "ghi"


def test_the_last_token_of_the_limit_may_be_asked_for_alone():
    continuation, asked = Continuation(decode), request(3)
    continuation.take(asked, answer(asked, [7, 8, 9], 1))
    rest = continuation.rest(asked)
    assert rest.sampling.max_new_tokens == 1
    whole = continuation.take(asked, answer(rest, [10], 2, "length"))
    assert whole is not None
    assert whole.response_ids.tolist() == [7, 8, 10]
    assert whole.text == "ghj"


def test_a_part_of_two_versions_was_recorded_by_the_weights_it_ended_with():
    """The server went on with 9 under version 2: it recorded the rows of 7 and 8, of version 1, again."""
    continuation, asked = Continuation(decode), request()
    part = answer(asked, [7, 8, 9, 20], 2)
    versions = np.array([1, 1, 2, 2], np.int32)
    assert continuation.take(asked, part.with_columns(weight_version=versions)) is None
    whole = continuation.take(asked, answer(continuation.rest(asked), [10], 3, "stop"))
    assert whole is not None
    assert whole.columns["weight_version"].tolist() == [1, 1, 2, 3]
    assert whole.columns["routing_version"].tolist() == [2, 2, 2, 3]


# --- stop texts


@pytest.mark.parametrize(
    ("tokens", "seam", "stop", "end"),
    [
        ("xab" + "cde", 3, ("abc",), 4),
        ("xa" + "bcde", 2, ("abc",), 4),
        ("xxa" + "abcd", 3, ("abc",), 6),  # within the rest: the server finds it
        ("xab" + "xabc", 3, ("abc",), None),  # begins after the seam
        ("xab" + "dab", 3, ("abc",), None),
        ("xab" + "c", 3, ("zz", "bc"), 4),
        ("abc" + "d", 3, ("abc",), None),  # before the seam: the server would have ended there
        ("ab" + "cd", 2, (), None),
    ],
)
def test_a_stop_text_that_spans_the_seam_is_found(tokens, seam, stop, end):
    ids = np.array(["_abcdefghijklmnopqrstuvwxyz".index(letter) for letter in tokens])
    found = seam_end(ids, seam, stop, decode)
    if tokens == "xxaabcd":
        assert found in (end, None)
    else:
        assert found == end


def test_a_response_ends_with_the_token_that_completes_a_stop_text_across_the_seam():
    """ "ab", then "cx" while the server looks for "abc" in its own tokens alone."""
    continuation, asked = Continuation(decode), request(stop=("abc",))
    assert continuation.take(asked, answer(asked, [7, 1, 2, 20], 1)) is None
    rest = answer(continuation.rest(asked), [3, 24, 25], 2, "length")
    whole = continuation.take(asked, rest)
    assert whole is not None
    assert whole.response_ids.tolist() == [7, 1, 2, 3]
    assert (whole.finish_reason, whole.text) == ("stop", "g")
    assert whole.version_spans == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 4))
    assert whole.columns["routed_experts"][:, 0].tolist()[-2:] == [[4, 51], [5, 52]]
    # One token of the first part, two after the stop text.
    assert continuation.redrawn == 3


def test_a_stop_text_across_the_seam_ends_a_response_that_was_aborted_again():
    whole = drawn(request(stop=("abc",)), ([1, 2, 20], 1), ([3, 24, 25], 2))
    assert whole is not None
    assert whole.response_ids.tolist() == [1, 2, 3]
    assert (whole.finish_reason, whole.text) == ("stop", "")


def test_the_text_ends_as_the_engine_s_does():
    def text(ids: list[int], reason: FinishReason, stop: tuple[str, ...] = ()) -> str:
        return text_of(Trajectory.of_response(PROMPT, ids, finish_reason=reason), stop, decode)

    assert text([1, 0, 2], "length") == "ab"
    assert text([1, 2, 0], "stop") == "ab"
    assert text([1, 2, 3], "stop") == "ab"  # 3 is a stop token
    assert text([1, 2, 3], "stop", ("zz", "bc")) == "a"


def test_turns_keep_the_topk_of_their_own_calls_and_what_is_between_has_none():
    """Turns of 7, 8 and of 9, 10, and 20, 21, 22 between them; K = 2, the sampled token first."""
    asked = request()
    turn = answer(asked, [7, 8], 1, "stop").with_columns(
        topk_ids=[[7, 1], [8, 2]], topk_log_probs=[[-0.1, -2.1], [-0.2, -2.2]]
    )
    further = request_after(asked, turn, 5, [20, 21, 22])
    assert (further.prompt_ids, further.columns["topk"]) == ([4, 5, 6, 7, 8, 20, 21, 22], 1)
    last = answer(further, [9, 10], 2, "stop").with_columns(
        topk_ids=[[9, 3], [10, 4]], topk_log_probs=[[-0.3, -2.3], [-0.4, -2.4]]
    )
    whole = join(turn, last)
    assert whole.token_ids.tolist() == [4, 5, 6, 7, 8, 20, 21, 22, 9, 10]
    assert whole.columns["topk_ids"].tolist() == [[7, 1], [8, 2], [9, 3], [10, 4]]
    log_probs = [[-0.1, -2.1], [-0.2, -2.2], [-0.3, -2.3], [-0.4, -2.4]]
    np.testing.assert_array_equal(whole.columns["topk_log_probs"], np.array(log_probs, np.float32))
    whole.check()
    # The loss reads row t for token t + 1: those of the sampled tokens alone have any.
    batch = pack([whole])
    assert batch.loss_mask.tolist() == [False, False, True, True, *[False] * 3, True, True, False]
    ids = [[-1, -1]] * 2 + [[7, 1], [8, 2]] + [[-1, -1]] * 3 + [[9, 3], [10, 4]] + [[-1, -1]]
    assert batch.columns["topk_ids"].tolist() == ids
    rows = batch.columns["topk_log_probs"][batch.loss_mask].numpy()
    np.testing.assert_array_equal(rows, np.array(log_probs, np.float32))


# --- recorded routing that was lost


def test_a_part_without_recorded_routing_loses_its_own_rows_alone():
    """The second of three parts waited in the server's queue, which frees what is recorded."""
    continuation, asked = Continuation(decode), request()
    continuation.take(asked, answer(asked, [7, 8, 20], 1))
    continuation.take(asked, answer(continuation.rest(asked), [9, 10, 21], 2, recorded=False))
    rest = continuation.rest(asked)
    assert rest.columns["routed_experts"].start == len(PROMPT) + 4 - 1
    whole = continuation.take(asked, answer(rest, [11], 3, "stop"))
    assert whole is not None
    assert whole.columns["routing_version"].tolist() == [1, 1, -1, -1, 3]
    usable = usable_rows(whole.loss_mask, whole.columns)
    assert usable.tolist() == [True] * 4 + [False, False, True]
    assert whole.discarded_rows == 2
    assert whole.columns["routed_experts"][usable, 0].tolist() == [
        [0, 51], [1, 51], [2, 51], [3, 51], [6, 53],
    ]  # fmt: skip
    whole.check()


def test_where_the_first_part_has_no_recording_the_next_one_records_all():
    continuation, asked = Continuation(decode), request()
    continuation.take(asked, answer(asked, [7, 8, 20], 1, recorded=False))
    rest = continuation.rest(asked)
    assert rest.columns["routed_experts"].start == 0
    whole = continuation.take(asked, answer(rest, [9], 2, "stop"))
    assert whole is not None
    assert whole.columns["routing_version"].tolist() == [2, 2, 2]
    assert usable_rows(whole.loss_mask, whole.columns).tolist() == [True, True, False, False, True]


def test_a_response_in_one_part_is_what_the_engine_answered():
    asked = request()
    single = answer(asked, [7, 8], 1, "stop")
    assert drawn(asked, ([7, 8], 1, "stop")).columns.keys() == single.columns.keys()
    assert first_tokens(single, 2) is single
    with pytest.raises(AssertionError, match="another request"):
        join(single, single)
    assert rest_of(asked, first_tokens(single, 1)).prompt_ids == [4, 5, 6, 7]


def test_a_column_of_all_tokens_that_another_module_declares_is_joined_too():
    """The answer has the rows of what was held again: the first ones are kept."""
    declare(Column("tested_input", ("int32",), Rows.INPUT))
    try:
        held = Trajectory.of_response(PROMPT, [7], columns={"tested_input": [1, 2, 3]})
        rest = Trajectory.of_response([*PROMPT, 7], [8], columns={"tested_input": [5, 6, 7, 8]})
        assert join(held, rest).columns["tested_input"].tolist() == [1, 2, 3, 8]
    finally:
        del COLUMNS["tested_input"]


# --- answers


def told(ids: list[int], reason: dict[str, Any], **meta: Any) -> dict[str, Any]:
    entries = [[-0.5, token, None] for token in ids]
    spans = [{"version": "3", "start": 0, "end": len(ids)}]
    common = {"finish_reason": reason, "output_token_logprobs": entries, "weight_versions": spans}
    return {"text": "", "output_ids": ids, "meta_info": common | meta}


ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


def test_an_aborted_answer_is_read_where_the_request_goes_on():
    asked = GenerationRequest("key", PROMPT, SamplingParams(8), {"routed_experts": SHAPE})
    going_on = replace(asked, continues=True)
    partial = parse_answer(told([7, 8], ABORT, routed_experts=rows(4, 3)), going_on)
    assert (partial.finish_reason, partial.response_ids.tolist()) == ("aborted", [7, 8])
    assert len(partial.columns["routed_experts"]) == 4
    lost = parse_answer(told([7, 8], ABORT), going_on)
    assert lost.columns.keys() == {"rollout_log_probs", "weight_version"}
    nothing = parse_answer(told([], ABORT), going_on)
    assert (nothing.sampled, nothing.finish_reason) == (0, "aborted")
    with pytest.raises(AbortedError):
        parse_answer(told([7, 8], ABORT), asked)
    failed = {"type": "abort", "message": "out of memory", "status_code": 500}
    with pytest.raises(AbortedError, match="out of memory"):
        parse_answer(told([7, 8], failed), going_on)


def test_rows_before_the_start_are_not_told():
    shape = replace(SHAPE, start=4)
    asked = GenerationRequest("key", (4, 5, 6, 7, 8), SamplingParams(6), {"routed_experts": shape})
    got = parse_answer(told([9], {"type": "stop"}, routed_experts=rows(5, 3)[4:]), asked)
    assert got.columns["routed_experts"][:, 0].tolist() == [[0, 0]] * 4 + [[4, 53]]


# --- generate_many


class AbortingClient:
    """Each call answers ``piece`` tokens of each response, one of which is drawn again; then the version counts on.

    ``lost``: numbers of calls that a lost server takes; ``dead``: the last server.
    """

    def __init__(self, length: int, piece: int, lost: tuple[int, ...] = (), dead: int = -1) -> None:
        self.length, self.piece, self.lost, self.dead = length, piece, lost, dead
        self.calls: list[tuple[int, ...]] = []
        self.rids: list[str] = []

    async def generate(self, requests: Any, rid: str) -> list[Trajectory]:
        number = len(self.calls)
        self.calls.append(tuple(len(r.prompt_ids) for r in requests))
        self.rids.append(rid)
        await asyncio.sleep(0)
        if number in self.lost:
            raise ServerLostError("one of many")
        if number == self.dead:
            raise EngineLostError("the last one")
        return [self._answer(r) for r in requests]

    def _answer(self, asked: GenerationRequest) -> Trajectory:
        assert asked.continues
        assert asked.sampling.max_new_tokens == self.length - (len(asked.prompt_ids) - 1)
        count = min(asked.sampling.max_new_tokens, self.piece)
        ends = count == asked.sampling.max_new_tokens
        begin = len(asked.prompt_ids)
        return Trajectory.of_response(
            asked.prompt_ids, range(begin, begin + count), finish_reason="length" if ends else "aborted"
        )  # fmt: skip

    async def abort(self, rid: str, count: int) -> None:
        raise AssertionError("nothing is late")

    async def watch(self, hang_timeout_s: float) -> None:
        await asyncio.sleep(60)


def generated(
    client: AbortingClient,
    count: int,
    continuation: Continuation,
    per_call: int = 1,
    play: Any = None,
) -> dict:
    limits = GenerationLimits(concurrency=4, responses_per_call=per_call)
    asked = [GenerationRequest(i, (1,), SamplingParams(client.length)) for i in range(count)]
    known = dict(enumerate("abcdefghij", start=1))

    def text(ids: Any, *, special: bool = True) -> str:
        return "".join(known[i] for i in ids)

    continuation.decode = text
    with AsyncRunner() as runner:
        work = generate_many(client, asked, limits, continuation=continuation, play=play)
        return runner.run(work)


@pytest.mark.parametrize("per_call", [1, 2])
def test_responses_are_gone_on_with_until_they_end(per_call):
    """6 tokens in answers of 3, one of which is drawn again: 2 + 2, then the last 2 end it."""
    client, continuation = AbortingClient(6, 3), Continuation(decode)
    results = generated(client, 4, continuation, per_call)
    assert [t.response_ids.tolist() for t in results.values()] == [[1, 2, 3, 4, 5, 6]] * 4
    shared = [(1,) * per_call] * (4 // per_call)
    assert sorted(client.calls) == sorted([*shared, *[(3,)] * 4, *[(5,)] * 4])
    assert continuation.redrawn == 4 * 2
    assert len(set(client.rids)) == len(client.rids)
    assert not any(a != b and b.startswith(a) for a in client.rids for b in client.rids)


def test_a_lost_server_costs_what_it_had_not_answered():
    client, continuation = AbortingClient(6, 3, lost=(1,)), Continuation(decode)
    (whole,) = generated(client, 1, continuation).values()
    assert client.calls == [(1,), (3,), (3,), (5,)]
    assert whole.sampled == 6


def test_after_the_loss_of_the_last_server_the_rest_alone_is_asked_for():
    continuation = Continuation(decode)
    with pytest.raises(GenerationInterruptedError) as caught:
        generated(AbortingClient(6, 3, dead=1), 1, continuation)
    assert caught.value.completed == {}
    assert continuation.partials[0].sampled == 2
    again = AbortingClient(6, 6)
    results = generated(again, 2, continuation, per_call=2)
    assert again.calls == [(3,), (1,)]
    assert [t.sampled for t in results.values()] == [6, 6]


def test_an_episode_that_is_played_again_begins_without_the_turn_that_was_lost():
    """The environment begins anew, and what it says may be something else."""

    async def play(asked: GenerationRequest, ask: Any) -> Trajectory:
        return await ask(asked)

    continuation = Continuation(decode)
    with pytest.raises(GenerationInterruptedError):
        generated(AbortingClient(6, 3, dead=1), 1, continuation, play=play)
    assert continuation.partials[0].sampled == 2
    redrawn = continuation.redrawn
    again = AbortingClient(6, 6)
    results = generated(again, 1, continuation, play=play)
    assert again.calls == [(1,)]
    assert continuation.redrawn == redrawn + 2
    assert [t.sampled for t in results.values()] == [6]
