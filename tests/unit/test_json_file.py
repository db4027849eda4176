"""JSON files of models and checkpoints that can't be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.model.errors import CheckpointError, ModelConfigError
from megatron_dppo.model.json_file import read_json
from tests.messages import mentioning


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff", b"[" * 10**5, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_an_unreadable_file_is_an_error_with_what_was_expected(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=mentioning(path, "the index")):
        read_json(path, "the index")
    with pytest.raises(ModelConfigError):
        read_json(path, "the index", ModelConfigError)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": ["é", null]}', encoding="utf-8")
    assert read_json(path, "anything") == {"a": ["é", None]}
