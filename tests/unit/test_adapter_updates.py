"""Weight updates that send adapters alone: which adapters each engine has after an update, also after a failed one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoint_conversion.adapters import AdapterFolder
from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.config.lora import PEFT_WEIGHTS
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.options import ADAPTER_DIGESTS
from megatron_dppo.model.adapters import Adapters, adapter_tensors
from megatron_dppo.model.gather_plan import Bucket, TensorSources
from megatron_dppo.weights.adapters import AdapterUpdater, expected_adapter_digests
from megatron_dppo.weights.engine_weights import Occupation
from megatron_dppo.weights.server.adapter_digests import _digests
from megatron_dppo.weights.source import Plan
from megatron_dppo.weights.transaction import WeightUpdateError, WeightUpdateRefusedError
from tests.messages import mentioning
from tests.unit.weight_doubles import (
    NORM,
    SCORE,
    SHAPE,
    TENSORS,
    WEIGHTS,
    A,
    B,
    Engine,
    Source,
    alone,
    opener,
    runner,
)

ADAPTERS = Adapters(2, 4.0, ("o_proj",))
DIMS = adapter_tensors(ADAPTERS, SHAPE)
SIZE = 4 * sum(a * b for a, b in DIMS.values())


class AdapterSource(Source):
    """All adapters of a model, each filled with ``value``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Source()
        self.folder = AdapterFolder(ADAPTERS, SHAPE, "base")
        self.value = 1.0

    def plan(self, bucket_bytes: int) -> list[Bucket]:
        return [Bucket(tuple(TensorSources(name, dims, ()) for name, dims in DIMS.items()))]

    def gather(self, plan: Plan) -> Iterator[Gathered]:
        yield Gathered([(name, torch.full(dims, self.value)) for name, dims in DIMS.items()], 5)


class LoraEngine(Engine):
    """Holds the adapters that it loads from the folders in load requests."""

    def __init__(self, url: str = A) -> None:
        super().__init__(url)
        self.client: Any = self
        self.occupation = Occupation(url)
        self.adapters: dict[str, Mapping[str, torch.Tensor]] = {}
        self.scored: list[str | None] = []
        self.has_digests = True
        self.load(WEIGHTS)

    async def get_json(self, path: str) -> dict[str, Any]:
        assert path == "/v1/models"
        adapters = [{"id": name, "parent": "base"} for name in self.adapters]
        return {"data": [{"id": "base", "parent": None}, *adapters]}

    async def _call_on_weights(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        name = body["lora_name"]
        if path == "/unload_lora_adapter":
            self.step(f"unload {name}")
            del self.adapters[name]
            return {}
        assert path == "/load_lora_adapter"
        self.adapters[name] = tensors = load_file(Path(body["lora_path"]) / PEFT_WEIGHTS)
        self.step("load")
        digests = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in tensors.items()}
        return {
            "loaded_adapters": {ADAPTER_DIGESTS: json.dumps(digests)} if self.has_digests else {}
        }

    async def score(
        self, prompts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> list[list[float]]:
        self.scored.append(adapter)
        return await super().score(prompts)


@pytest.fixture
def source() -> AdapterSource:
    return AdapterSource()


def updater(source: AdapterSource, folder: Path, *engines: LoraEngine) -> AdapterUpdater:
    settings = WeightSyncConfig(strategy="disk", directory=str(folder))
    by_url = {engine.url: engine for engine in engines}
    updates = AdapterUpdater(source, settings, alone, opener(by_url), runner())
    updates.attach(list(by_url))
    return updates


def test_the_first_update_compares_the_frozen_model_too(
    source: AdapterSource, tmp_path: Path
) -> None:
    engine = LoraEngine()
    engine.adapters["left"] = {}
    updates = updater(source, tmp_path, engine)
    first = updates.update(1)
    assert engine.calls == [
        *("idle", "unverified-1", "unload left", "load", "flush", "checksums"),
        *("resume", "score", "1", "resume"),
    ]
    # The adapters, and the tensors of the frozen model.
    assert (first.verified, first.tensors) == (True, len(DIMS) + len(TENSORS))
    engine.calls, source.value = [], 2.0
    second = updates.update(2)
    assert engine.calls == [
        *("idle", "unverified-2", "load", "flush", "resume", "score", "2", "resume"),
        "unload policy-1",
    ]
    assert (second.verified, second.tensors) == (True, len(DIMS))
    # The source reports 5 gathered bytes.
    assert (second.bytes, second.bytes_moved, second.bytes_bound) == (SIZE, SIZE + 5, SIZE)
    assert engine.scored == ["policy-1", "policy-2"]
    assert list(engine.adapters) == ["policy-2"]
    held = set(engine.adapters["policy-2"])
    assert held == {f"base_model.model.{name}.weight" for name in DIMS}
    assert all(bool((t == 2.0).all()) for t in engine.adapters["policy-2"].values())
    assert list(tmp_path.iterdir()) == []


def test_another_frozen_model_is_named(source: AdapterSource, tmp_path: Path) -> None:
    engine = LoraEngine()
    engine.altered = {NORM: "9"}
    with pytest.raises(WeightUpdateError, match=mentioning(NORM, "rank 0", 9)):
        updater(source, tmp_path, engine).update(1)
    assert engine.calls[-2:] == ["pause", "unverified-1"]


@pytest.mark.parametrize("failing", ["unverified-2", "load", "flush", "score", "2"])
def test_a_failed_update_leaves_the_former_in_service(
    source: AdapterSource, tmp_path: Path, failing: str
) -> None:
    good, bad = LoraEngine(A), LoraEngine(B)
    updates = updater(source, tmp_path, good, bad)
    updates.update(1)
    bad.failing, good.calls = failing, []
    with pytest.raises(
        WeightUpdateError, match=mentioning("version 2", "EngineRequestError")
    ) as error:
        updates.update(2)
    assert error.value.engines == (B,)
    assert list(good.adapters) == list(bad.adapters) == ["policy-1"]
    assert good.calls[-2:] == bad.calls[-2:] == ["1", "resume"]
    assert updates.committed_version is None
    assert list(tmp_path.iterdir()) == []
    bad.failing, good.calls = None, []
    assert updates.update(2).tensors == 2 * (len(DIMS) + len(TENSORS))
    assert list(good.adapters) == list(bad.adapters) == ["policy-2"]


def test_a_former_that_was_not_dropped_goes_at_the_next_update(
    source: AdapterSource, tmp_path: Path
) -> None:
    engine = LoraEngine()
    updates = updater(source, tmp_path, engine)
    updates.update(1)
    engine.failing = "unload policy-1"
    assert updates.update(2).verified
    assert list(engine.adapters) == ["policy-1", "policy-2"]
    engine.failing = None
    updates.update(3)
    assert list(engine.adapters) == ["policy-3"]


def test_an_engine_that_never_had_the_former_is_quarantined(
    source: AdapterSource, tmp_path: Path
) -> None:
    old, new = LoraEngine(A), LoraEngine(B)
    updates = updater(source, tmp_path, old)
    updates.update(1)
    updates.open_engine = opener({A: old, B: new})
    updates.attach([A, B])
    new.score_value = SCORE + 0.5
    with pytest.raises(WeightUpdateError, match=mentioning(0.5)):
        updates.update(2)
    assert (list(old.adapters), old.calls[-2:]) == (["policy-1"], ["1", "resume"])
    assert new.calls[-2:] == ["pause", "unverified-2"]


def test_the_same_version_again_replaces_its_adapters(
    source: AdapterSource, tmp_path: Path
) -> None:
    engine = LoraEngine()
    updates = updater(source, tmp_path, engine)
    updates.update(1)
    source.value = 3.0
    updates.update(1)
    assert bool((engine.adapters["policy-1"].popitem()[1] == 3.0).all())  # type: ignore[attr-defined]


def test_a_busy_engine_keeps_version_and_adapters(source: AdapterSource, tmp_path: Path) -> None:
    engine = LoraEngine()
    updates = updater(source, tmp_path, engine)
    updates.update(1)
    engine.idle, engine.calls = False, []
    with pytest.raises(WeightUpdateRefusedError):
        updates.update(2)
    assert engine.calls == ["idle", "resume"]
    assert (updates.committed_version, list(engine.adapters)) == (1, ["policy-1"])


def test_a_server_that_cannot_tell_what_it_loaded_is_refused(
    source: AdapterSource, tmp_path: Path
) -> None:
    engine = LoraEngine()
    engine.has_digests = False
    words = f"{EngineAnswerError.__name__}: {A}/load_lora_adapter does not say the digests"
    with pytest.raises(WeightUpdateError, match=words):
        updater(source, tmp_path, engine).update(1)


def test_fused_rows_are_digested_in_the_engines_order() -> None:
    folder = AdapterFolder(Adapters(1, 1.0, ("q_proj", "k_proj", "v_proj")), SHAPE, "base")
    at = "model.layers.0.self_attn"
    tensors = {"v_proj": 3.0, "q_proj": 1.0, "k_proj": 2.0}
    sent = [(f"{at}.{name}.lora_A", torch.tensor([[v]])) for name, v in tensors.items()]
    fused = torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()
    assert expected_adapter_digests(sent, folder) == {
        f"base_model.model.{at}.qkv_proj.lora_A.weight": hashlib.sha256(fused).hexdigest()
    }


def test_the_engine_digests_what_its_layers_hold() -> None:
    class Layer:
        weights: ClassVar = {"x.lora_A.weight": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)}

    class Loaded:
        layers: ClassVar = [Layer()]

    expected = hashlib.sha256(b"\x80\x3f\x00\x40").hexdigest()
    assert _digests(Loaded()) == {"x.lora_A.weight": expected}
