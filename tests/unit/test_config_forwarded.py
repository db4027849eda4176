"""The ``megatron:`` and ``sglang:`` tables against the installed libraries' own fields."""

import json
import subprocess
import sys
import textwrap

import pytest

from megatron_dppo.config import ConfigError, check_config, forwarded, load_config
from megatron_dppo.config.forwarded import (
    MEGATRON_FIXED,
    MEGATRON_OWNED,
    SGLANG_FIXED,
    SGLANG_OWNED,
)
from megatron_dppo.config.library_fields import (
    LibraryMissingError,
    server_args_fields,
    transformer_config_fields,
)
from tests.unit.config_files import minimal, write_config


@pytest.fixture
def check(tmp_path):
    path = write_config(tmp_path, minimal(tmp_path))
    return lambda *overrides: check_config(load_config(path, overrides))


FORWARDED = [
    (
        "megatron.moe_router_topk=3",
        "megatron.moe_router_topk: got 3 (int), expected nothing: model.hf_checkpoint's "
        "config.json sets it",
    ),
    (
        "megatron.tensor_model_parallel_size=2",
        "megatron.tensor_model_parallel_size: got 2 (int), expected nothing: parallel.tensor sets "
        "it",
    ),
    (
        "megatron.attention_dropout=0.1",
        "megatron.attention_dropout: got 0.1 (float), expected nothing: with dropout pi would "
        "differ",
    ),
    (
        "megatron.moe_grouped_gem=true",
        "megatron.moe_grouped_gem: got true (bool), not a field of TransformerConfig "
        "(megatron-core 0.16.1); did you mean moe_grouped_gemm",
    ),
    (
        "megatron.moe_grouped_gemm=1",
        "megatron.moe_grouped_gemm: got 1 (int), expected true or false, as TransformerConfig",
    ),
    (
        "megatron.moe_input_jitter_eps=x",
        "megatron.moe_input_jitter_eps: got 'x' (str), expected a number or null",
    ),
    (
        "megatron.moe_router_dtype=fp8",
        "megatron.moe_router_dtype: got 'fp8' (str), expected one of 'fp32', 'fp64' or null",
    ),
    (
        "megatron.init_method=x",
        "megatron.init_method: got 'x' (str), expected a Python function, which YAML can't hold",
    ),
    ("sglang.port=3", "sglang.port: got 3 (int), expected nothing: engine.port sets it"),
    (
        "sglang.temperature=0.7",
        "sglang.temperature: got 0.7 (float), expected nothing: rollout.temperature and "
        "evaluation.temperature sets it",
    ),
    (
        "sglang.api_key=x",
        "sglang.api_key: got 'x' (str), expected nothing: the run makes its own keys",
    ),
    (
        "sglang.mem_fraction=0.5",
        "sglang.mem_fraction: got 0.5 (float), not a field of ServerArgs (sglang 0.5.23); did you "
        "mean mem_fraction_static",
    ),
    (
        "sglang.tp_size=1.5",
        "sglang.tp_size: got 1.5 (float), expected a whole number, as ServerArgs",
    ),
    (
        "sglang.uses_mamba_radix_cache=true",
        "sglang.uses_mamba_radix_cache: got true (bool), expected nothing: ServerArgs (sglang "
        "0.5.23) computes it",
    ),
    ("sglang.attn_tp_size=2", "sglang.attn_tp_size: got 2 (int), not a field of ServerArgs"),
]


@pytest.mark.parametrize(("override", "problem"), FORWARDED)
def test_forwarded_tables(check, override, problem):
    with pytest.raises(ConfigError) as caught:
        check(override)
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_the_sglang_table_of_a_server_elsewhere_needs_no_sglang(check, monkeypatch):
    def missing():
        raise LibraryMissingError("sglang is not installed in this environment")

    monkeypatch.setattr(forwarded, "server_args_fields", missing)
    check("sglang.x=1", "engine.urls=[http://engine:30000]")
    with pytest.raises(ConfigError, match="sglang: can't be checked: sglang is not installed"):
        check("sglang.x=1")


def test_forwarded_tables_that_fit(check):
    check(
        "megatron.moe_token_dispatcher_type=flex",
        "megatron.moe_input_jitter_eps=0",
        "megatron.recompute_modules=[core_attn]",
        "megatron.attention_backend=flash",
        "megatron.deterministic_mode=true",
        "sglang.mem_fraction_static=0.5",
        "sglang.tp_size=2",
        "sglang.max_total_tokens=8192",
        "sglang.disable_cuda_graph=true",
        "sglang.gc_threshold=[1, 2]",
        "sglang.load_format=dummy",
    )


OWN_FIELDS = {
    transformer_config_fields: """
        import dataclasses
        from megatron.core.transformer.transformer_config import TransformerConfig
        names = [f.name for f in dataclasses.fields(TransformerConfig)]
    """,
    server_args_fields: """
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.server_args import ServerArgs
        names = [f.name for f in record_fields(ServerArgs)]
    """,
}


@pytest.mark.parametrize("read_fields", OWN_FIELDS, ids=lambda f: f.__name__)
def test_the_fields_read_from_source_are_the_library_s_own(tmp_path, read_fields):
    code = textwrap.dedent(OWN_FIELDS[read_fields])
    code += f"import json\njson.dump(names, open({str(tmp_path / 'names')!r}, 'w'))\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    own = json.loads((tmp_path / "names").read_text())
    assert read_fields().annotations.keys() == set(own)


def test_every_key_that_a_section_owns_is_a_field_of_the_library():
    sampling = {"temperature", "top_p", "top_k", "max_new_tokens"}  # of requests, not of the server
    assert {*MEGATRON_OWNED, *MEGATRON_FIXED} <= transformer_config_fields().annotations.keys()
    assert {*SGLANG_OWNED, *SGLANG_FIXED} - sampling <= server_args_fields().annotations.keys()
