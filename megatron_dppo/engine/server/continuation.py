"""Continuation of responses that a weight update aborted (``rollout.interrupt: abort``).

The client keeps the tokens that the server returned. It requests the remaining tokens with prompt and kept tokens as
input, and joins kept and new tokens to one trajectory. The log-probabilities, Top-K and recorded routing of each part
come from the weights that sampled the part. ``register`` adds a hook to SGLang in servers that ``engine.launch_server``
starts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from megatron_dppo.data.columns import Rows, declared_column
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.engine.protocol import GenerationRequest
from megatron_dppo.engine.server import hooks
from megatron_dppo.engine.server.recordings import ABORTING

_ROUTING = "routed_experts"
_ROUTING_VERSION = "routing_version"
_LOST_ROW = -1
"""Routing version of a row whose recording is lost."""


class Decode(Protocol):
    """Function that decodes tokens to text, with or without ``special`` tokens."""

    def __call__(
        self, token_ids: Sequence[int] | np.ndarray, /, *, special: bool = True
    ) -> str: ...


@dataclass(eq=False)
class Continuation:
    """The unfinished responses of a generation.

    Attributes:
        decode: the tokenizer's decoder.
        partials: the kept part of each response, an ``aborted`` trajectory, by the key of its request.
        redrawn: number of tokens that servers sampled and that were discarded.
    """

    decode: Decode
    partials: dict[Hashable, Trajectory] = field(default_factory=dict)
    redrawn: int = 0

    def rest(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request for the tokens that ``request`` still lacks."""
        partial = self.partials.get(request.key)
        request = replace(request, continues=True)
        if partial is None:
            return request
        return rest_of(request, partial)

    def take(self, request: GenerationRequest, answer: Trajectory) -> Trajectory | None:
        """Add ``answer`` to the kept part. Return the whole response, or None if it is still unfinished."""
        if answer.finish_reason == "aborted":
            # The server has not checked whether the last token of an aborted response ends the response (an
            # end-of-sequence token, or the end of a stop text). Discard this token, whatever it is: discarding only
            # tokens that end a response would make these tokens rarer.
            answer = self._shortened(answer, max(answer.sampled - 1, 0))
        partial = self.partials.pop(request.key, None)
        response = answer
        stop = request.sampling.stop
        if partial is not None:
            response = join(partial, answer)
            end = seam_end(response.response_ids, partial.sampled, stop, self.decode)
            if end is not None:
                response = replace(self._shortened(response, end), finish_reason="stop")
        if response.finish_reason == "aborted":
            if response.sampled:
                self.partials[request.key] = response
            return None
        if partial is None:
            # The engine has decoded the whole response.
            return response
        return replace(response, text=text_of(response, stop, self.decode))

    def drop(self, request: GenerationRequest) -> None:
        """Discard the kept part of the response. The response is then sampled from the beginning."""
        partial = self.partials.pop(request.key, None)
        if partial is not None:
            self.redrawn += partial.sampled

    def _shortened(self, trajectory: Trajectory, sampled: int) -> Trajectory:
        """Return ``trajectory`` with its first ``sampled`` response tokens; count its other tokens as discarded."""
        self.redrawn += trajectory.sampled - sampled
        return first_tokens(trajectory, sampled)


def rest_of(request: GenerationRequest, partial: Trajectory) -> GenerationRequest:
    """Return the request for the tokens after ``partial``."""
    return request_after(request, partial, request.sampling.max_new_tokens - partial.sampled)


def request_after(
    request: GenerationRequest, partial: Trajectory, max_new_tokens: int, delta: Sequence[int] = ()
) -> GenerationRequest:
    """Return the request for at most ``max_new_tokens`` tokens after ``partial`` and the tokens ``delta``.

    The recorded routing begins with the row of the last kept token: this token is the input that predicts the next
    token.
    """
    columns = dict(request.columns)
    rows = partial.columns.get(_ROUTING)
    if rows is not None:
        columns[_ROUTING] = replace(columns[_ROUTING], start=len(rows))
    sampling = replace(request.sampling, max_new_tokens=max_new_tokens)
    prompt = [*partial.token_ids.tolist(), *delta]
    return replace(request, prompt_ids=prompt, sampling=sampling, columns=columns)


def first_tokens(trajectory: Trajectory, sampled: int) -> Trajectory:
    """Return the prompt and the first ``sampled`` tokens of the response, with their rows of every column."""
    removed = trajectory.sampled - sampled
    if not removed:
        return trajectory
    return trajectory.part(0, trajectory.length - removed)


def join(partial: Trajectory, answer: Trajectory) -> Trajectory:
    """Append the tokens of ``answer`` to ``partial``. The prompt of ``answer`` begins with the tokens of ``partial``.

    The result has the finish reason of ``answer``. Tokens of the prompt after ``partial`` were not sampled.
    """
    start = partial.length
    is_continuation = answer.prompt_ids[:start].tolist() == partial.token_ids.tolist()
    assert is_continuation, "the answer to another request"
    if not answer.sampled:
        return replace(partial, finish_reason=answer.finish_reason)
    # Keep the rows of ``partial``, although the answer may have rows of the same tokens.
    columns: dict[str, np.ndarray] = {}
    for name, array in partial.columns.items():
        if name not in (_ROUTING, _ROUTING_VERSION):
            new_rows = answer.columns[name][_repeated_rows(name, partial) :]
            columns[name] = np.concatenate([array, new_rows])
    return replace(
        partial,
        token_ids=answer.token_ids,
        loss_mask=np.concatenate([partial.loss_mask, answer.loss_mask[start:]]),
        columns=columns | _joined_routing(partial, answer),
        finish_reason=answer.finish_reason,
        text="",
        prompt_tokens=partial.prompt_tokens + answer.prompt_tokens,
        cached_tokens=partial.cached_tokens + answer.cached_tokens,
        verify_steps=partial.verify_steps + answer.verify_steps,
    )


def _repeated_rows(name: str, partial: Trajectory) -> int:
    """Return how many rows of ``partial``'s column ``name`` the next answer repeats."""
    if declared_column(name).rows is Rows.SAMPLED:
        return 0
    return len(partial.columns[name])


def _joined_routing(partial: Trajectory, answer: Trajectory) -> dict[str, np.ndarray]:
    """Return the joined recorded routing, and the weight version that recorded the row of each sampled token."""
    routing_before = partial.columns.get(_ROUTING)
    routing_after = answer.columns.get(_ROUTING)
    if routing_before is None:
        if routing_after is None:
            return {}
        # The server recorded the partial response as the prompt of this answer, with the weights of this answer.
        return {
            _ROUTING: routing_after,
            _ROUTING_VERSION: _routing_versions(answer, partial.sampled + answer.sampled),
        }
    versions_before = partial.columns.get(_ROUTING_VERSION)
    if versions_before is None:
        versions_before = _routing_versions(partial, partial.sampled)
    if routing_after is None and answer.length - partial.length > answer.sampled:
        # The tokens between two turns have lost rows too. The column of versions has entries of sampled tokens only. So
        # it cannot mark the rows of other tokens as lost: discard the whole routing.
        return {}
    if routing_after is None:
        # Fill the lost rows with valid expert ids, because a recording is checked as a whole.
        rows = np.repeat(routing_before[-1:], answer.sampled, axis=0)
        new_versions = np.full(answer.sampled, _LOST_ROW, np.int32)
    else:
        rows = routing_after[len(routing_before) :]
        new_versions = _routing_versions(answer, answer.sampled)
    return {
        _ROUTING: np.concatenate([routing_before, rows]),
        _ROUTING_VERSION: np.concatenate([versions_before, new_versions]),
    }


def _routing_versions(answer: Trajectory, tokens: int) -> np.ndarray:
    """Return the weight version that recorded the last ``tokens`` rows of an answer: the version at the answer's end.

    A server that continues a response after a weight update records all rows again under the new weights.
    """
    return np.full(tokens, answer.column("weight_version")[-1], np.int32)


def seam_end(
    response_ids: np.ndarray, seam: int, stop: Sequence[str], decode: Decode
) -> int | None:
    """Return the length of the response up to the end of a stop text that crosses the seam.

    The seam is after the first ``seam`` tokens. The server finds only stop texts within the tokens of one call. Returns
    None if no stop text crosses the seam.
    """
    if not stop:
        return None
    # A token has at least one byte, so a text of n bytes spans at most n tokens. One more token is a margin.
    window = max(len(text.encode()) for text in stop) + 1
    text_before = decode(response_ids[max(seam - window, 0) : seam])
    # A stop text before the seam did not end the response there, so it does not count.
    new_stop_texts = [text for text in stop if text not in text_before]
    for end in range(seam + 1, min(seam + window, len(response_ids) + 1)):
        text = decode(response_ids[max(end - window, 0) : end])
        if any(stop_text in text for stop_text in new_stop_texts):
            return end
    return None


def text_of(
    response: Trajectory, stop: Sequence[str], decode: Decode, *, special: bool = False
) -> str:
    """Decode a response as the engine does: up to the stop text, or without the token that ended the response.

    ``special``: whether to include special tokens. The engine does not.
    """
    text = decode(response.response_ids, special=special)
    if response.finish_reason != "stop":
        return text
    ends = [text.index(stop_text) for stop_text in stop if stop_text in text]
    if ends:
        return text[: min(ends)]
    return decode(response.response_ids[:-1], special=special)


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(ABORTING, answer_waiting, "before")


def answer_waiting(scheduler: Any, aborted: Any) -> None:
    """Hook before an abort: answer the aborted requests that already have tokens, but wait in the queue again.

    A full cache sends running requests back to the queue. This hook sends their tokens to the client, as SGLang does
    for running requests. SGLang itself would discard the tokens that it has not sent yet: up to 49 of each request.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    waiting_requests: list[Any] = []
    for request in scheduler.waiting_queue:
        is_aborted = aborted.abort_all or request.rid.startswith(aborted.rid)
        if request.output_ids and is_aborted:
            waiting_requests.append(request)
    for request in waiting_requests:
        scheduler.waiting_queue.remove(request)
        scheduler._release_aborted_request(request)
        request.finished_reason = FINISH_ABORT()
        scheduler.output_streamer.stream_output([request], request.return_logprob)
