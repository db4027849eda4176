"""The engine's half of a weight update: SGLang's control endpoints, its bucket format, its own LoRA; which of its
memory is let go of."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Literal, Self

import orjson
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_dppo.engine.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.engine.client import CONTROL_TIMEOUT_S, HttpClient
from megatron_dppo.engine.errors import (
    EngineAnswerError,
    EngineLostError,
    EngineMismatchError,
    EngineRequestError,
)
from megatron_dppo.engine.options import ADAPTER_DIGESTS, check_layout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.mapping import engine_inputs
from megatron_dppo.model.shape import ModelShape

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights", "cuda_graph")
_State = Literal["resident", "released", "unknown"]


class MemoryOrderError(RuntimeError):
    """A call that the server would not survive, or that needs memory which was released: a fault of the caller. Nothing
    was sent."""


class Occupation:
    """Which memory of the server at ``url`` is let go of, as its client knows: SGLang's tags, each in a state of its
    own.

        resident --release--> released --restore--> resident
            \\                    \\
             a call that failed: unknown, for good

    SGLang 0.5.23 checks none of it. Restoring what was not released ends its scheduler (KeyError), and so does a
    release while requests run (an assertion); a second release, or weights that are sent into released memory, would on
    a GPU. So a call in a wrong order is never sent. A server that was started anew is all resident, and has a new
    client.

    ``released``: the tags whose memory it has let go of.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._states: dict[MemoryTag, _State] = dict.fromkeys(TAGS, "resident")

    @property
    def released(self) -> frozenset[MemoryTag]:
        return frozenset(tag for tag, state in self._states.items() if state == "released")

    def check(self, action: str, *tags: MemoryTag) -> None:
        """Raise MemoryOrderError where one of ``tags`` (none: of all), which ``action`` needs, is not resident, and
        EngineLostError where that is not known."""
        self._expect("resident", action, tags or TAGS)

    @contextmanager
    def changing(
        self, action: str, before: _State, after: _State, tags: Collection[MemoryTag]
    ) -> Iterator[None]:
        """Around the call, the ``action``, that takes ``tags`` from one state to another. Raises as ``check``, before
        it, where one of them is not in the first."""
        self._expect(before, action, tags)
        # Whether a call that fails has been carried out can't be told.
        self._states |= dict.fromkeys(tags, "unknown")
        yield
        self._states |= dict.fromkeys(tags, after)

    def _expect(self, state: _State, action: str, tags: Collection[MemoryTag]) -> None:
        if not tags or not set(tags) <= set(TAGS):
            raise ValueError(f"{action}: got {sorted(tags)}, expected some of {', '.join(TAGS)}")
        states = {tag: self._states[tag] for tag in TAGS if tag in tags}
        if unknown := [tag for tag, actual in states.items() if actual == "unknown"]:
            raise EngineLostError(
                f"{self._url}: can't {action}: a call that released or restored {', '.join(unknown)} failed, and the "
                "server must be started anew"
            )
        if wrong := [f"{tag} is {actual}" for tag, actual in states.items() if actual != state]:
            raise MemoryOrderError(f"{self._url}: can't {action}: {', '.join(wrong)}")


PROBE = "rotary_emb.inv_freq"
"""A tensor that no model has and that SGLang's models take and drop: older checkpoints carry it."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrix of the engine -> matrices of the checkpoint whose rows it holds one after another."""
_IDLE_WAIT_S = 5.0
_LEAVE_S = 5.0
_SLACK_S = 10.0
_SHARING = threading.Lock()
_DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``'s arguments: the device's index."""


@dataclass(frozen=True)
class WireHeader:
    """What tells the tensors of a bucket's flat bytes apart: SGLang's ``flattened_bucket``."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int


class EngineWeights:
    """Weight control of one SGLang server (0.5.23), which must be up; made by ``connect``.

    Coroutines speak to the server, each in bounded time; they raise EngineLostError where it does not
    answer, EngineRequestError where it refuses, and EngineAnswerError where its answer is another than SGLang's.
    Methods that are not coroutines are local.
    """

    def __init__(
        self,
        client: HttpClient,
        tensors: EngineTensors,
        dtype: torch.dtype,
        *,
        timeout_s: float,
        patience_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        self.client = client
        self._timeout = timeout_s
        self._patience = patience_s
        self._dtype = dtype
        self.url = client.url
        self.tensors = tensors
        self.occupation = Occupation(client.url)

    @classmethod
    async def connect(
        cls,
        client: HttpClient,
        shape: ModelShape,
        dtype: str,
        *,
        timeout_s: float = 600.0,
        patience_s: float = CONTROL_TIMEOUT_S,
    ) -> Self:
        """Ask a server for its layout and take over ``client``, which ``close`` closes.

        Args:
            client: opens the server under its admin key.
            shape: of the model that both hold.
            dtype: of the trainer's weights, "float32" or "bfloat16"; the server must hold the same.
            timeout_s: bounds every call that moves, hashes or scores weights.
            patience_s: bounds every other call: one that a hung scheduler does not answer.

        Raises:
            EngineMismatchError: weights of this server's layout or type can't be verified.
            EngineError: it does not answer as it must.
        """
        try:
            info = await client.get_json("/server_info", timeout_s=patience_s)
            check_layout(client.url, info, dtype, shape)
            tensors = EngineTensors(shape, int(info["tp_size"]), str(info["device"]))
        except LayoutError as error:
            await client.close()
            raise EngineMismatchError(f"{client.url}: {error}") from error
        except BaseException:
            await client.close()
            raise
        limits = {"timeout_s": timeout_s, "patience_s": patience_s}
        return cls(client, tensors, getattr(torch, dtype), **limits)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    @property
    def device(self) -> str:
        """Type of the device that holds the engine's weights, "cpu" or "cuda"."""
        return self.tensors.device

    @property
    def ranks(self) -> int:
        """Engine ranks that join a broadcast group."""
        return self.tensors.ranks

    @property
    def layout(self) -> tuple[int, str]:
        """Engines that share it have the same checksums."""
        return self.ranks, self.device

    # --- serving

    async def answers(self, timeout_s: float) -> bool:
        """Whether the server answers at all within ``timeout_s``."""
        return await self.client.answers(timeout_s)

    async def schedules(self, timeout_s: float) -> bool:
        """Whether its scheduler answers within ``timeout_s``; a paused one does."""
        return await self.client.schedules(timeout_s)

    async def pause_when_idle(self, timeout_s: float) -> bool:
        """Let running requests finish, then hold back new ones; none is aborted or cut in two.

        Returns False where some still run after ``timeout_s``: generation then goes on as before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            await self.pause()
            if await self._flush(0):
                return True
            await self.resume()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # SGLang's flush waits for the running requests.
            await self._flush(min(left, _IDLE_WAIT_S))

    async def pause(self) -> None:
        """Hold back every request, running ones too."""
        await self._order("/pause_generation", {"mode": "in_place"})

    async def interrupt(self) -> None:
        """Pause in the middle of responses: they keep their tokens, go back into the queue without keys and values, and
        go on after ``resume``, which computes those anew with the weights of that time."""
        # Mode ``in_place`` would go on with keys and values of the old weights, and give the token whose result was
        # still pending the new version's name.
        await self._order("/pause_generation", {"mode": "retract"})
        await self.flush()

    async def resume(self) -> None:
        self.occupation.check("generate")
        await self._order("/continue_generation")

    async def set_version(self, label: str) -> None:
        """Set the ``weight_version`` that answers carry; what the server confirms must be it."""
        await self._order(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )
        if (version := await self.version()) != label:
            raise EngineAnswerError(
                f"{self.url}: weight_version is {version!r} after it was set to {label!r}"
            )

    async def version(self) -> str:
        info = await self.client.get_json("/model_info")
        with self._reading("/model_info"):
            return str(info["weight_version"])

    async def flush(self) -> None:
        """Drop the cached keys and values of the old weights. Raises EngineAnswerError if it can't."""
        if not await self._flush(0):
            raise EngineAnswerError(f"{self.url}: the cache of the old weights was not flushed")

    async def score(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> list[list[float]]:
        """log p(token | tokens before it) at temperature 1 of all but the first, by prompt (nats).

        ``adapter``: name of the engine's adapters to score with.
        """
        self.occupation.check("score")
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = await self.client.request(
            "POST", "/generate", orjson.dumps(body), timeout_s=self._timeout
        )
        with self._reading("/generate"):
            scored = [a["meta_info"]["input_token_logprobs"][1:] for a in orjson.loads(answer)]
            tokens = [[entry[1] for entry in entries] for entries in scored]
            log_probs = [[float(entry[0]) for entry in entries] for entries in scored]
        if tokens != [list(prompt[1:]) for prompt in prompts]:
            raise EngineAnswerError(f"{self.url}/generate: log-probs of other tokens than asked")
        return log_probs

    # --- memory that a trainer on the same GPUs takes meanwhile

    async def release(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Let go of the memory of ``tags`` and hold back every request; what is in it is lost.

        No request may run: finish them (``pause_when_idle``), or pause in mode ``retract``; waiting ones keep their
        tokens. Raises MemoryOrderError, and EngineAnswerError where requests run: it is paused then, with its memory.
        """
        self.occupation.check("release", *tags)
        # Paused and flushed, it runs nothing and can start nothing: the server would not survive the call otherwise.
        await self.pause()
        if not await self._flush(0):
            raise EngineAnswerError(f"{self.url}: can't release memory: requests are running")
        with self.occupation.changing("release", "resident", "released", tags):
            await self._bare_order("/release_memory_occupation", {"tags": list(tags)})

    async def restore(self, tags: Collection[MemoryTag] | None = None) -> None:
        """Take the memory of ``tags`` (None: of all that is released) again: empty key-value cache, weights that an
        update must bring. It stays paused. Raises MemoryOrderError."""
        chosen = (self.occupation.released or TAGS) if tags is None else tags
        with self.occupation.changing("restore", "released", "resident", chosen):
            await self._bare_order("/resume_memory_occupation", {"tags": list(chosen)})

    # --- the broadcast group

    async def open_group(
        self, address: str, port: int, name: str, backend: str, *, first_rank: int, size: int
    ) -> None:
        """Have the engine's ranks, from ``first_rank`` of ``size`` on, join the broadcast group ``name`` of
        torch.distributed's ``backend`` whose rendezvous is at ``address``; returns when all of it have joined."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        await self._long_order("/init_weights_update_group", body)

    async def close_group(self, name: str) -> None:
        """Have every engine rank leave the broadcast group ``name``; not waited for long."""
        await self.client.control_json(
            "/destroy_weights_update_group", {"group_name": name}, timeout_s=_LEAVE_S
        )

    # --- weights

    async def begin(self) -> None:
        """Open an update session; one that a failed update left open is closed first."""
        self.occupation.check("update weights", "weights")
        try:
            await self._order("/begin_weight_update")
        except EngineRequestError:
            await self._order("/end_weight_update")
            await self._order("/begin_weight_update")

    async def receive(self, header: WireHeader, group: str) -> None:
        """Have the engine join the broadcast of a bucket and load it; returns when it has."""
        body = {
            "names": header.names,
            "dtypes": header.dtypes,
            "shapes": header.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._move("/update_weights_from_distributed", body)

    async def receive_shared(self, header: WireHeader, data: Tensor) -> None:
        body = {
            "serialized_named_tensors": shared_payloads(header, self._dtype, data, self.ranks),
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._move("/update_weights_from_tensor", body)

    async def load_folder(self, folder: str) -> None:
        """Have the engine load the safetensors of ``folder``, which must hold every weight."""
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        await self._move("/update_weights_from_disk", body)

    async def end(self) -> None:
        await self._move("/end_weight_update", {})

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what the engine holds now."""
        answer = await self._move("/weights_checker", {"action": "checksum"})
        with self._reading("/weights_checker"):
            by_rank = {
                rank["parallelism_info"][0]["tp_rank"]: dict(rank["checksums"])
                for rank in answer["ranks"]
            }
        if sorted(by_rank) != list(range(self.ranks)):
            raise EngineAnswerError(
                f"{self.url}: checksums of ranks {sorted(by_rank)}, expected 0 to {self.ranks - 1}"
            )
        return [by_rank[rank] for rank in range(self.ranks)]

    async def check_tensors(self) -> None:
        pairs = zip(await self.checksums(), self.tensors.sizes, strict=True)
        for rank, (actual, sizes) in enumerate(pairs):
            lacks, has = sorted(sizes.keys() - actual.keys()), sorted(actual.keys() - sizes.keys())
            if lacks or has:
                raise EngineMismatchError(
                    f"{self.url}: engine rank {rank} holds another model: it lacks "
                    f"{len(lacks)} tensors ({', '.join(lacks[:2])}), and has {len(has)} that are not the "
                    f"run's ({', '.join(has[:2])})"
                )

    # --- adapters, loaded and dropped by name while the engine serves the frozen model

    async def load_adapter(self, name: str, folder: str) -> dict[str, str]:
        """Have the engine load ``folder``, in PEFT's format, as ``name``; SHA-256 by tensor of what it then holds.

        A request names the adapters that it wants; one that names adapters that are not there is refused, never
        answered without them. Raises EngineAnswerError where the server can't tell the digests.
        """
        # SGLang's other route takes tensors over HTTP and unpickles them, so it is not used.
        answer = await self._move("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        loaded = answer.get("loaded_adapters") or {}
        if ADAPTER_DIGESTS not in loaded:
            raise EngineAnswerError(
                f"{self.url}/load_lora_adapter does not say the digests of what it loaded, expected a server that "
                "was started by megatron_dppo.engine.launch_server"
            )
        with self._reading("/load_lora_adapter"):
            return dict(json.loads(loaded[ADAPTER_DIGESTS]))

    async def drop_adapters(self, keep: str | None = None) -> None:
        for name in await self.adapter_names():
            if name != keep:
                await self._move("/unload_lora_adapter", {"lora_name": name})

    async def adapter_names(self) -> list[str]:
        models = await self.client.get_json("/v1/models")
        with self._reading("/v1/models"):
            return [model["id"] for model in models["data"] if model["parent"] is not None]

    # --- the bytes of a bucket, and their checksums

    def inputs(self, name: str) -> list[str]:
        """The names under which the engine must be sent a Hugging Face tensor."""
        return engine_inputs(self.tensors.shape, name)

    def header(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> WireHeader:
        """How a bucket of these Hugging Face tensors (names, shapes) lies in its flat bytes."""
        inputs = [(n, tuple(dims)) for name, dims in tensors for n in self.inputs(name)]
        return WireHeader(
            tuple(name for name, _ in inputs),
            (self._dtype_name,) * len(inputs),
            tuple(dims for _, dims in inputs),
            sum(torch.Size(dims).numel() for _, dims in inputs) * self._dtype.itemsize,
        )

    def probe_header(self) -> WireHeader:
        """Of a bucket that changes nothing, with which a group's first connections are made."""
        return WireHeader((PROBE,), (self._dtype_name,), ((1,),), self._dtype.itemsize)

    def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """The pieces, 1-D ``uint8``, that make a bucket's flat bytes as its ``header`` says."""
        parts = [t for name, t in bucket for _ in self.inputs(name)]
        return [t.detach().reshape(-1).view(torch.uint8) for t in parts]

    def expected(self) -> ExpectedChecksums:
        """An empty accumulator of what ``checksums`` must say after the next complete update."""
        return ExpectedChecksums(self.tensors, self._dtype)

    @property
    def _dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    async def _order(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """A call that neither moves weights nor generates."""
        await self.client.control_json(path, body, timeout_s=self._patience)

    async def _move(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.occupation.check(f"POST {path}", "weights")
        return await self._long_order(path, body)

    async def _long_order(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # Whoever waits for several calls keeps the time itself, and says more.
        limit = self._timeout + _SLACK_S
        return await self.client.control_json(path, body, timeout_s=limit)

    async def _bare_order(self, path: str, body: Mapping[str, Any]) -> None:
        """A call that copies or maps memory, and answers null."""
        answer = await self.client.control(path, body, timeout_s=self._timeout + _SLACK_S)
        if orjson.loads(answer or b"null") is not None:
            raise EngineAnswerError(f"{self.url}{path}: answered {answer[:200]!r}, expected null")

    async def _flush(self, wait_s: float) -> bool:
        """Flush the cache; False where requests still run after ``wait_s``."""
        try:
            limit = wait_s + self._patience
            await self.client.control(f"/flush_cache?timeout={wait_s}", timeout_s=limit)
        except EngineRequestError:
            return False
        return True

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """An answer of another form is the engine's fault, where the same error elsewhere would be ours."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            form = f"{type(error).__name__}: {error}"
            raise EngineAnswerError(f"{self.url}{path}: an unexpected answer ({form})") from error


def fused_module(module: str) -> tuple[str, int]:
    """The engine's module that holds the rows of the checkpoint's ``module``, and which of its parts they are."""
    parent, _, last = module.rpartition(".")
    for fused, members in FUSED.items():
        if last in members:
            return f"{parent}.{fused}", members.index(last)
    return module, 0


# --- a bucket handed to an engine on the same host as a handle of memory, not as bytes

# SGLang unpickles what it is given; this side only pickles, and imports nothing of SGLang. On a GPU the handle is
# one of CUDA IPC: written after SGLang's and torch's sources, not yet run on a GPU.


def shared_empty(size: int, device: torch.device | str) -> Tensor:
    """``size`` bytes that another process can open; on a CPU in a file under ``/dev/shm``."""
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    with _file_system_sharing():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


def shared_payloads(header: WireHeader, dtype: torch.dtype, data: Tensor, ranks: int) -> list[str]:
    """One serialised handle of ``data`` for each engine rank, in base64."""
    bucket = {"flattened_tensor": data, "metadata": _metadata(header, dtype)}
    # A handle counts as one holder of the memory until its rank has opened and dropped it: each needs its own.
    with _file_system_sharing():
        return [base64.b64encode(_Pickler.dumps(bucket)).decode() for _ in range(ranks)]


def named_by_uuid(
    rebuild: Callable[..., Any], arguments: tuple[Any, ...], uuid_of: Callable[[int], str]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """torch's recipe for a tensor in another process, with a CUDA device named by its UUID."""
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    # An index means another device to a process with another CUDA_VISIBLE_DEVICES; SGLang takes a UUID in its place
    # (sglang.srt.utils.patch_torch).
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = uuid_of(changed[_DEVICE_ARGUMENT])
    return rebuild, tuple(changed)


def _metadata(header: WireHeader, dtype: torch.dtype) -> list[SimpleNamespace]:
    """What SGLang reads of its ``FlattenedTensorMetadata``, in a type that its unpickler admits."""
    entries, end = [], 0
    for name, dims in zip(header.names, header.shapes, strict=True):
        shape = torch.Size(dims)
        size = shape.numel() * dtype.itemsize
        start, end = end, end + size
        span = {"start_idx": start, "end_idx": end, "numel": size}
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=dtype, **span))
    return entries


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            return named_by_uuid(rebuild, arguments, _uuid)
        return NotImplemented


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    # torch's other strategy sends file descriptors, which can't cross to a process that is no child: they kill the
    # server. The strategy is the process's: one thread allocates a bucket while another hands over the one before.
    with _SHARING:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
