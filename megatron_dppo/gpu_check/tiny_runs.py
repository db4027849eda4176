"""Short runs of the tiny recipe with the real trainer and the real server, on GPUs where there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo import EXAMPLES
from megatron_dppo.gpu_check.commands import must_run
from megatron_dppo.gpu_check.models import tiny_model
from megatron_dppo.gpu_check.part import LackingError, Row, Site
from megatron_dppo.metrics import names
from megatron_dppo.metrics.normal_ranges import BY_METRIC, Dtype
from megatron_dppo.metrics.records import Record, read_records
from megatron_dppo.preflight.inspection import package_version

RECIPE = str(EXAMPLES / "tiny_moe" / "config.yaml")
_SMALL = (
    "parallel.world_size=1", "parallel.expert=1", "rollout.prompts_per_step=16",
    "training.prompts_per_mini_batch=8", "evaluation.every=1000", "data.evaluation={}",
    "checkpoint.verify_export=false",
)  # fmt: skip


def require_engine() -> None:
    """Raise LackingError without SGLang."""
    if package_version("sglang") is None:
        raise LackingError("sglang is not installed")


def tiny_run(site: Site, name: str, dtype: Dtype, overrides: Sequence[str]) -> Path:
    """Train the demo's random model for a step or as ``overrides`` say; the run's directory, in the part's folder."""
    require_engine()
    from megatron_dppo.demo.devices import engine_overrides
    from megatron_dppo.demo.make_data import make_data

    material = site.folder / "material"
    if not material.exists():
        tiny_model(material / "model")
        make_data(material, seed=1)
    directory = site.folder / name
    must_run([
        "train", RECIPE, f"run.directory={directory}", "run.steps=1",
        f"model.hf_checkpoint={material / 'model'}", f"model.dtype={dtype}",
        f"data.train={material / 'train.jsonl'}", *_SMALL, *engine_overrides(site.gpus), *overrides,
    ])  # fmt: skip
    return directory


def updates_row(label: str, records: Sequence[Record]) -> Row:
    """Whether every weight update was verified; with what the last one moved and took."""
    updates = sum(record.get(names.WEIGHT_UPDATES) or 0 for record in records)
    verified = sum(record.get(names.WEIGHT_UPDATES_VERIFIED) or 0 for record in records)
    last = records[-1]
    figures = {
        k: v for k, v in last.items() if k.startswith("weights/") and isinstance(v, float | int)
    }
    told = f"{verified:.0f} of {updates:.0f} verified tensor by tensor"
    if "weights/bytes_moved" in figures:
        moved, bound = (figures[f"weights/bytes_{kind}"] / 1e6 for kind in ("moved", "bound"))
        told += f", {moved:.2f} MB moved, bound {bound:.2f}"
    if "weights/canary_max_abs_diff" in figures:
        told += f", canary {figures['weights/canary_max_abs_diff']:.1e} nats"
    return Row(label, told, "all, at least 2", bool(verified == updates >= 2), figures)


def gap_row(record: Record, dtype: Dtype) -> Row:
    """mean |pi - mu| at equal weights against its normal range."""
    normal, gap = BY_METRIC[names.GAP_ON_POLICY], record.get(names.GAP_ON_POLICY)
    value = float("nan") if gap is None else gap
    bound = normal.upper(dtype)
    return Row(
        normal.label,
        f"{value:.2g}",
        f"at most {bound:.2g} in {dtype}",
        value <= bound,
        {"gap": value},
    )


def records_of(directory: Path) -> list[Record]:
    """A finished run's records, by step."""
    return read_records(directory)
