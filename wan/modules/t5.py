"""Encodes prompts: the official cleaning, and the tokenizer and encoder of UMT5.

Legend: T tokens of one prompt (at most text_len), C text channels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.embedded_tokenizer import UnigramVocab, read_embedded_tokenizer
from wan.checkpoint.keymaps import rename_t5_to_transformers
from wan.checkpoint.load import DtypeRule, ModelSpec, describe_mismatch, read_headers
from wan.modules.umt5 import Umt5Encoder
from wan.settings.errors import InputError
from wan.utils.log import logger
from wan.utils.system import limit_cpu_threads

BLOCKS_NAME, EMBEDDING_NAME = "encoder.block", "shared"
"""Names of the encoder's list of blocks and of its embedding."""
PAD_MULTIPLE = 16
"""A prompt is padded to a multiple of this number of tokens. The official code pads to 512, and
removes the padding from the result; masked tokens change no other row."""


def clean_prompt(prompt: str) -> str:
    """Cleans a prompt like the official code: Unicode, HTML entities (twice) and white space.

    ftfy also turns full-width punctuation into ASCII, which changes the token ids.
    """
    import ftfy

    unescaped = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", unescaped).strip()


class TextEncoder:
    """Encodes prompts with UMT5, bit-equal to the official encoder."""

    def __init__(
        self, network: nn.Module, tokenizer: Any, *, dtype: torch.dtype, text_len: int
    ) -> None:
        """Registers upcasting hooks if the weights have another dtype.

        Args:
            network: The loaded network of `read_text_encoder_spec`, sharded or not.
            tokenizer: From `load_tokenizer`.
            dtype: The dtype of all computations. With bfloat16 weights and float32 one layer at a
                time is upcast, so that umt5-xxl takes 11 GB, not 23.
            text_len: Maximum number of tokens; longer prompts are truncated.
        """
        self.text_len = text_len
        self._tokenizer, self._model = tokenizer, network
        if next(network.parameters()).dtype != dtype:
            _upcast_layers(network, dtype)

    @torch.no_grad()
    def __call__(self, prompt: str) -> Tensor:
        """Encodes a prompt to [T,C]. Tokens beyond `text_len` are dropped, with a warning."""
        ids = self._tokenizer.encode(clean_prompt(prompt)).ids
        if len(ids) > self.text_len:
            logger.warning(
                "The prompt has %d tokens; only the first %d are used.", len(ids), self.text_len
            )
            ids = [*ids[: self.text_len - 1], ids[-1]]  # the last one is the end of the text
        num_tokens = min(-(-len(ids) // PAD_MULTIPLE) * PAD_MULTIPLE, self.text_len)
        mask = torch.arange(num_tokens) < len(ids)
        padded = torch.tensor(ids + [0] * (num_tokens - len(ids)))
        device = next(self._model.parameters()).device
        with limit_cpu_threads():  # for an encoder on the CPU
            states: Tensor = self._model(padded[None].to(device), mask[None].to(device))
        return states[0, : len(ids)]


def load_tokenizer(path: Path) -> Any:
    """Reads the tokenizer of a folder, or the tokenizer embedded in a text encoder's file.

    Returns:
        A tokenizer of the tokenizers library, which neither pads nor truncates.

    Raises:
        InputError: The tokenizer is damaged or missing.
    """
    from tokenizers import Tokenizer

    if path.is_dir() and (path / "tokenizer.json").is_file():
        with _refuse_damaged_tokenizer(path):
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode("a")
        return tokenizer
    file = path / "spiece.model" if path.is_dir() else path
    if not file.is_file():
        why = "holds neither tokenizer.json nor spiece.model"
        raise InputError(str(path), None, why, "download google/umt5-xxl of the checkpoint again")
    return _make_unigram_tokenizer(file, read_embedded_tokenizer(file))


def _make_unigram_tokenizer(path: Path, vocab: UnigramVocab) -> Any:
    """Builds T5's Unigram tokenizer from a SentencePiece vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    with _refuse_damaged_tokenizer(path):
        tokenizer = Tokenizer(models.Unigram(vocab.vocab, unk_id=2, byte_fallback=False))
        if vocab.precompiled_charsmap:
            tokenizer.normalizer = normalizers.Precompiled(vocab.precompiled_charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    end = vocab.vocab[1][0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, 1)]
    )
    tokenizer.add_special_tokens(vocab.special_tokens)
    return tokenizer


@contextmanager
def _refuse_damaged_tokenizer(path: Path) -> Iterator[None]:
    """Turns errors of the tokenizers library into refusals."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exceptions, and panics are none
        raise InputError(str(path), None, "holds no usable tokenizer", "download it") from error


def read_text_encoder_spec(path: Path) -> ModelSpec[nn.Module]:
    """Reads the sizes of a UMT5 encoder from the headers of its weights, without loading it.

    Raises:
        InputError: The weights belong to another network.
    """
    tensors = read_headers(path, rename_t5_to_transformers, "text_encoder")
    layer = "encoder.block.0.layer"
    try:
        vocab_size, d_model = tensors["shared.weight"].shape
        buckets, heads = tensors[f"{layer}.0.SelfAttention.relative_attention_bias.weight"].shape
        sizes = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_kv": tensors[f"{layer}.0.SelfAttention.q.weight"].shape[0] // heads,
            "d_ff": tensors[f"{layer}.1.DenseReluDense.wi_0.weight"].shape[0],
            "num_layers": len({name.split(".")[2] for name in tensors if ".block." in name}),
            "num_heads": heads,
            "relative_attention_num_buckets": buckets,
        }
        if min(sizes.values()) < 1:
            raise ValueError("a size of 0")
    except (LookupError, ValueError, ZeroDivisionError) as error:
        why = f"does not hold the weights of a UMT5 encoder ({describe_mismatch(error)})"
        remedy = "give models_t5_umt5-xxl-enc-bf16.pth or a file with its weights"
        raise InputError(str(path), None, why, remedy) from error
    return ModelSpec("text encoder", partial(Umt5Encoder, **sizes), tensors, path)


def build_published_text_encoder() -> Umt5Encoder:
    """Builds the encoder of umt5-xxl, the text encoder of all published checkpoints."""
    return Umt5Encoder(
        vocab_size=256384,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        relative_attention_num_buckets=32,
    )


def choose_text_encoder_dtypes(compute: torch.dtype) -> DtypeRule:
    """Chooses the weights' dtype: the stored dtype if `compute` is float32, else `compute`."""
    return lambda _, stored_dtype: stored_dtype if compute == torch.float32 else compute


def list_umt5_blocks(model: Any) -> list[nn.Module]:
    """Lists the large modules of a UMT5 encoder in the order of their calls."""
    return [model.shared, *model.encoder.block]


def _upcast_layers(model: Any, dtype: torch.dtype) -> None:
    """Registers hooks that upcast each layer during its forward, and restore its weights after it.

    The hooks read the weights when the layer runs, because FSDP's hooks gather a sharded layer
    just before.
    """
    for layer in [*model.encoder.block, model.encoder.final_layer_norm]:
        stored_data: list[tuple[nn.Parameter, Tensor]] = []

        def upcast(module: nn.Module, _: Any, stored_data: Any = stored_data) -> None:
            stored_data.extend((parameter, parameter.data) for parameter in module.parameters())
            for parameter, data in stored_data:
                parameter.data = data.to(dtype)

        def restore(_: nn.Module, __: Any, ___: Any, stored_data: Any = stored_data) -> None:
            for parameter, data in stored_data:
                parameter.data = data
            stored_data.clear()

        layer.register_forward_pre_hook(upcast)
        layer.register_forward_hook(restore, always_call=True)
    model.shared.register_forward_hook(lambda *args: args[-1].to(dtype))
