"""Embeddings of prompts against transformers' tokenizer and encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from wan.checkpoint.layout import inspect_checkpoint
from wan.modules import t5


@pytest.fixture(scope="module")
def folder(tiny: Any) -> Path:
    """The text encoder and tokenizer of a checkpoint, as diffusers writes them."""
    return tiny("t2v-A14B", layout="diffusers")


def load_network(folder: Path, dtype: torch.dtype) -> nn.Module:
    spec = t5.read_text_encoder_spec(inspect_checkpoint(folder).require("text_encoder"))
    return spec.load(device=torch.device("cpu"), dtype_of=lambda *_: dtype)


def load_encoder(
    folder: Path, dtype: torch.dtype, network: nn.Module | None = None
) -> t5.TextEncoder:
    checkpoint = inspect_checkpoint(folder)
    network = network or load_network(folder, dtype)
    tokenizer = t5.load_tokenizer(checkpoint.require("tokenizer"))
    return t5.TextEncoder(network, tokenizer, dtype=dtype, text_len=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_prompts_are_embedded_as_by_transformers(folder: Path, dtype: torch.dtype) -> None:
    """Its tokenizer and encoder with 512 tokens; padding changes the last bit of a product."""
    encoder = load_encoder(folder, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    reference = UMT5EncoderModel.from_pretrained(
        folder / "text_encoder", dtype=dtype, attn_implementation="eager"
    )
    limit = 1e-6 if dtype == torch.float32 else 0.03
    for num_words in (0, 1, 14, 15, 16, 60, 700):
        prompt = " ".join("cat"[: 1 + i % 3] for i in range(num_words))
        embeds = encoder(prompt)
        tokens = tokenizer(
            prompt, padding="max_length", truncation=True, max_length=512, return_tensors="pt"
        )
        expected = reference(**tokens).last_hidden_state[0]
        length = int(tokens.attention_mask.sum())
        assert embeds.shape == (length, expected.shape[1]), num_words
        error = (embeds - expected[:length]).abs().max()
        assert error <= limit * expected[:length].abs().max(), num_words


def test_weights_in_bfloat16_are_upcast_one_layer_at_a_time(folder: Path) -> None:
    """The values of float32 weights that are rounded; the weights stay as they are stored."""
    rounded = load_network(folder, torch.bfloat16).float()
    expected = load_encoder(folder, torch.float32, rounded)
    network = load_network(folder, torch.bfloat16)
    encoder = load_encoder(folder, torch.float32, network)
    for prompt in ("a cat", "two cats"):
        assert torch.equal(encoder(prompt), expected(prompt))
        assert {x.dtype for x in network.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_encoder_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    sizes = {"vocab_size": 90, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2}
    config = UMT5Config(**sizes, num_heads=5, feed_forward_proj="gated-gelu")
    config._attn_implementation = "eager"  # others are 2e-6 off
    reference, generator = UMT5EncoderModel(config).eval(), torch.Generator().manual_seed(1)
    for parameter in reference.parameters():
        parameter.normal_(std=0.3, generator=generator)
    network = t5.Umt5Encoder(**sizes, num_heads=5)
    tensors = reference.state_dict()
    del tensors["encoder.embed_tokens.weight"]  # the same tensor as shared.weight
    network.load_state_dict(tensors)
    reference, network = reference.to(dtype), network.to(dtype)
    for num_tokens, num_valid in ((16, 3), (300, 300), (512, 190)):
        ids = torch.randint(90, (2, num_tokens), generator=generator)
        mask = (torch.arange(num_tokens) < num_valid).long().expand(2, -1)
        expected = reference(ids, mask).last_hidden_state
        assert torch.equal(network(ids, mask), expected), num_tokens


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
