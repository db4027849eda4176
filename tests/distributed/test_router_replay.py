"""Router replay in every layout: the experts that the routers really use, and the gradient.

The recordings are random, far from the natural routing. A pass that routes naturally, or by the
recording of another micro-batch or layer, is therefore seen. Some samples have no recording and
some only part of one. The routers' own outputs show the experts that they use.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.data.columns import usable_rows
from tests.distributed.test_trainer_parity import (
    VOCABULARY,
    distances,
    far_results,
    own_micro_batches,
    policy_token_loss,
    run_config,
    samples,
)
from tests.layouts import settings_of, sizes_of
from tests.ranks import run_ranks
from tests.whole_tensors import whole_gradients, whole_weights

MODULE = "tests.distributed.test_router_replay"
LAYERS, EXPERTS, TOP_K = 4, 8, 2
TOLERANCE = 1e-5
TWO_RANKS = [
    "TP2",
    "TP2 recompute full",
    "TP2 recompute moe",
    "EP2",
    "EP2 recompute full",
    "EP2 recompute selective",
    "PP2",
    "PP2 recompute full",
    "PP2 recompute moe",
    "PP2 VPP2",
    "PP2 VPP2 recompute full",
    "TP2 EP2 recompute full",
    "DP2",
    "CP2",
    "CP2 EP2 recompute full",
]
FOUR_RANKS = [
    "TP2 PP2 EP2 recompute full",
    "TP2 EP2 DP2",
    "CP2 TP2 EP4",
    "CP2 PP2 VPP2 recompute moe",
    "TP2 PP2 VPP2",
    "PP2 VPP2 EP2 recompute full",
]


def recorded_samples() -> list:
    """Return the parity test's samples with random recordings. Every fifth has none, and others lack rows."""
    rng = np.random.default_rng(11)
    out = []
    for sample in samples():
        shape = (sample.length - 1, LAYERS, EXPERTS)
        routed = rng.random(shape).argsort(-1)[..., :TOP_K].astype(np.uint8)
        number, versions = sample.problem_id, np.ones(sample.sampled, np.int32)
        if number % 4 == 1:  # Older weights sampled the first tokens: these rows are not valid.
            versions[: sample.sampled // 2] = 0
        columns = {} if number % 5 == 2 else {"routed_experts": routed}
        out.append(sample.with_columns(weight_version=versions, **columns))
    return out


def make_trainer(hf_dir: str, parallel: dict[str, Any], changes: dict[str, Any], *, replay: bool):
    from megatron_dppo.trainer.trainer import Trainer

    config = run_config(hf_dir, parallel, changes)
    rollout = config.rollout.model_copy(update={"router_replay": replay})
    megatron = changes.get("megatron", {})
    return Trainer.read(config.model_copy(update={"rollout": rollout, "megatron": megatron}))


class RouterWatch:
    """Keeps the choices of each router of this rank: routing maps [t, experts] by layer and kind of pass.

    The kind is whether autograd recorded the pass. Under recomputation it does not record the first pass.
    """

    def __init__(self, trainer) -> None:
        self.seen: dict[tuple[int, bool], list[torch.Tensor]] = {}
        for chunk in trainer.chunks:
            for layer in chunk.decoder.layers:
                layer.mlp.router.register_forward_hook(self._hook(layer.layer_number - 1))

    def _hook(self, layer: int):
        def keep(_module, _inputs, outputs) -> None:
            self.seen.setdefault((layer, torch.is_grad_enabled()), []).append(outputs[1].clone())

        return keep

    def take_faults(self, trainer, batches: list) -> list[str]:
        """Return the differences from the recordings of ``batches`` in the passes since the last call."""
        from megatron_dppo.trainer.step import pad_to

        seen, self.seen = self.seen, {}
        found = [] if seen else ["no router was used"]
        tokens = max(b.num_tokens for b in batches)
        parts = trainer.share.context_size * trainer.share.sequence_size
        for (layer, recorded), maps in seen.items():
            where = f"layer {layer}, autograd {recorded}"
            if len(maps) != len(batches):
                found.append(f"{where}: {len(maps)} passes for {len(batches)} micro-batches")
            for number, (used, batch) in enumerate(zip(maps, batches, strict=False)):
                assert used.shape[0] * parts in (batch.num_tokens, tokens)
                padded = pad_to(batch, used.shape[0] * parts)
                own = trainer.share.rows(padded.cu_seqlens)
                valid = padded.valid["routed_experts"][own]
                expected = padded.columns["routed_experts"][own, layer].long()
                expected_map = torch.zeros(len(valid), EXPERTS, dtype=torch.bool)
                expected_map.scatter_(1, expected, True)
                rows = (used != expected_map).any(1) & valid
                if rows.any():
                    found.append(f"{where}, micro-batch {number}: {int(rows.sum())} rows")
                if (used.sum(1) != TOP_K).any():
                    found.append(f"{where}, micro-batch {number}: not {TOP_K} experts a token")
        return found


def train(hf_dir: str, name: str, world_size: int) -> tuple[dict[str, Any], list[str]]:
    """Train two steps under replay in the layout ``name``.

    Return results, on rank 0 with gradients and parameters, and the faults of routers.
    """
    parallel = {**sizes_of(name), "world_size": world_size}
    trainer = make_trainer(hf_dir, parallel, settings_of(name), replay=True)
    try:
        watch = RouterWatch(trainer)
        batches = own_micro_batches(trainer, recorded_samples())
        shared = own_micro_batches(trainer, recorded_samples(), input_rows=trainer.input_rows)
        trainer.log_probs(batches)
        wrong = watch.take_faults(trainer, batches)
        out: dict[str, Any] = {"metrics": [], "norms": []}
        for step in range(2):
            result = trainer.train_mini_batch(shared, policy_token_loss, denominator=200.0)
            passes = 2 if {"full", "moe"} & set(name.split()) else 1
            if len({recorded for _, recorded in watch.seen}) != passes:
                wrong.append(f"kinds of passes: {sorted(watch.seen)}")
            wrong += watch.take_faults(trainer, batches)
            out["metrics"].append(result.metrics.values())
            out["norms"].append(result.grad_norm)
            if step == 0:
                out["gradients"] = whole_gradients(trainer)
        out["parameters"] = whole_weights(trainer)
        return out, wrong
    finally:
        trainer.close()


def reference_worker(folder: str) -> list[str]:
    """Make the model, train it in one process, and save the results in ``folder``. Return the routers' faults."""
    from tests.tiny_models import save_tiny_model

    hf_dir = save_tiny_model(
        Path(folder) / "model", "qwen3_moe", vocab_size=VOCABULARY, layers=LAYERS
    )
    out, wrong = train(str(hf_dir), "", 1)
    torch.save(out, Path(folder) / "reference.pt")
    return wrong


def layout_worker(folder: str, cases: list[str], world_size: int) -> dict[str, Any]:
    """Train every case, one after the other. Return the routers' faults, and on rank 0 the distances."""
    report: dict[str, Any] = {}
    expected = torch.load(Path(folder) / "reference.pt", weights_only=True)
    for name in cases:
        got, wrong = train(str(Path(folder) / "model"), name, world_size)
        report[name] = {"wrong": wrong}
        if torch.distributed.get_rank() == 0:
            report[name]["distances"] = distances(got, expected)
    return report


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (wrong,) = run_ranks(f"{MODULE}:reference_worker", 1, str(folder))
    assert wrong == []
    return folder


@pytest.mark.distributed
@pytest.mark.first
def test_the_recordings_are_not_the_natural_routing(reference: Path) -> None:
    got = torch.load(reference / "reference.pt", weights_only=True)
    compared = sum(
        LAYERS * int(usable_rows(t.loss_mask, t.columns).sum())
        for t in recorded_samples()
        if "routed_experts" in t.columns
    )
    for metrics in got["metrics"]:
        assert metrics["r3/compared"] == compared
        # One of the 28 pairs of 8 experts is the natural one.
        assert 0.01 < metrics["r3/agreement"] / compared < 0.1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"), [pytest.param(2, TWO_RANKS, marks=pytest.mark.first), (4, FOUR_RANKS)]
)
def test_routers_replay_and_train_as_one_process_does(
    reference: Path, world_size: int, cases: list[str]
) -> None:
    reports = run_ranks(
        f"{MODULE}:layout_worker", world_size, str(reference), cases, world_size, timeout=600
    )
    wrong = {
        (rank, name): found["wrong"]
        for rank, report in enumerate(reports)
        for name, found in report.items()
        if found["wrong"]
    }
    assert not wrong
    assert reports[0].keys() == set(cases)
    far = {name: found["distances"] for name, found in reports[0].items()}
    assert not far_results(far, lambda *_: TOLERANCE)


def natural_worker(folder: str) -> dict[str, Any]:
    """Compare training that replays the trainer's own natural routing with training without replay."""
    hf_dir = str(Path(folder) / "model")
    plain = make_trainer(hf_dir, {}, {}, replay=False)
    watch = RouterWatch(plain)
    batches = own_micro_batches(plain, samples())
    expected = plain.train_mini_batch(batches, policy_token_loss, 200.0)
    weights = {n: p.detach().clone() for n, p in plain.chunks[0].named_parameters()}
    maps_by_layer = [watch.seen[layer, True] for layer in range(LAYERS)]
    recorded = []
    for number, batch in enumerate(batches):
        maps = torch.stack([layer[number] for layer in maps_by_layer], 1)
        experts = maps.nonzero()[:, 2].view(batch.num_tokens, LAYERS, TOP_K).to(torch.uint8)
        valid = torch.ones(batch.num_tokens, dtype=torch.bool)
        routed = batch.with_columns(routed_experts=experts)
        recorded.append(replace(routed, valid={"routed_experts": valid}))
    plain.close()

    trainer = make_trainer(hf_dir, {}, {}, replay=True)
    got = trainer.train_mini_batch(recorded, policy_token_loss, 200.0)
    metrics = got.metrics.values()
    out = {
        "agreement": metrics["r3/agreement"] / metrics["r3/compared"],
        "norms": [got.grad_norm, expected.grad_norm],
        "weights equal": all(
            torch.equal(p, weights[n]) for n, p in trainer.chunks[0].named_parameters()
        ),
    }
    trainer.log_probs(own_micro_batches(trainer, samples()))
    out["agreement without recordings"] = trainer.routing_agreement().values()
    out["refused"] = refusals(trainer, recorded[0])
    out["with dense layers"] = replay_beside_dense_layers(trainer)
    trainer.close()
    return out


def refusals(trainer, batch) -> list[str]:
    """Return the errors of recordings of another model."""
    experts = batch.columns["routed_experts"]
    errors = []
    for wrong in (experts[:, :2], torch.cat([experts[..., :1], experts[..., :1] + 8], -1)):
        try:
            trainer.log_probs([batch.with_columns(routed_experts=wrong)])
        except ValueError as error:
            errors.append(str(error))
    return errors


def replay_beside_dense_layers(trainer) -> dict[str, Any]:
    """In a model whose layers 0 and 2 are dense, the routers must get their own columns of the recording."""
    from megatron_dppo.trainer.megatron_config import transformer_config
    from megatron_dppo.trainer.model import build_chunks
    from megatron_dppo.trainer.router_replay import ChunkState, Recording, attach
    from megatron_dppo.trainer.step import model_inputs

    # The model's config.json determines the dense layers. The configuration may not set them, so set them here.
    transformer = transformer_config(trainer.config, trainer.shape, trainer.layout)
    transformer = replace(transformer, moe_layer_freq=[0, 1, 0, 1])
    chunks = build_chunks(transformer, trainer.shape)
    state = ChunkState(trainer.device)
    try:
        attach(chunks[0], state, trainer.shape.moe_layers)
        refused = ""
    except ValueError as error:
        refused = str(error)
    columns = attach(chunks[0], state, (1, 3))
    used = {}
    for number in (1, 3):
        chunks[0].decoder.layers[number].mlp.router.register_forward_hook(
            lambda _module, _inputs, outputs, number=number: used.update({number: outputs[1]})
        )
    (batch, *_) = own_micro_batches(trainer, recorded_samples())
    experts, valid = batch.columns["routed_experts"], batch.valid["routed_experts"]
    state.replay(Recording(experts[:, :2], valid), compares=True)
    chunks[0](**model_inputs(batch))
    wrong = 0
    for column, number in enumerate((1, 3)):
        expected = experts[:, column].long()
        expected_map = torch.zeros_like(used[number]).scatter_(1, expected, True)
        wrong += int(((used[number] != expected_map).any(1) & valid).sum())
    return {"columns": columns, "wrong": wrong, "refused": refused}


@pytest.mark.distributed
@pytest.mark.first
def test_replaying_the_natural_routing_changes_nothing(reference: Path) -> None:
    (found,) = run_ranks(f"{MODULE}:natural_worker", 1, str(reference))
    assert found["agreement"] == 1
    assert found["norms"][0] == found["norms"][1]
    assert found["weights equal"]
    assert found["agreement without recordings"] == {"r3/agreement": 0, "r3/compared": 0}
    layers, experts = found["refused"]
    assert layers.startswith("recorded routing of (2, 2)")
    assert "expected 0..7" in experts
    expected_error = "layer 0 of the model is dense, but the recording's layers are [0, 1, 2, 3]"
    assert found["with dense layers"] == {"columns": [0, 1], "wrong": 0, "refused": expected_error}
