"""Models that the tests of conversion share."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Most unit tests need none of the libraries that make a model.
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", layers=4)


@pytest.fixture
def moe_copy(moe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(moe, tmp_path / "hf"))
