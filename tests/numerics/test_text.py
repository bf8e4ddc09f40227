"""Embeddings of prompts against transformers' encoder, padded as the official code pads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wan.checkpoint.layout import inspect_checkpoint
from wan.modules import t5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_prompt_is_embedded_as_with_512_tokens(tiny: Any, dtype: torch.dtype) -> None:
    """Truncation at 512 tokens and shorter padding do not change the embeddings."""
    checkpoint = inspect_checkpoint(tiny("t2v-A14B"))
    network = t5.read_text_encoder_spec(checkpoint.require("text_encoder")).load(
        device=torch.device("cpu"), dtype_of=lambda *_: dtype
    )
    tokenizer = t5.load_tokenizer(checkpoint.require("tokenizer"))
    encoder = t5.TextEncoder(network, tokenizer, dtype=dtype, text_len=512)
    limit = 1e-6 if dtype == torch.float32 else 0.03  # the last bit of a product of other rows
    for num_words in (1, 14, 15, 16, 60, 700):
        prompt = " ".join("cat"[: 1 + i % 3] for i in range(num_words))
        embeds = encoder(prompt)
        padded = tokenizer(
            prompt, padding="max_length", truncation=True, max_length=512, return_tensors="pt"
        )
        padded_embeds = network(padded.input_ids, padded.attention_mask).last_hidden_state[0]
        length = int(padded.attention_mask.sum())
        assert embeds.shape == (length, padded_embeds.shape[1]), num_words
        error = (embeds - padded_embeds[:length]).abs().max()
        assert error <= limit * padded_embeds[:length].abs().max(), num_words


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("<b> a &amp;amp; b", "<b> a & b"),  # ftfy leaves HTML's words where there are tags
        ("a &lt; b", "a < b"),
        ("  a\n\t b\u3000c ", "a b c"),
        ("ｆｕｌｌ，ｗｉｄｔｈ", "full,width"),
        ("schÃ¶n, “q”", 'schön, "q"'),
    ],
)
def test_a_prompt_is_cleaned_as_officially(prompt: str, cleaned: str) -> None:
    assert t5.clean_prompt(prompt) == cleaned
