"""``--check`` warns of embedding rows of zeros whose tokens can be sampled."""

import pytest
from safetensors.torch import load_file, save_file

from megatron_dppo.launch.library_checks import embedding_warnings
from megatron_dppo.model.families import load_model_shape
from tests.messages import mentions
from tests.tiny_models import save_tiny_model


@pytest.mark.parametrize(("rows", "ids"), [([], None), ([5, 7], "5, 7")])
def test_rows_of_zeros_of_the_embedding_are_named(tmp_path, rows, ids):
    save_tiny_model(tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensors[name][:] = 1.0
    tensors[name][rows] = 0.0
    save_file(tensors, file, metadata={"format": "pt"})
    warnings = embedding_warnings(str(tmp_path / "model"), load_model_shape(tmp_path / "model"))
    if ids is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert mentions(warning, "model.hf_checkpoint", name, 2, "ids 5, 7")


def test_a_folder_without_weights_has_no_warning(tmp_path):
    save_tiny_model(tmp_path / "model")
    shape = load_model_shape(tmp_path / "model")
    assert embedding_warnings(str(tmp_path), shape) == []
