"""The output matrix of a tied checkpoint in a server whose model keeps one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.weights.server.tied_output import load_output
from tests.tiny_models import save_tiny_model


def loaded(folder, **changes):
    """Return what ``load_output`` loads into a model of the checkpoint in ``folder``."""
    tensors = {}
    settings = {"is_draft_worker": False, "load_format": "auto", **changes}
    runner = SimpleNamespace(
        is_draft_worker=settings["is_draft_worker"],
        server_args=SimpleNamespace(load_format=settings["load_format"]),
        model_config=SimpleNamespace(model_path=str(folder)),
        model=SimpleNamespace(load_weights=tensors.update),
    )
    load_output(None, runner)
    return tensors


def test_a_tied_embedding_is_loaded_into_the_output_matrix(tmp_path):
    folder = save_tiny_model(tmp_path, tied=True)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    embedding = model.get_input_embeddings().weight
    ((name, tensor),) = loaded(folder).items()
    assert name == "lm_head.weight"
    assert torch.equal(tensor, embedding)


@pytest.mark.parametrize("changes", [{"is_draft_worker": True}, {"load_format": "dummy"}])
def test_a_draft_and_drawn_weights_keep_their_own(tmp_path, changes):
    assert loaded(save_tiny_model(tmp_path, tied=True), **changes) == {}


def test_an_output_matrix_of_the_checkpoint_stays(tmp_path):
    assert loaded(save_tiny_model(tmp_path, tied=False)) == {}
