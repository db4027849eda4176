"""A loaded tokenizer has the rules of its tokenizer.json, whatever class transformers chooses for the folder."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils.hf_transformers import tokenizer as sglang_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_dppo.data.problems import load_tokenizer
from megatron_dppo.data.records import DataError
from megatron_dppo.data.tokenizer import load_named_tokenizer
from megatron_dppo.engine.server import server_tokenizer
from tests.chat_templates import PUBLISHED, published_tokenizer
from tests.messages import mentioning
from tests.tiny_models import tiny_tokenizer

TEXT = "What is  3 + 456?\n\n\tcafe\u0301 - don't\r\n"
# (family whose tokenizer is copied, tokenizer_class, model_type): byte-level rules under a class of sentencepiece and
# the reverse, Qwen's split into words for others, and a class that the model's type alone decides.
UNFIT = [
    ("llama", "LlamaTokenizerFast", "llama"),
    ("llama", "LlamaTokenizer", "qwen3_moe"),
    ("qwen3", "LlamaTokenizerFast", "olmoe"),
    ("llama", "PreTrainedTokenizerFast", "qwen2"),
    ("llama", "LlamaTokenizerFast", "qwen2"),
    ("qwen3", None, "olmoe"),
    ("mixtral", "Qwen2TokenizerFast", "llama"),
    ("mixtral", "LlamaTokenizerFast", "llama"),
]


def save(folder: Path, family: str, class_name: str | None, model_type: str) -> Path:
    published_tokenizer(PUBLISHED[family]).save_pretrained(folder)
    change_config(folder, backend=None, tokenizer_class=class_name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of tokenizer_config.json; None removes a key."""
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def rules_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("family", "class_name", "model_type"), UNFIT)
def test_an_unfit_class_does_not_change_the_ids(tmp_path, caplog, family, class_name, model_type):
    folder = save(tmp_path, family, class_name, model_type)
    expected_ids = rules_of(folder).encode(TEXT, add_special_tokens=False).ids
    tokenizer = load_tokenizer(folder)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == expected_ids
    assert tokenizer.decode(expected_ids) == rules_of(folder).decode(
        expected_ids, skip_special_tokens=False
    )
    assert tokenizer.chat_template == PUBLISHED[family].template
    (message,) = [record.getMessage() for record in caplog.records]
    unfit_tokenizer = AutoTokenizer.from_pretrained(folder)
    for words in (
        str(folder),
        "tokenizer_class",
        json.dumps(class_name),
        type(unfit_tokenizer).__name__,
    ):
        assert words in message


@pytest.mark.parametrize("family", ["qwen3", "llama", "mixtral"])
def test_a_class_that_keeps_the_rules_is_loaded_in_silence(tmp_path, caplog, family):
    caplog.set_level(logging.WARNING)
    load_tokenizer(save(tmp_path, family, "PreTrainedTokenizerFast", "glm4_moe"))
    assert not caplog.records


def test_a_configuration_that_contradicts_the_rules_is_refused(tmp_path):
    folder = save(tmp_path, "qwen3", "PreTrainedTokenizerFast", "glm4_moe")
    change_config(folder, extra_special_tokens=["What"])
    with pytest.raises(DataError, match=mentioning(folder, "tokenizer_config.json", "What")):
        load_tokenizer(folder)


def test_a_folder_without_rules_is_loaded(tmp_path, monkeypatch, caplog):
    """Some tokenizers have no tokenizer.json. A folder is also a name of the hub, as for a reward model."""
    folder = save(tmp_path, "qwen3", "PreTrainedTokenizerFast", "qwen3")
    monkeypatch.setattr("megatron_dppo.data.tokenizer._rules_of", lambda *_: None)
    assert load_named_tokenizer(str(folder)).chat_template
    assert not caplog.records


@pytest.mark.parametrize(("family", "class_name", "model_type"), UNFIT)
def test_a_server_decodes_by_the_rules(tmp_path, family, class_name, model_type):
    """The hook runs in SGLang's own function, which every process of a server calls."""
    folder = save(tmp_path, family, class_name, model_type)
    server_tokenizer.register()
    HookRegistry.apply_hooks()
    tokenizer = sglang_tokenizer.get_tokenizer(str(folder))
    rules = rules_of(folder)
    ids = rules.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == rules.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids
    assert tokenizer.eos_token == "<|im_end|>"
    assert hasattr(tokenizer, "additional_stop_token_ids")


@pytest.mark.parametrize("class_name", [None, "LlamaTokenizerFast", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("declared", [True, False, None])
def test_a_text_begins_with_the_token_that_the_folder_asks_for(
    tmp_path, caplog, class_name, declared
):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    first = tokenizer.convert_tokens_to_ids("<|im_start|>")
    keys = {"add_bos_token": declared, "bos_token": "<|im_start|>"}
    change_config(tmp_path, backend=None, tokenizer_class=class_name, **keys)
    loaded = load_tokenizer(tmp_path)
    ids = loaded(TEXT, add_special_tokens=False)["input_ids"]
    assert loaded(TEXT)["input_ids"] == ([first, *ids] if declared else ids)
    assert any("add_bos_token" in record.message for record in caplog.records) is bool(declared)


def set_vocabulary(folder: Path, change: Any) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    change(values["model"]["vocab"])
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: set_vocabulary(d, lambda v: v.clear()),
        lambda d: set_vocabulary(d, lambda v: v.update(q=-1)),
        lambda d: set_vocabulary(d, lambda v: v.update(q=2**31)),
        lambda d: change_config(d, model_max_length="long"),
        lambda d: change_config(d, model_max_length=[]),
    ],
    ids=["no token", "a negative id", "a far id", "a length of text", "a length of a list"],
)
def test_a_tokenizer_that_can_encode_nothing_is_refused(tmp_path, damage):
    tiny_tokenizer().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["{folder}/absent", "./absent", "../absent/model", "models/of/mine"]
)
def test_the_hub_is_not_asked_for_a_path(tmp_path, monkeypatch, name):
    """The hub has names without or with one slash. Any connection fails the test."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was made"))
    path = name.format(folder=tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_named_tokenizer(path)
