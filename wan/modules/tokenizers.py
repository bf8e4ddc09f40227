"""The official tokenizer of prompts."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

from wan.modules.t5 import clean_prompt, load_tokenizer

_CLEANINGS = (None, "whitespace", "lower", "canonicalize")


class HuggingfaceTokenizer:
    """Tokenizes prompts like the official class, from files on this machine.

    Args:
        name: The folder of a tokenizer, such as `google/umt5-xxl` of a checkpoint.
        seq_len: Number of tokens to which prompts are padded and truncated; None: those of the
            longest prompt of a call.
        clean: None, "whitespace", "lower" or "canonicalize" (lower case without punctuation).

    Raises:
        InputError: A ValueError: the folder holds no tokenizer.
        ValueError: Another `clean`.
    """

    def __init__(
        self, name: str | Path, seq_len: int | None = None, clean: str | None = None
    ) -> None:
        if clean not in _CLEANINGS:
            raise ValueError(f"clean is {clean!r}; give one of {_CLEANINGS}.")
        self.name, self.seq_len, self.clean = name, seq_len, clean
        self.tokenizer: Any = load_tokenizer(Path(name))
        self.vocab_size: int = self.tokenizer.get_vocab_size()

    def __call__(
        self,
        sequence: str | list[str],
        return_mask: bool = False,
        add_special_tokens: bool = True,
    ) -> Any:
        """Returns ids, int64 [B, seq_len], and with `return_mask` also their mask."""
        texts = [sequence] if isinstance(sequence, str) else sequence
        rows = [
            self.tokenizer.encode(self._clean(text), add_special_tokens=add_special_tokens).ids
            for text in texts
        ]
        length = max(map(len, rows)) if self.seq_len is None else self.seq_len
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (tokens, ones) in zip(rows, zip(ids, mask, strict=True), strict=True):
            if len(row) > length:  # the last special token stays
                row = [*row[: length - 1], row[-1]] if add_special_tokens else row[:length]
            tokens[: len(row)], ones[: len(row)] = torch.tensor(row), 1
        return (ids, mask) if return_mask else ids

    def _clean(self, text: str) -> str:
        if self.clean is None:
            return text
        text = clean_prompt(text)
        if self.clean == "canonicalize":
            text = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation))
            return " ".join(text.lower().split())
        return text.lower() if self.clean == "lower" else text
