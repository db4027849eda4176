"""The engine's half of a weight update: SGLang's control endpoints and its bucket format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.engine.checksums import ExpectedChecksums
from megatron_dppo.engine.control import CONTROL_TIMEOUT_S, EngineControl
from megatron_dppo.engine.errors import (
    EngineAnswerError,
    EngineMismatchError,
    EngineRequestError,
)
from megatron_dppo.engine.ipc import shared_empty, shared_payloads
from megatron_dppo.engine.tensors import EngineTensors
from megatron_dppo.model.engine_layout import engine_inputs
from megatron_dppo.model.shape import ModelShape

_IDLE_WAIT_S = 5.0
_LEAVE_S = 5.0
_SINGLE = ("pp_size", "dp_size", "ep_size", "moe_dp_size")


@dataclass(frozen=True)
class WireHeader:
    """What tells the tensors of a bucket's flat bytes apart: SGLang's ``flattened_bucket``."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int


class EngineWeights:
    """Weight control of one SGLang server (0.5.23), which must be up.

    ``dtype``: the weights' type, "float32" or "bfloat16"; the server must hold the same.
    ``timeout_s`` bounds every call that moves or hashes weights. Raises EngineMismatchError for a
    server whose layout this module can't verify. Every method raises EngineLostError where the
    server doesn't answer and EngineRequestError where it refuses.
    """

    def __init__(
        self,
        url: str,
        shape: ModelShape,
        dtype: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url
        self._control = EngineControl(url, api_key=api_key, admin_api_key=admin_api_key)
        self._timeout = timeout_s
        self._dtype = getattr(torch, dtype)
        info = self._control.get("/server_info")
        _check_server(url, info, dtype, shape)
        self.device = str(info["device"])
        self.tensors = EngineTensors(shape, int(info["tp_size"]), self.device)

    @property
    def ranks(self) -> int:
        """Engine ranks that join a broadcast group."""
        return self.tensors.ranks

    def answers(self, timeout_s: float) -> bool:
        """Whether the server answers at all within ``timeout_s``."""
        return self._control.answers(timeout_s)

    def pause_when_idle(self, timeout_s: float) -> bool:
        """Let running requests finish, then hold back new ones; none is aborted or cut in two.

        False where some still run after ``timeout_s``: generation then goes on as before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.pause()
            if self._flush(0):
                return True
            self.resume()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._flush(min(left, _IDLE_WAIT_S))  # waits for the running requests

    def pause(self) -> None:
        """Hold back every request, running ones too."""
        self._control.post("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        """Let generation go on."""
        self._control.post("/continue_generation", {})

    def set_version(self, label: str) -> None:
        """Set the ``weight_version`` that answers carry; what the server confirms must be it."""
        self._control.post(
            "/update_weight_version", {"new_version": label, "abort_all_requests": False}
        )
        if (got := self.version()) != label:
            raise EngineAnswerError(
                f"{self.url}: weight_version is {got!r} after it was set to {label!r}"
            )

    def version(self) -> str:
        """The ``weight_version`` that answers carry."""
        return str(self._control.get("/model_info")["weight_version"])

    def open_group(
        self, address: str, port: int, name: str, backend: str, *, first_rank: int, size: int
    ) -> None:
        """Have the engine's ranks join the group ``name`` of ``size``, as ``first_rank`` and after.

        Blocks until all have joined.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        self._control.post("/init_weights_update_group", body, self._timeout)

    def close_group(self, name: str) -> None:
        """Have every engine rank leave the broadcast group ``name``. A courtesy: not waited for long."""
        self._control.post("/destroy_weights_update_group", {"group_name": name}, _LEAVE_S)

    def begin(self) -> None:
        """Open an update session; one that a failed update left open is closed first."""
        try:
            self._control.post("/begin_weight_update", {})
        except EngineRequestError:
            self._control.post("/end_weight_update", {})
            self._control.post("/begin_weight_update", {})

    def header(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> WireHeader:
        """How a bucket of these Hugging Face tensors (names, shapes) lies in its flat bytes."""
        inputs = [(n, tuple(dims)) for name, dims in tensors for n in self.inputs(name)]
        return WireHeader(
            tuple(name for name, _ in inputs),
            (str(self._dtype).removeprefix("torch."),) * len(inputs),
            tuple(dims for _, dims in inputs),
            sum(torch.Size(dims).numel() for _, dims in inputs) * self._dtype.itemsize,
        )

    def inputs(self, name: str) -> list[str]:
        """The names under which the engine must be sent a Hugging Face tensor."""
        return engine_inputs(self.tensors.shape, name)

    def pack(self, bucket: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """The pieces, 1-D ``uint8``, that make a bucket's flat bytes as its ``header`` says."""
        parts = [t for name, t in bucket for _ in self.inputs(name)]
        return [t.detach().reshape(-1).view(torch.uint8) for t in parts]

    def receive(self, header: WireHeader, group: str) -> None:
        """Have the engine join the broadcast of a bucket and load it; blocks until it has."""
        body = {
            "names": header.names,
            "dtypes": header.dtypes,
            "shapes": header.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._control.post("/update_weights_from_distributed", body, self._timeout)

    def receive_shared(self, header: WireHeader, data: Tensor) -> None:
        """Have the engine load a bucket from memory that it shares with this process."""
        payloads = shared_payloads(header.names, header.shapes, self._dtype, data, self.ranks)
        body = {
            "serialized_named_tensors": payloads,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._control.post("/update_weights_from_tensor", body, self._timeout)

    def shared_empty(self, size: int, device: torch.device) -> Tensor:
        """Bytes that the engine can open, for ``receive_shared``."""
        return shared_empty(size, device)

    def load_folder(self, folder: str) -> None:
        """Have the engine load the safetensors of ``folder``, which must hold every weight."""
        body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
        self._control.post("/update_weights_from_disk", body, self._timeout)

    def flush(self) -> None:
        """Drop the cached keys and values of the old weights. Raises EngineAnswerError if it can't."""
        if not self._flush(0):
            raise EngineAnswerError(f"{self.url}: the cache of the old weights was not flushed")

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token | tokens before it) at temperature 1 of all but the first, by prompt (nats)."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = self._control.ask("/generate", body, self._timeout)
        scored = [answer["meta_info"]["input_token_logprobs"][1:] for answer in answers]
        for prompt, entries in zip(prompts, scored, strict=True):
            if [entry[1] for entry in entries] != list(prompt[1:]):
                raise EngineAnswerError(
                    f"{self.url}/generate: log-probs of other tokens than asked"
                )
        return [[entry[0] for entry in entries] for entries in scored]

    def end(self) -> None:
        """Close the update session."""
        self._control.post("/end_weight_update", {}, self._timeout)

    @property
    def layout(self) -> tuple[int, str]:
        """Engines that share it have the same checksums."""
        return self.ranks, self.device

    def checksums(self) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what the engine holds now."""
        answer = self._control.post("/weights_checker", {"action": "checksum"}, self._timeout)
        by_rank = {
            rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in answer["ranks"]
        }
        if sorted(by_rank) != list(range(self.ranks)):
            raise EngineAnswerError(
                f"{self.url}: checksums of ranks {sorted(by_rank)}, expected 0 to {self.ranks - 1}"
            )
        return [by_rank[rank] for rank in range(self.ranks)]

    def expected(self) -> ExpectedChecksums:
        """An empty accumulator of what ``checksums`` must say after the next complete update."""
        return ExpectedChecksums(self.tensors, self._dtype)

    def _flush(self, wait_s: float) -> bool:
        """Flush the cache; False where requests still run after ``wait_s``."""
        try:
            path = f"/flush_cache?timeout={wait_s}"
            self._control.call("POST", path, None, wait_s + CONTROL_TIMEOUT_S)
        except EngineRequestError:
            return False
        return True


def _check_server(url: str, info: Mapping[str, Any], dtype: str, shape: ModelShape) -> None:
    for field in _SINGLE:
        if info.get(field, 1) != 1:
            raise EngineMismatchError(
                f"{url}: {field} is {info[field]}; verified weight updates know tensor parallelism "
                f"only, expected 1"
            )
    if info.get("quantization") is not None:
        raise EngineMismatchError(f"{url}: quantization is {info['quantization']!r}, expected none")
    served = shape.dtype if info["dtype"] == "auto" else info["dtype"]
    if served != dtype:
        raise EngineMismatchError(
            f"{url}: the engine's weights are {served}, the trainer's {dtype}"
        )
