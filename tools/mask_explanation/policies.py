"""Policies from Hugging Face folders on the CPU, and token ids as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.data.trajectory import Trajectory


class Policy:
    """The model in ``folder`` by transformers, in float32.

    Raises OSError or ValueError if transformers cannot load a model from the folder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: expected a Hugging Face folder, found no config.json")
        disable_progress_bar()
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        ).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    @torch.no_grad()
    def logits(self, trajectory: Trajectory) -> Tensor:
        """Logits, float32 [S, V]; row t predicts token t + 1.

        Raises ValueError for an id outside the model's vocabulary.
        """
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        if int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: the batch holds token id {int(ids.max())}, but this model's "
                f"vocabulary has {self.vocab_size}: it is another model's batch"
            )
        return self._model(ids).logits[0].float()


class TokenTexts:
    """Token id -> text. A token that is part of a character is shown by its name in the vocabulary,
    an id that the tokenizer does not know by its number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._text(token_id)
        return self._known[token_id]

    def joined(self, token_ids: list[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _text(self, token_id: int) -> str:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if text and "\ufffd" not in text:
            return text
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return f"<id {token_id}>" if name is None else str(name)
