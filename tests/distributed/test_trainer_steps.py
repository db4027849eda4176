"""What a Trainer promises in addition to parity: failures on all ranks, log-probabilities, export."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_trainer_parity import (
    VOCABULARY,
    micro_batches,
    own_micro_batches,
    policy_token_loss,
    run_config,
    samples,
)
from tests.ranks import run_ranks
from tests.whole_tensors import gather_buckets, hf_buckets

MODULE = "tests.distributed.test_trainer_steps"


def make_trainer(hf_dir: str, parallel: dict[str, Any], changes: dict[str, Any] | None = None):
    from megatron_dppo.trainer.trainer import Trainer

    return Trainer.read(run_config(hf_dir, parallel, changes or {}))


def error_of(action) -> tuple[str, str]:
    """Return type and text of the error that ``action`` raises; two empty strings if it raises none."""
    from megatron_dppo.system.errors import RunError

    try:
        action()
    except (LookupError, RunError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def weights(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for c in trainer.chunks for p in c.parameters()]


# ---- one process: against transformers --------------------------------------------------------


def hf_log_probs(model, batch, temperature: float) -> torch.Tensor:
    """Return log pi [T], computed sequence by sequence. It has a gradient."""
    out = []
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        logits = model(batch.token_ids[None, start:end]).logits[0].float() / temperature
        targets = batch.target_ids[start:end, None]
        out.append(logits.log_softmax(-1).gather(1, targets)[:, 0])
    return torch.cat(out)


def forward_worker(folder: str) -> dict[str, float]:
    """Return the largest difference of log-probabilities from transformers', by model."""
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import LLAMA3_ROPE, save_tiny_model

    models: dict[str, tuple[str, dict[str, Any], str]] = {
        "qwen3_moe": ("qwen3_moe", {}, "float32"),
        "qwen3_moe, probabilities not renormalised": (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "float32",
        ),
        "qwen3 tied": ("qwen3", {"tied": True}, "float32"),
        "qwen2": ("qwen2", {}, "float32"),
        "llama with scaled rope": ("llama", {"rope_parameters": LLAMA3_ROPE}, "float32"),
        "qwen3 bfloat16": ("qwen3", {"dtype": torch.bfloat16}, "bfloat16"),
    }
    found = {}
    for name, (family, options, dtype) in models.items():
        hf_dir = save_tiny_model(
            Path(folder) / name.replace(" ", "_"), family, vocab_size=VOCABULARY, **options
        )
        trainer = make_trainer(str(hf_dir), {}, {"dtype": dtype})
        batches = own_micro_batches(trainer, samples())
        own = trainer.log_probs(batches)
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=getattr(torch, dtype)).eval()
        with torch.no_grad():
            theirs = [hf_log_probs(model, b, temperature=0.9) for b in batches]
        found[name] = max(
            float((a - b)[m.loss_mask].abs().max())
            for a, b, m in zip(own, theirs, batches, strict=True)
        )
        if dtype == "bfloat16":
            result = trainer.train_mini_batch(batches, policy_token_loss, 200.0)
            found["bfloat16 gradient norm"] = result.grad_norm
        trainer.close()
    return found


@pytest.mark.distributed
def test_log_probs_equal_transformers(tmp_path: Path) -> None:
    (found,) = run_ranks(f"{MODULE}:forward_worker", 1, str(tmp_path))
    in_bfloat16 = found.pop("qwen3 bfloat16")
    assert 0 < found.pop("bfloat16 gradient norm") < 1000
    assert max(found.values()) <= 2e-5, found
    assert in_bfloat16 <= 0.15


def gradient_worker(folder: str, tied: bool) -> dict[str, Any]:
    """Compare gradients with autograd through transformers, also with one sequence in each micro-batch."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.metrics.sums import MetricSums
    from megatron_dppo.model.gather_plan import hf_buckets_plan
    from megatron_dppo.trainer.model import named_parameters
    from megatron_dppo.vocab_parallel.policy_stats import PolicyStats
    from tests.tiny_models import save_tiny_model

    hf_dir = save_tiny_model(Path(folder) / "m", "qwen3", vocab_size=VOCABULARY, tied=tied)
    denominator, gradients = 200.0, []
    for budget in (120, 1):
        trainer = make_trainer(str(hf_dir), {}, {"clip_grad": 0.0})
        batches = own_micro_batches(trainer, samples(), budget)
        result = trainer.train_mini_batch(batches, policy_token_loss, denominator)
        plan = hf_buckets_plan(trainer.shape, trainer.layout, 10**6, 4)
        parameters: dict[Any, Any] = named_parameters(trainer.chunks)
        grads = {k: p.main_grad for k, p in parameters.items()}
        gradients.append({n: g for b in gather_buckets(plan, 0, grads) for n, g in b})
        trainer.close()
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    # transformers gives the padding token's embedding no gradient; here it is a token like others.
    model.get_input_embeddings().padding_idx = None
    total = torch.zeros(())
    for batch in batches:
        log_probs = hf_log_probs(model, batch, temperature=0.9)
        stats = PolicyStats(log_probs, None, None, torch.zeros(3))
        total = total + policy_token_loss(stats, batch).loss / denominator
    total.backward()
    theirs = {n: p.grad for n, p in model.named_parameters()}
    assert isinstance(result.metrics, MetricSums)
    return {
        "micro-batches": len(batches),
        "loss": float(result.metrics.sums["loss/sum"]) / denominator,
        "transformers' loss": float(total),
        "norm": result.grad_norm,
        "transformers' norm": float(
            torch.linalg.vector_norm(torch.stack([g.norm() for g in theirs.values()]))
        ),
        "distances": [
            max(float((own[n] - g).norm() / g.norm()) for n, g in theirs.items())
            for own in gradients
        ],
    }


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_the_plain_sum_that_autograd_gives(tmp_path: Path, tied: bool) -> None:
    (found,) = run_ranks(f"{MODULE}:gradient_worker", 1, str(tmp_path), tied)
    assert found["micro-batches"] == 24
    assert found["loss"] == pytest.approx(found["transformers' loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(found["transformers' norm"], rel=1e-5)
    assert max(found["distances"]) <= 1e-5


# ---- two processes ----------------------------------------------------------------------------


def two_rank_worker(folder: str) -> dict[str, Any]:
    """Two replicas that share the experts exchange values, disagree, and fail. Return what each rank saw."""
    import torch.distributed as dist

    from megatron_dppo.trainer.collectives import (
        agree,
        all_gather_json,
        any_rank,
        broadcast_json,
        first_failure,
        on_every_rank,
        on_rank_0,
    )

    def fail_on_1() -> int:
        if rank:
            raise ValueError("no luck")
        return 7

    trainer = make_trainer(folder, {"expert": 2, "world_size": 2})
    rank = trainer.topology.rank
    out: dict[str, Any] = {
        "broadcast": broadcast_json({"from": rank, "text": "Σ", "list": [1, 2.5, None]}, src=1),
        "gathered": all_gather_json("x" * (1 + 5 * rank)),
        "any": [any_rank(rank == 1), any_rank(False)],
        "first failure": [first_failure(None), first_failure(f"of {rank}")],
        "on rank 0": on_rank_0(fail_on_1),
        "failed on 1": error_of(lambda: on_every_rank(fail_on_1)),
        "failed as": error_of(lambda: on_every_rank(fail_on_1, error=LookupError)),
        "failed": error_of(lambda: on_every_rank(fail_on_1, error=ValueError)),
        "agree": [error_of(lambda: agree([1], "it")), error_of(lambda: agree(rank, "the rank"))],
    }
    batches = own_micro_batches(trainer, samples())
    before = weights(trainer)

    last = len(batches) - 1
    trained = [int(i) for i in batches[last].sequence_index if i >= 0 and i % 7 != 3]

    def poisoned_loss(stats, batch):
        sums = policy_token_loss(stats, batch)
        is_last = torch.equal(batch.sequence_index, batches[last].sequence_index)
        return type(sums)(sums.loss * (float("inf") if rank and is_last else 1.0), sums.metrics)

    out["poisoned"] = error_of(lambda: trainer.train_mini_batch(batches, poisoned_loss, 200.0))
    out["where"] = f"data-parallel rank 1, micro-batch {last}, sequences {sorted(trained)}"
    out["fewer micro-batches"] = error_of(
        lambda: trainer.train_mini_batch(batches[rank:], policy_token_loss, 200.0)
    )
    out["denominators"] = error_of(
        lambda: trainer.train_mini_batch(batches, policy_token_loss, 200.0 + rank)
    )

    def reject_gap(metrics):
        raise ValueError(f"a gap of {metrics.values()['policy/abs_prob_gap']}")

    out["checked"] = error_of(
        lambda: trainer.train_mini_batch(batches, policy_token_loss, 200.0, check=reject_gap)
    )
    if rank == 0:
        batches[0].target_ids[batches[0].loss_mask.nonzero()[0]] = VOCABULARY
    out["token id"] = error_of(lambda: trainer.train_mini_batch(batches, policy_token_loss, 200.0))
    out["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    out["steps"] = trainer.step_count
    with torch.no_grad():
        if rank == 1:
            trainer.chunks[0].decoder.layers[0].pre_mlp_layernorm.weight[0] = float("nan")
    out["not a number"] = error_of(
        lambda: trainer.train_mini_batch(
            own_micro_batches(trainer, samples()), policy_token_loss, 200.0
        )
    )
    # Only rank 1 has a NaN. The pass that recomputes log-probabilities must stop both ranks.
    out["recomputed"] = error_of(lambda: trainer.log_probs(own_micro_batches(trainer, samples())))
    trainer.close()
    dist.barrier()
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    return str(save_tiny_model(folder, "qwen3_moe", vocab_size=VOCABULARY, layers=4))


def altered_worker(hf_dir: str, out_dir: str) -> dict[str, tuple[str, str]]:
    """Return a trainer's errors for files config.json that the file of weights contradicts."""
    from megatron_dppo.trainer.topology import destroy_topology

    out = {}
    for name, changes in ALTERED.items():
        folder = Path(shutil.copytree(hf_dir, Path(out_dir) / name))
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        out[name] = error_of(lambda folder=folder: make_trainer(str(folder), {}))
        destroy_topology()
    return out


ALTERED = {
    "narrow": {"moe_intermediate_size": 16},
    "few": {"num_experts": 4},
    "shallow": {"num_hidden_layers": 3},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.distributed
def test_weights_that_config_json_contradicts_are_refused(tiny: str, tmp_path: Path) -> None:
    """Without a check, slices of the tensors would load, and another model would train without an error."""
    (found,) = run_ranks(f"{MODULE}:altered_worker", 1, tiny, str(tmp_path))
    assert {kind for kind, _ in found.values()} == {"CheckpointError"}
    assert "lm_head.weight differs from model.embed_tokens.weight" in found["tied"][1]
    experts = "model.layers.0.mlp.experts.0"
    assert (
        f"{experts}.gate_proj.weight has shape (32, 64), config.json says (16, 64)"
        in (found["narrow"][1])
    )
    assert (
        f"{experts}.down_proj.weight has shape (64, 32), config.json says (64, 16)"
        in (found["narrow"][1])
    )
    assert "unknown, first model.layers.0.mlp.experts.4.down_proj.weight" in found["few"][1]
    assert "unknown, first model.layers.3.input_layernorm.weight" in found["shallow"][1]


@pytest.mark.distributed
def test_every_rank_stops_before_the_update(tiny: str) -> None:
    both = run_ranks(f"{MODULE}:two_rank_worker", 2, tiny)
    for found in both:
        assert found["broadcast"] == {"from": 1, "text": "Σ", "list": [1, 2.5, None]}
        assert found["gathered"] == ["x", "x" * 6]
        assert found["any"] == [True, False]
        assert found["first failure"] == [None, "of 0"]
        assert found["on rank 0"] == 7
        assert found["failed on 1"] == ("RankError", "rank 1: ValueError: no luck")
        assert found["failed as"] == ("LookupError", "rank 1: ValueError: no luck")
        assert found["failed"] == ("ValueError", "rank 1: no luck")
        assert found["agree"][0] == ("", "")
        assert "the rank: [0, 1]" in found["agree"][1][1]
        kind, text = found["poisoned"]
        assert kind == "NonFiniteLossError"
        assert "gradient norm" in text
        assert "micro-batches" in found["fewer micro-batches"][1]
        assert "denominator: [200.0, 201.0]" in found["denominators"][1]
        assert "target ids" in found["token id"][1]
        assert found["unchanged"]
        assert found["steps"] == 0
        assert found["not a number"][0] == "NonFiniteLossError"
        assert found["recomputed"][0] == "NonFiniteLogProbsError"
        assert "logits that hold NaN" in found["recomputed"][1]
    assert both[0]["poisoned"] == both[1]["poisoned"]
    assert both[0]["checked"] == both[1]["checked"]
    assert both[0]["checked"][1].startswith("a gap of ")
    assert both[0]["poisoned"][1].endswith(both[1]["where"])


def pipeline_worker(hf_dir: str, out_dir: str) -> dict[str, Any]:
    """In an interleaved pipeline train a step. Return log-probabilities of each stage, sizes of buckets, and errors."""
    import torch.distributed as dist

    trainer = make_trainer(hf_dir, {"pipeline": 2, "virtual_pipeline": 2, "world_size": 2})
    batches = own_micro_batches(trainer, samples())
    trainer.train_mini_batch(batches, policy_token_loss, 200.0)
    log_probs = trainer.log_probs(batches)
    sizes = [[t.numel() * 4 for _, t in bucket] for bucket in hf_buckets(trainer, 40_000)]
    trainer.export_hf(out_dir)
    again = error_of(lambda: trainer.export_hf(out_dir))
    few = error_of(lambda: trainer.train_mini_batch(batches[:1], policy_token_loss, 1.0))
    trainer.close()
    dist.barrier()
    by_dtype = []
    for dtype in ("float32", "bfloat16"):
        other = make_trainer(hf_dir, {"pipeline": 2, "world_size": 2}, {"dtype": dtype})
        by_dtype.append(torch.cat(other.log_probs(batches)))
        other.close()
    return {
        "bfloat16 error": float((by_dtype[1] - by_dtype[0]).abs().mean()),
        "log_probs": log_probs,
        "tokens": [b.num_tokens for b in batches],
        "buckets": sizes,
        "again": again,
        "few": few,
    }


@pytest.mark.distributed
def test_pipeline_shares_log_probs_and_exports(tiny: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = run_ranks(f"{MODULE}:pipeline_worker", 2, tiny, str(tmp_path / "hf"))
    assert [x.numel() for x in first["log_probs"]] == first["tokens"]
    for a, b in zip(first["log_probs"], second["log_probs"], strict=True):
        assert torch.equal(a, b)

    assert first["bfloat16 error"] < 0.1
    assert len(first["buckets"]) == len(second["buckets"])
    assert not any(second["buckets"])
    assert all(sum(sizes) <= 40_000 or len(sizes) == 1 for sizes in first["buckets"])
    for found in (first, second):
        assert found["again"][0] == "CheckpointError"
        assert "multiple of 2" in found["few"][1]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) > 0
    for batch, own in zip(micro_batches(samples(), 0, 1, 1, 2), first["log_probs"], strict=True):
        with torch.no_grad():
            theirs = hf_log_probs(model, batch, temperature=0.9)
        assert torch.allclose(own[batch.loss_mask], theirs[batch.loss_mask], atol=2e-5, rtol=0)
