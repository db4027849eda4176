"""Every recipe's engine options as SGLang's own code resolves them for an H100 node, without a GPU.

``python -m tests.gpu_evidence.engine_options`` prints the options; ``--write`` puts them into ``engine_options.yaml``.
``--layouts`` prints as JSON how single options change the layout. The module needs its own process: in this process
torch reports eight H100, and sgl_kernel and flashinfer are inert modules.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tests.gpu_evidence import inert

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
GOLDEN = Path(__file__).with_name("engine_options.yaml")
BASE = "scaling"  # the recipes extend this file, which is no recipe itself
GPUS = 8
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=81_559 << 20,  # as nvidia-smi says
    multi_processor_count=132,
)
CUDA_ONLY = ("sgl_kernel", "flashinfer")
ALWAYS = (
    *("attention_backend", "sampling_backend", "moe_runner_backend", "disable_overlap_schedule"),
    *("disable_radix_cache", "enable_return_routed_experts", "tp_size", "mem_fraction_static"),
    *("kv_cache_dtype", "max_running_requests", "chunked_prefill_size", "enable_lora"),
)
"""Options that are shown even if they have SGLang's default."""
OF_THE_PLACE = ("model_path", "tokenizer_path", "served_model_name", "random_seed")
EVERY = "every recipe"
COLOCATED = "every recipe, colocated"
"""Heading of the options that SGLang resolves differently for a server that can release its memory."""
HEAD = """\
# SGLang's own resolution of every recipe's engine options under a faked H100: what differs from its command line's
# defaults, and a few that never do. Written by: python -m tests.gpu_evidence.engine_options --write
"""


class _Dumper(yaml.SafeDumper):
    """Writes one option on each line, and each list on as few lines as possible."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, True)
)


def pretend() -> None:
    """Make this process see a node with eight H100."""
    import torch

    from megatron_dppo.cpu import engine

    engine._make_torchvision_importable()
    os.environ.pop("SGLANG_PLATFORM", None)
    os.environ["PATH"] = os.defpath  # SGLang must not find this machine's nvidia-smi
    inert.provide(*CUDA_ONLY)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": GPUS,
        "current_device": 0,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_properties": H100,
        "get_device_name": H100.name,
        "mem_get_info": (H100.total_memory, H100.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"


def shown_options(recipe: Path, placement: str | None = None) -> dict[str, Any]:
    """Return resolved options of ``recipe``'s first server: those in ALWAYS, and those without SGLang's default."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    defaults = vars(parser.parse_args(["--model-path", "any"]))
    values = resolution(recipe, placement)
    return {
        name: values[name]
        for name in sorted(defaults.keys() & values.keys())
        if name not in OF_THE_PLACE and (name in ALWAYS or values[name] != defaults[name])
    }


def resolution(
    recipe: Path, placement: str | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return all resolved options of the first server of ``recipe``, with ``more`` in its ``sglang:`` table.

    ``placement``: placement of trainer and servers; None: the recipe's own.
    """
    from sglang.srt.server_args import prepare_server_args

    from megatron_dppo.config import load_config
    from megatron_dppo.engine.options import server_options, write_options
    from megatron_dppo.spec import ModelSpec, RunSpec

    name = Path(load_config(recipe).model.hf_checkpoint).name.lower()
    model = ROOT / "examples" / "model_configs" / name
    changes = [f"model.hf_checkpoint={model}", "engine.device=cuda"]
    if placement is not None:
        changes.append(f"engine.placement={placement}")
    config = load_config(recipe, changes)
    # The function reads no teacher's files, which are not here.
    servers = RunSpec.of_model(config, ModelSpec.read(config)).servers
    options = server_options(servers, host="127.0.0.1", port=30000, seed=1) | dict(more or {})
    with tempfile.TemporaryDirectory() as folder:
        write_options(options, file := Path(folder) / "options.yaml")
        server_args = prepare_server_args(["--config", str(file)])
        logging.getLogger().setLevel(logging.ERROR)
        server_args.resolve_once()
    return dict(server_args.resolved_dict())


LAYOUT = (
    *("tp_size", "pp_size", "dp_size", "ep_size", "moe_dp_size", "attn_dp_size", "attn_cp_size"),
    *("dcp_size", "dwdp_size", "moe_a2a_backend", "moe_dense_tp_size", "enable_dp_attention"),
    *("enable_dp_lm_head", "shared_experts_tp_size"),
    *("moe_runner_backend", "quantization", "dtype", "enable_return_routed_experts"),
    *("speculative_algorithm", "enable_eplb", "weight_cache_mode", "cpu_offload_gb"),
)
"""Options that say how weights lie in a server, and whether its routing is recorded."""
MOVING: dict[str, Any] = {"attn_dp_size": 2, "moe_a2a_backend": "deepep"}
"""Options that change the layout: attention replicas, which updates support, and a token exchange, which is refused."""
NUMBERS: dict[str, Any] = {
    "mem_fraction_static": 0.7,
    "max_running_requests": 64,
    "max_queued_requests": 64,
    "max_total_tokens": 65536,
    "max_prefill_tokens": 4096,
    "prefill_max_requests": 8,
    "chunked_prefill_size": 2048,
    "context_length": 16384,
    "page_size": 64,
    "schedule_conservativeness": 0.5,
    "num_continuous_decode_steps": 2,
    "scheduler_recv_interval": 2,
    "dist_timeout": 100,
    "watchdog_timeout": 100.0,
    "stream_interval": 4,
    "cuda_graph_max_bs_decode": 16,
    "cuda_graph_max_bs_prefill": 1024,
    "triton_attention_num_kv_splits": 4,
    "load_format": "dummy",
    "gc_threshold": [1000],
}
"""A value of each option in SGLANG.options that takes numbers or text."""


MOST_VALUES = 5
"""Number of values that are tried of an option with choices. All options together take half a minute."""


def layouts() -> dict[str, Any]:
    """Return, by ``option=value``, the options of LAYOUT that SGLang then resolves differently; text if it refuses."""
    from sglang.srt.server_args import ServerArgs

    from megatron_dppo.config.forwarded import SGLANG, OptionFact

    pretend()
    recipe = RECIPES / "qwen3_30b_a3b_r3.yaml"
    base = resolution(recipe)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    candidates = [*MOVING.items(), *NUMBERS.items()]
    known_options = SGLANG.options_with(OptionFact.KNOWN)
    for action in parser._actions:
        # Another test checks the kernels of the experts.
        if action.dest not in {*known_options} - {*NUMBERS, "moe_runner_backend"}:
            continue
        values = list(action.choices or [])[:MOST_VALUES]
        if action.nargs == 0 and action.const is not None:
            values = [action.const]
        candidates += [(action.dest, value) for value in values if value is not None]
    found: dict[str, Any] = {}
    for name, value in candidates:
        try:
            resolved = resolution(recipe, more={name: value})
        except (Exception, SystemExit) as error:
            found[f"{name}={value}"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        found[f"{name}={value}"] = {
            key: resolved.get(key) for key in LAYOUT if resolved.get(key) != base.get(key)
        }
    return found


def text() -> str:
    """Return the text that the golden file must have."""
    pretend()
    recipes = [path for path in sorted(RECIPES.glob("*.yaml")) if path.stem != BASE]
    of_recipe = {path.stem: shown_options(path) for path in recipes}
    colocated = shown_options(recipes[0], "colocated").items()
    changed = {k: v for k, v in colocated if of_recipe[recipes[0].stem].get(k) != v}
    first, *others = of_recipe.values()
    common = {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }
    own = {
        recipe: {name: value for name, value in values.items() if name not in common}
        for recipe, values in of_recipe.items()
    }
    found = {EVERY: common, COLOCATED: changed, **own}
    return HEAD + yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=130)


if __name__ == "__main__":
    if "--layouts" in sys.argv[1:]:
        print(json.dumps(layouts(), default=str))
    elif "--write" in sys.argv[1:]:
        GOLDEN.write_text(text())
    else:
        print(text(), end="")
