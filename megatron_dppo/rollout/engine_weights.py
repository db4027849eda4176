"""The engine's half of a weight update: SGLang's control endpoints and its bucket format."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.engine_layout import engine_inputs
from megatron_dppo.checkpoint_conversion.model_shape import ModelShape
from megatron_dppo.rollout.engine_checksums import ExpectedChecksums
from megatron_dppo.rollout.engine_tensors import EngineTensors
from megatron_dppo.rollout.errors import (
    EngineAnswerError,
    EngineLostError,
    EngineMismatchError,
    EngineRequestError,
)

_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
"""By the URL's scheme: an https engine never sees a key in clear text."""
_CONTROL_TIMEOUT_S = 60.0
_IDLE_WAIT_S = 5.0
_CONNECTION_SLACK_S = 10.0
_SINGLE = ("pp_size", "dp_size", "ep_size", "moe_dp_size")


@dataclass(frozen=True)
class WireBucket:
    """Tensors back to back in one ``uint8`` buffer, and what tells them apart again."""

    data: Tensor
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


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
        self._keys = {"GET": api_key, "POST": admin_api_key or api_key}
        self._timeout = timeout_s
        self._dtype = getattr(torch, dtype)
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        info = self._get("/server_info")
        _check_server(url, info, dtype, shape)
        self.device = str(info["device"])
        self.tensors = EngineTensors(shape, int(info["tp_size"]), self.device)

    @property
    def ranks(self) -> int:
        """Engine ranks that join a broadcast group, as ranks 1, 2, ... after the trainer's rank 0."""
        return self.tensors.ranks

    def pause_when_idle(self, timeout_s: float) -> bool:
        """Let running requests finish, then hold back new ones; none is aborted or cut in two.

        False where some still run after ``timeout_s``: generation then goes on as before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._post("/pause_generation", {"mode": "in_place"})
            if self._flush(0):
                return True
            self.resume()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._flush(min(left, _IDLE_WAIT_S))  # waits for the running requests

    def resume(self) -> None:
        """Let generation go on."""
        self._post("/continue_generation", {})

    def set_version(self, label: str) -> None:
        """Set the ``weight_version`` that answers carry, and read it back."""
        self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        if (got := self.version()) != label:
            raise EngineAnswerError(
                f"{self.url}: weight_version is {got!r} after it was set to {label!r}"
            )

    def version(self) -> str:
        """The ``weight_version`` that answers carry."""
        return str(self._get("/model_info")["weight_version"])

    def open_group(self, address: str, port: int, name: str, backend: str) -> None:
        """Have every engine rank join the group ``name``; blocks until rank 0 has joined too."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self.ranks + 1,
            "group_name": name,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, self._timeout)

    def close_group(self, name: str) -> None:
        """Have every engine rank leave the broadcast group ``name``."""
        self._post("/destroy_weights_update_group", {"group_name": name})

    def begin(self) -> None:
        """Open an update session; one that a failed update left open is closed first."""
        try:
            self._post("/begin_weight_update", {})
        except EngineRequestError:
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def pack(self, bucket: Sequence[tuple[str, Tensor]]) -> WireBucket:
        """One message of the bucket's tensors: SGLang's ``flattened_bucket``.

        Wider types come first, so that every tensor is aligned. ``data`` lies in one of two buffers
        that take turns: it holds until the second call after.
        """
        inputs = [(n, t) for name, t in bucket for n in engine_inputs(self.tensors.shape, name)]
        inputs.sort(key=lambda item: -item[1].element_size())
        data = self._message([t.detach().reshape(-1).view(torch.uint8) for _, t in inputs])
        return WireBucket(
            data,
            tuple(name for name, _ in inputs),
            tuple(str(t.dtype).removeprefix("torch.") for _, t in inputs),
            tuple(tuple(t.shape) for _, t in inputs),
        )

    def _message(self, parts: list[Tensor]) -> Tensor:
        size = sum(part.numel() for part in parts)
        self._buffers.reverse()
        if self._buffers[0].numel() < size:
            self._buffers[0] = torch.empty(size, dtype=torch.uint8, device=parts[0].device)
        return torch.cat(parts, out=self._buffers[0][:size])

    def receive(self, bucket: WireBucket, group: str) -> None:
        """Have the engine join the broadcast of ``bucket.data`` and load it; blocks until it has.

        The cached keys and values of the old weights are dropped with it.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": True,
        }
        self._post("/update_weights_from_distributed", body, self._timeout)

    def end(self) -> None:
        """Close the update session."""
        self._post("/end_weight_update", {}, self._timeout)

    def checksums(self) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what the engine holds now."""
        answer = self._post("/weights_checker", {"action": "checksum"}, self._timeout)
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
            self._call("POST", f"/flush_cache?timeout={wait_s}", None, wait_s + _CONTROL_TIMEOUT_S)
        except EngineRequestError:
            return False
        return True

    def _get(self, path: str) -> dict[str, Any]:
        return self._object(path, self._call("GET", path, None, _CONTROL_TIMEOUT_S))

    def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        return self._object(path, self._call("POST", path, body, timeout_s or _CONTROL_TIMEOUT_S))

    def _object(self, path: str, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise EngineAnswerError(f"{self.url}{path}: answered no JSON object: {text[:200]!r}")
        return value

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> str:
        place = urlsplit(self.url)
        connect = _CONNECTIONS[place.scheme]
        connection = connect(
            place.hostname or "", place.port, timeout=timeout_s + _CONNECTION_SLACK_S
        )
        headers = {"Content-Type": "application/json"}
        if key := self._keys[method]:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(
                method,
                place.path.rstrip("/") + path,
                None if body is None else json.dumps(body),
                headers,
            )
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineLostError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 500:
            raise EngineLostError(f"{self.url}{path}: HTTP {answer.status}: {text[:500]}")
        if answer.status != 200:
            raise EngineRequestError(
                answer.status, f"{self.url}{path}: HTTP {answer.status}: {text[:500]}"
            )
        return text


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
