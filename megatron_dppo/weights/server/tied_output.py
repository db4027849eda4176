"""The output matrix of a tied checkpoint, in models of SGLang that keep one beside the embedding.

Such a model loads the tensors that a checkpoint has, and a tied checkpoint has no output matrix. SGLang leaves the
matrix as it was allocated: logits are arbitrary, or NaN, until the first weight update. A server without updates
(``evaluate``, ``rollout``) would never have the right ones.
"""

from __future__ import annotations

from typing import Any

from megatron_dppo.engine.server import hooks
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import keeps_untied_output
from megatron_dppo.weights.server.direct_loading import LOADED, served_shape


def register() -> None:
    """Register the hook, in each process of a server, before ``direct_loading`` registers its own."""
    hooks.register(LOADED, load_output, "after")


def load_output(result: Any, runner: Any, *_: Any) -> None:
    """Load the embedding into the output matrix of the model that ``runner`` has loaded, if the model has both."""
    if runner.is_draft_worker or runner.server_args.load_format == "dummy":
        return
    folder = str(runner.model_config.model_path)
    try:
        shape = served_shape(folder)
    except (ModelError, OSError):
        # A server of a model that no run can train: SGLang alone knows it.
        return
    if not keeps_untied_output(shape):
        return
    from megatron_dppo.checkpoint_conversion.hf_folder import SafetensorsReader

    embedding, output = family_of(shape).vocabulary_tensors
    with SafetensorsReader(folder) as reader:
        matrix = reader.read(embedding)
    runner.model.load_weights([(output, matrix)])
