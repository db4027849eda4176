"""Control the weights of an SGLang server: its control endpoints, its LoRA adapters, and the release of its memory."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import orjson
import torch
from torch import Tensor

from megatron_dppo import block_fp8
from megatron_dppo.engine.client import CONTROL_TIMEOUT_S, HttpClient
from megatron_dppo.engine.errors import (
    EngineAnswerError,
    EngineLostError,
    EngineMismatchError,
    EngineRequestError,
)
from megatron_dppo.engine.options import ADAPTER_DIGESTS
from megatron_dppo.engine.running_server import check_layout, check_placement
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.quantization import stored_tensors
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.weights.server import held_tensors
from megatron_dppo.weights.server.held_tensors import HeldTensors
from megatron_dppo.weights.server.server_state import MemoryTag, SchedulerState, state_of
from megatron_dppo.weights.shared_bytes import SharedBytes, shared_payloads

TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
_State = Literal["resident", "released", "unknown"]


class MemoryOrderError(RuntimeError):
    """A call would end the server, or needs memory that is released. The call was not sent."""


class Occupation:
    """The state of a server's memory, as this client knows it. Each of SGLang's tags names a memory with its own state.

        resident --release--> released --restore--> resident
            \\                    \\
             a failed call: unknown, for good

    SGLang 0.5.23 does not check the order of calls. Two calls end its scheduler: a restore of memory that is not
    released (KeyError), and a release while requests run (an assertion). On a GPU a second release, or weights that are
    sent into released memory, would end the scheduler too. Therefore this class rejects a call in a wrong order before
    it is sent. A restarted server has a new client, and all its memory is resident.

    ``url``: the server's address. ``released``: the tags whose memory is released; the constructor gets the tags that
    the server reports.
    """

    def __init__(self, url: str, released: Collection[MemoryTag] = ()) -> None:
        self._url = url
        self._states: dict[MemoryTag, _State] = dict.fromkeys(TAGS, "resident")
        self._states |= dict.fromkeys(released, "released")

    @property
    def released(self) -> frozenset[MemoryTag]:
        return frozenset(tag for tag, state in self._states.items() if state == "released")

    def check(self, action: str, *tags: MemoryTag) -> None:
        """Check that the memory of ``tags`` is resident, because ``action`` needs it. Without ``tags``, check all tags.

        Raises MemoryOrderError if this memory is released, and EngineLostError if its state is unknown.
        """
        self._expect("resident", action, tags or TAGS)

    @contextmanager
    def changing(
        self, action: str, state_before: _State, state_after: _State, tags: Collection[MemoryTag]
    ) -> Iterator[None]:
        """Enclose the call that changes the state of ``tags`` from ``state_before`` to ``state_after``.

        Raises as ``check``, before the call, if a tag is not in the state ``state_before``.
        """
        self._expect(state_before, action, tags)
        # The client cannot tell whether the server carried out a call that failed.
        self._states |= dict.fromkeys(tags, "unknown")
        yield
        self._states |= dict.fromkeys(tags, state_after)

    def _expect(self, state: _State, action: str, tags: Collection[MemoryTag]) -> None:
        """Raise, naming ``action``, unless all ``tags`` are known to SGLang and in ``state``."""
        if not tags or not set(tags) <= set(TAGS):
            raise ValueError(f"{action}: got {sorted(tags)}, expected some of {', '.join(TAGS)}")
        states = {tag: self._states[tag] for tag in TAGS if tag in tags}
        unknown_tags = [tag for tag, actual_state in states.items() if actual_state == "unknown"]
        if unknown_tags:
            raise EngineLostError(
                f"{self._url}: can't {action}: a call that released or restored {', '.join(unknown_tags)} failed, "
                "and the server must be started anew"
            )
        faults: list[str] = []
        for tag, actual_state in states.items():
            if actual_state != state:
                faults.append(f"{tag} is {actual_state}")
        if faults:
            raise MemoryOrderError(f"{self._url}: can't {action}: {', '.join(faults)}")


AXES = ".rotary_emb.axis_map"
"""End of the name of a buffer in models with M-RoPE, whose positions have several axes. The buffer has, for each rotary
frequency, the axis whose position is used. The buffer follows from config.json. No update writes the buffer, but
SGLang hashes it."""
PROBE = "rotary_emb.inv_freq"
"""Name of a tensor that SGLang's models accept and ignore, because older checkpoints contain it; no model has it."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused matrix of the engine -> the checkpoint's matrices, in the order of their rows in the fused matrix."""
_IDLE_WAIT_S = 5.0
"""Longest time that one flush call waits for running requests."""
_LEAVE_S = 5.0
"""Time limit of the call to leave a weight group."""
_SLACK_S = 10.0
"""The limit of a call that moves weights or memory is longer than ``timeout_s`` by this time."""
_SERVED = {"selector": "target"}
"""Part of the body of a call about weights. The call concerns only the served model: a draft model stays as it is."""


@dataclass(frozen=True)
class DecodedScores:
    """Log-probabilities ``[prompt][token]`` (nats) of the same tokens, computed twice.

    ``decode``: computed while the tokens were decoded. ``prefill``: computed by a prefill of prompt and tokens.
    """

    decode: list[list[float]]
    prefill: list[list[float]]


@dataclass(frozen=True)
class WireHeader:
    """The names, dtypes and shapes of the tensors in flat bytes, for SGLang's ``flattened_bucket``."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int


class EngineWeights:
    """Weight control of one running SGLang server (0.5.23); made by ``connect``.

    Attributes:
        places_directly: whether the server loads updates by direct placement. It can then receive what its ranks keep,
            in place of whole tensors.

    Coroutines send requests to the server, each with a time limit. They raise EngineLostError if the server does not
    respond, EngineRequestError if it rejects the request, and EngineAnswerError if the response does not have SGLang's
    form. Methods that are not coroutines are local.
    """

    def __init__(
        self,
        client: HttpClient,
        tensors: EngineTensors,
        dtype: torch.dtype,
        *,
        timeout_s: float,
        patience_s: float = CONTROL_TIMEOUT_S,
        state: SchedulerState | None = None,
    ) -> None:
        self.client = client
        self._timeout = timeout_s
        self._patience = patience_s
        self._dtype = dtype
        self.url = client.url
        self.tensors = tensors
        self.occupation = Occupation(client.url, () if state is None else state.released)
        self.groups = () if state is None else state.groups
        """Names of the weight groups that the server was in when the connection was made."""
        self.places_directly = state is not None and state.places_directly

    @classmethod
    async def connect(
        cls,
        client: HttpClient,
        shape: ModelShape,
        dtype: str,
        *,
        quantization: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = CONTROL_TIMEOUT_S,
    ) -> Self:
        """Read a server's layout. The result owns ``client``: its ``close`` also closes ``client``.

        Args:
            client: connects to the server with its admin key.
            shape: the shape of the model that trainer and server hold.
            dtype: dtype of the trainer's weights, "float32" or "bfloat16"; the server must have the same dtype.
            quantization: "fp8" if the server's linear layers and experts are block FP8, else None.
            timeout_s: time limit of every call that moves, hashes or scores weights.
            patience_s: time limit of every other call. A scheduler that does not respond in this time counts as hung.

        Raises:
            EngineMismatchError: weights of this server's layout or dtype cannot be verified.
            EngineError: the server does not respond, or its response has another form than SGLang's responses.
        """
        try:
            info = await client.get_json("/server_info", timeout_s=patience_s)
            check_layout(client.url, info, dtype, shape, quantization)
            tensors = EngineTensors.of_server(shape, info)
            state = state_of(client.url, info)
            places_directly = state is not None and state.places_directly
            check_placement(client.url, shape, places_directly=places_directly)
            if tensors.layout.attention_replicas > 1 and state is None:
                raise EngineMismatchError(
                    f"{client.url}: the server has {tensors.layout.attention_replicas} attention replicas and answers "
                    "a flush for the first of them, expected a server that was started by "
                    "megatron_dppo.engine.launch_server"
                )
        except LayoutError as error:
            await client.close()
            raise EngineMismatchError(f"{client.url}: {error}") from error
        except BaseException:
            await client.close()
            raise
        return cls(
            client,
            tensors,
            getattr(torch, dtype),
            timeout_s=timeout_s,
            patience_s=patience_s,
            state=state,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    @property
    def device(self) -> str:
        """The type of the device that holds the engine's weights, "cpu" or "cuda"."""
        return self.tensors.device

    @property
    def ranks(self) -> int:
        """The number of engine ranks that join a weight group."""
        return self.tensors.ranks

    @property
    def layout(self) -> tuple[EngineLayout, str]:
        """The layout and the device type; engines that share both have the same checksums."""
        return self.tensors.layout, self.device

    async def is_answering(self, timeout_s: float) -> bool:
        """Return whether the server responds within ``timeout_s``."""
        return await self.client.is_answering(timeout_s)

    async def is_scheduling(self, timeout_s: float) -> bool:
        """Return whether the server's scheduler responds within ``timeout_s``. A paused scheduler responds."""
        return await self.client.is_scheduling(timeout_s)

    async def pause_when_idle(self, timeout_s: float) -> bool:
        """Wait for running requests to finish, then pause; no request is aborted or interrupted.

        Returns False, with generation resumed, if requests still run after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            await self.pause()
            if await self._flush(0):
                return True
            await self.resume()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            # This flush waits for the running requests.
            await self._flush(min(remaining_s, _IDLE_WAIT_S))

    async def pause(self) -> None:
        """Pause generation: the server holds back every request, including running requests."""
        await self._call("/pause_generation", {"mode": "in_place"})

    async def interrupt(self) -> None:
        """Pause in the middle of responses.

        Running requests keep their tokens and return to the queue without keys and values. After ``resume`` the server
        recomputes the keys and values with the weights that it has then.
        """
        # Mode ``in_place`` would continue with keys and values of the old weights. Also, the old weights may still
        # compute a token at the pause, and mode ``in_place`` would label this token with the new version.
        await self._call("/pause_generation", {"mode": "retract"})
        await self.flush()

    async def resume(self) -> None:
        self.occupation.check("generate")
        await self._call("/continue_generation")

    async def set_version(self, label: str) -> None:
        """Set the ``weight_version`` of the server's responses, and check that the server reports ``label``."""
        await self._call(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )
        version = await self.version()
        if version != label:
            raise EngineAnswerError(
                f"{self.url}: weight_version is {version!r} after it was set to {label!r}"
            )

    async def version(self) -> str:
        info = await self.client.get_json("/model_info")
        with self._reading("/model_info"):
            return str(info["weight_version"])

    async def flush(self) -> None:
        """Drop the cached keys and values of the old weights. Raises EngineAnswerError if requests still run."""
        if not await self._flush(0):
            raise EngineAnswerError(f"{self.url}: the cache of the old weights was not flushed")

    async def score(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> list[list[float]]:
        """Return, by prompt, log p(token | tokens before it) of all tokens but the first, at temperature 1 (nats).

        ``adapter``: name of the adapter in the engine to score with; None: the model without adapters.
        """
        answer = await self._generate(prompts, 1, adapter)
        with self._reading("/generate"):
            # The first token has no log-probability.
            tokens, log_probs = _tokens_and_log_probs(answer, "input_token_logprobs", start=1)
        if tokens != [list(prompt[1:]) for prompt in prompts]:
            raise EngineAnswerError(f"{self.url}/generate: log-probs of other tokens than asked")
        return log_probs

    async def decode(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        end_before: int,
        adapter: str | None = None,
    ) -> DecodedScores:
        """Continue ``prompts`` greedily, and return the log-probabilities of at most ``count`` decoded tokens of each.

        The first token of a continuation comes from the prompt's prefill and is left out. A continuation ends before
        the token ``end_before``, because the server cannot score this token.
        """
        answer = await self._generate(prompts, 1 + count, adapter)
        with self._reading("/generate"):
            tokens, log_probs = _tokens_and_log_probs(answer, "output_token_logprobs", start=0)
        if any(len(new_ids) != 1 + count for new_ids in tokens):
            raise EngineAnswerError(
                f"{self.url}/generate: continuations have {[len(new_ids) for new_ids in tokens]} tokens, "
                f"expected {1 + count} each"
            )
        kept_tokens: list[list[int]] = []
        sequences: list[list[int]] = []
        for prompt, new_ids in zip(prompts, tokens, strict=True):
            length = 1 + count
            if end_before in new_ids:
                length = new_ids.index(end_before)
            kept_ids = new_ids[:length]
            kept_tokens.append(kept_ids)
            sequences.append([*prompt, *kept_ids])
        scores = await self.score(sequences, adapter)
        decode = []
        prefill = []
        for prompt, kept_ids, new_scores, sequence_scores in zip(
            prompts, kept_tokens, log_probs, scores, strict=True
        ):
            decode.append(new_scores[1 : len(kept_ids)])
            # ``sequence_scores`` begins with the sequence's second token, so this slice begins with the second new
            # token.
            prefill.append(sequence_scores[len(prompt) :])
        return DecodedScores(decode, prefill)

    async def _generate(
        self, prompts: Sequence[Sequence[int]], count: int, adapter: str | None
    ) -> bytes:
        """Return the answer to a greedy generation of ``count`` tokens, with all log-probabilities."""
        self.occupation.check("score")
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        return await self.client.request(
            "POST", "/generate", orjson.dumps(body), timeout_s=self._timeout
        )

    async def release(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Pause the server and release the memory of ``tags``. The contents of this memory are lost.

        No request may run: call ``pause_when_idle`` or ``interrupt`` before. Waiting requests keep their tokens. Raises
        MemoryOrderError, and EngineAnswerError if requests run; the server is then paused and keeps its memory.
        """
        self.occupation.check("release", *tags)
        # A paused and flushed server runs no request and starts none; a running request would end the server.
        await self.pause()
        if not await self._flush(0):
            raise EngineAnswerError(f"{self.url}: can't release memory: requests are running")
        with self.occupation.changing("release", "resident", "released", tags):
            await self._memory_call("/release_memory_occupation", {"tags": list(tags)})

    async def restore(self, tags: Collection[MemoryTag] | None = None) -> None:
        """Allocate the memory of ``tags`` again (None: all released tags). The server stays paused.

        The key-value cache is empty afterwards, and a weight update must send the weights. Raises MemoryOrderError.
        """
        if tags is None:
            # If no memory is released, ``changing`` below raises MemoryOrderError for all tags.
            tags = self.occupation.released or TAGS
        with self.occupation.changing("restore", "released", "resident", tags):
            await self._memory_call("/resume_memory_occupation", {"tags": list(tags)})

    async def open_group(
        self, address: str, port: int, name: str, backend: str, *, first_rank: int, size: int
    ) -> None:
        """Make the engine's ranks join a weight group, and return when all ranks of the group have joined.

        Args:
            address: host of the group's rendezvous.
            port: port of the group's rendezvous.
            name: the group's name.
            backend: a backend of torch.distributed.
            first_rank: rank that the engine's first rank has in the group; the engine's other ranks follow.
            size: number of ranks in the group.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        await self._long_call("/init_weights_update_group", body)

    async def close_group(self, name: str) -> None:
        """Make every engine rank leave the weight group ``name``, within a short time limit."""
        await self.client.control_json(
            "/destroy_weights_update_group", {"group_name": name}, timeout_s=_LEAVE_S
        )

    async def begin(self) -> None:
        """Open an update session, after closing a session that a failed update left open."""
        self.occupation.check("update weights", "weights")
        try:
            await self._call("/begin_weight_update", _SERVED)
        except EngineRequestError:
            # The server rejects a second session: close the open one first.
            await self._call("/end_weight_update")
            await self._call("/begin_weight_update", _SERVED)

    async def abandon(self) -> None:
        """Close an update session that a failed update left open. Changes that the engine received are not applied."""
        # A request for a session makes the engine drop these changes, also if the request is rejected.
        await self.begin()
        await self.end()

    async def receive(self, header: WireHeader, group: str) -> None:
        """Make the engine's ranks receive what ``header`` names in ``group``, and return when it is loaded."""
        body = {
            "names": header.names,
            "dtypes": header.dtypes,
            "shapes": header.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            **_SERVED,
        }
        await self._call_on_weights("/update_weights_from_distributed", body)

    async def receive_shared(self, by_rank: Sequence[Sequence[SharedBytes]]) -> None:
        """Make each engine rank open its messages in shared memory, and return when they are loaded."""
        body = {
            "serialized_named_tensors": shared_payloads(by_rank),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            **_SERVED,
        }
        await self._call_on_weights("/update_weights_from_tensor", body)

    async def load_folder(self, folder: str) -> None:
        """Make the engine load the safetensors of ``folder``. The folder must hold every weight."""
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        await self._call_on_weights("/update_weights_from_disk", body)

    async def end(self) -> None:
        """Close the update session."""
        await self._call_on_weights("/end_weight_update", {})

    async def checksums(self) -> list[dict[str, str]]:
        """Return, for each engine rank, the checksum of each tensor that the engine holds now."""
        return await self._by_rank("checksum")

    async def held_tensors(self) -> HeldTensors:
        """Return the tensors that the engine holds now. Only servers of ``launch_server`` answer this request."""
        ranks = await self._by_rank(held_tensors.ACTION)
        return HeldTensors(
            self.url,
            await self.version(),
            self.tensors.layout,
            self.device,
            self.tensors.quantized,
            tuple(ranks),
        )

    async def _by_rank(self, action: str) -> list[dict[str, str]]:
        """Return the answer of each engine rank to an ``action`` of ``/weights_checker``."""
        answer = await self._call_on_weights("/weights_checker", {"action": action, **_SERVED})
        with self._reading("/weights_checker"):
            by_rank: dict[int, dict[str, str]] = {}
            for rank_answer in answer["ranks"]:
                rank = rank_answer["parallelism_info"][0]["tp_rank"]
                by_rank[rank] = _without_constants(rank_answer["checksums"])
        if sorted(by_rank) != list(range(self.ranks)):
            raise EngineAnswerError(
                f"{self.url}: checksums of ranks {sorted(by_rank)}, expected 0 to {self.ranks - 1}"
            )
        return [by_rank[rank] for rank in range(self.ranks)]

    async def check_tensors(self) -> None:
        """Raise EngineMismatchError if an engine rank does not hold exactly the tensors of the run's model."""
        pairs = zip(await self.checksums(), self.tensors.sizes, strict=True)
        for rank, (checksums, sizes) in enumerate(pairs):
            missing_names = sorted(sizes.keys() - checksums.keys())
            extra_names = sorted(checksums.keys() - sizes.keys())
            if missing_names or extra_names:
                raise EngineMismatchError(
                    f"{self.url}: engine rank {rank} holds another model: it lacks "
                    f"{len(missing_names)} tensors ({', '.join(missing_names[:2])}), and has {len(extra_names)} "
                    f"that are not the run's ({', '.join(extra_names[:2])})"
                )

    async def load_adapter(self, name: str, folder: str) -> dict[str, str]:
        """Make the engine load the adapter in ``folder``, in PEFT's format, as ``name``.

        Returns the SHA-256 of each adapter tensor that the engine holds afterwards. Raises EngineAnswerError if the
        server's response has no digests.

        A request for generation names its adapter. If this adapter is not loaded, the server rejects the request.
        """
        # Do not use SGLang's other endpoint: it receives tensors over HTTP and unpickles them.
        body = {"lora_name": name, "lora_path": folder}
        answer = await self._call_on_weights("/load_lora_adapter", body)
        loaded_adapters = answer.get("loaded_adapters") or {}
        if ADAPTER_DIGESTS not in loaded_adapters:
            raise EngineAnswerError(
                f"{self.url}/load_lora_adapter does not say the digests of what it loaded, expected a server that "
                "was started by megatron_dppo.engine.launch_server"
            )
        with self._reading("/load_lora_adapter"):
            return dict(json.loads(loaded_adapters[ADAPTER_DIGESTS]))

    async def drop_adapters(self, *, kept: str | None = None) -> None:
        """Make the engine unload every adapter except ``kept``."""
        for name in await self.adapter_names():
            if name != kept:
                await self._call_on_weights("/unload_lora_adapter", {"lora_name": name})

    async def adapter_names(self) -> list[str]:
        """Return the names of the adapters that the engine has loaded."""
        models = await self.client.get_json("/v1/models")
        with self._reading("/v1/models"):
            # Only adapters have a parent: the model.
            return [model["id"] for model in models["data"] if model["parent"] is not None]

    def sent_shapes(
        self, tensors: Sequence[tuple[str, Sequence[int]]]
    ) -> list[tuple[str, Sequence[int]]]:
        """Return names and shapes of the tensors that ``encode`` makes of Hugging Face ``tensors`` (names, shapes)."""
        if not self.tensors.quantized:
            return list(tensors)
        return list(stored_tensors({name: tuple(dims) for name, dims in tensors}).items())

    def encode(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors to send for a bucket of Hugging Face tensors.

        An engine with block-FP8 weights receives its matrices quantised, each followed by its scales; any other engine
        receives the bucket's own tensors.
        """
        if not self.tensors.quantized:
            return list(bucket)
        encoded: list[tuple[str, Tensor]] = []
        for name, tensor in bucket:
            encoded += block_fp8.encode(name, tensor.detach())
        return encoded

    def probe_header(self) -> WireHeader:
        """Return the header of a tensor that changes no weight, with which a group is tried."""
        return WireHeader((PROBE,), (_name_of(self._dtype),), ((1,),), self._dtype.itemsize)

    def expected(self) -> ExpectedChecksums:
        """Return a new ExpectedChecksums for the buckets of an update."""
        return ExpectedChecksums(self.tensors, self._dtype)

    async def _call(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a call that neither moves weights nor generates."""
        await self.client.control_json(path, body, timeout_s=self._patience)

    async def _call_on_weights(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a call that moves or hashes weights. The weights must be resident."""
        self.occupation.check(f"POST {path}", "weights")
        return await self._long_call(path, body)

    async def _long_call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a call that may take as long as a transfer of weights."""
        # A caller that waits for several engines has ``timeout_s`` as its own limit, and a more detailed error. The
        # slack lets the caller's limit end first.
        limit = self._timeout + _SLACK_S
        return await self.client.control_json(path, body, timeout_s=limit)

    async def _memory_call(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a call that copies or maps memory; its response is null."""
        answer = await self.client.control(path, body, timeout_s=self._timeout + _SLACK_S)
        if orjson.loads(answer or b"null") is not None:
            raise EngineAnswerError(f"{self.url}{path}: answered {answer[:200]!r}, expected null")

    async def _flush(self, wait_s: float) -> bool:
        """Flush the cache; return False if requests still run after ``wait_s``."""
        try:
            limit = wait_s + self._patience
            await self.client.control(f"/flush_cache?timeout={wait_s}", timeout_s=limit)
        except EngineRequestError:
            return False
        return True

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Convert the block's errors to EngineAnswerError. The block reads a response, so its errors mean that the
        response has an unexpected form."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            form = f"{type(error).__name__}: {error}"
            raise EngineAnswerError(f"{self.url}{path}: an unexpected answer ({form})") from error


def _tokens_and_log_probs(
    answer: bytes, key: str, *, start: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ids and the log-probabilities ``[prompt][token]`` under ``key`` of an answer, from token ``start`` on.

    SGLang has an entry (log-probability, id, text) for each token.
    """
    tokens: list[list[int]] = []
    log_probs: list[list[float]] = []
    for prompt_answer in orjson.loads(answer):
        entries = prompt_answer["meta_info"][key][start:]
        tokens.append([int(entry[1]) for entry in entries])
        log_probs.append([float(entry[0]) for entry in entries])
    return tokens, log_probs


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fused_module(module: str) -> tuple[str, int]:
    """Return the engine's module that holds the rows of the checkpoint's ``module``, and the position of ``module``
    among the modules that the engine's module fuses. A module that is not fused has the position 0."""
    parent, _, leaf = module.rpartition(".")
    for fused_leaf, leaves in FUSED.items():
        if leaf in leaves:
            return f"{parent}.{fused_leaf}", leaves.index(leaf)
    return module, 0


def _without_constants(checksums: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's checksums without the buffers that follow from config.json."""
    return {name: digest for name, digest in checksums.items() if not name.endswith(AXES)}
