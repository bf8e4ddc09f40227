"""Prompts to text embeddings: official cleaning, UMT5 tokenizer and encoder.

Legend: T tokens of one prompt (at most text_len), C text channels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan.log import logger
from wan.settings.errors import InputError


def clean_prompt(prompt: str) -> str:
    """The official cleaning: mend Unicode, unescape HTML twice, collapse white space.

    ftfy also turns full-width punctuation into ASCII, which changes the token ids.
    """
    import ftfy

    mended = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", mended).strip()


class TextEncoder:
    """UMT5 with eager attention, which is bit-equal to the official encoder.

    weights: a state dict under transformers' names, on the device, or a network of `umt5` that has
    been given them, whole or sharded. dtype: what is computed in; where weights are bfloat16 and
    dtype is float32, one layer at a time is upcast, so that the real encoder takes 11 GB, not 23.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor] | nn.Module,
        tokenizer: Path,
        *,
        dtype: torch.dtype,
        text_len: int,
    ) -> None:
        self.text_len = text_len
        self._tokenizer = _load_tokenizer(tokenizer)
        self._model: Any = weights if isinstance(weights, nn.Module) else _with_weights(weights)
        if self._model.dtype != dtype:
            _compute_in(self._model, dtype)

    @torch.no_grad()
    def __call__(self, prompt: str) -> Tensor:
        """Embedding [T, C] of a prompt. What exceeds text_len tokens is cut, with a message."""
        text = clean_prompt(prompt)
        ids = self._tokenizer(text).input_ids
        if len(ids) > self.text_len:
            logger.warning(
                "The prompt has %d tokens; those after the first %d are cut.",
                len(ids),
                self.text_len,
            )
        tokens = self._tokenizer(
            text,
            padding="max_length",
            truncation=True,
            max_length=self.text_len,
            return_tensors="pt",
        ).to(self._model.device)
        states = self._model(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return states[0, : min(len(ids), self.text_len)]


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder} holds no usable tokenizer ({reason}); download it.") from error


def umt5_sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of a UMT5 encoder whose tensors have these shapes, as UMT5Config names them.

    InputError where they are not those of a UMT5 encoder.
    """
    layer = "encoder.block.0.layer"
    try:
        vocab_size, d_model = shapes["shared.weight"]
        buckets, heads = shapes[f"{layer}.0.SelfAttention.relative_attention_bias.weight"]
        return {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_kv": shapes[f"{layer}.0.SelfAttention.q.weight"][0] // heads,
            "d_ff": shapes[f"{layer}.1.DenseReluDense.wi_0.weight"][0],
            "num_layers": len({name.split(".")[2] for name in shapes if ".block." in name}),
            "num_heads": heads,
            "relative_attention_num_buckets": buckets,
        }
    except (KeyError, ValueError) as error:
        raise InputError(_WRONG.format(f"unexpected {error}")) from error


_WRONG = (
    "The text encoder's weights are not those of a UMT5 encoder ({}); download "
    "models_t5_umt5-xxl-enc-bf16.pth (or text_encoder/) again."
)


def umt5(shapes: Mapping[str, Sequence[int]]) -> Any:
    """A UMT5 encoder on the meta device whose sizes are those of tensors of these shapes."""
    from transformers import UMT5Config, UMT5EncoderModel

    config: Any = UMT5Config(
        **umt5_sizes(shapes),
        relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu",
        layer_norm_epsilon=1e-6,
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model: Any = UMT5EncoderModel(config)
    model.set_input_embeddings(model.shared)  # one table for both names
    return model


def umt5_blocks(model: Any) -> list[nn.Module]:
    """The large modules of a UMT5 encoder, which run one after the other."""
    return [model.shared, *model.encoder.block]


def _with_weights(weights: Mapping[str, Tensor]) -> Any:
    model = umt5({name: tensor.shape for name, tensor in weights.items()})
    state = {**weights, "encoder.embed_tokens.weight": weights["shared.weight"]}  # the same table
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise InputError(_WRONG.format(error)) from error
    return model.eval().requires_grad_(False)


def _compute_in(model: Any, dtype: torch.dtype) -> None:
    """Upcast each layer while it runs and put its stored weights back afterwards, exactly.

    What is stored is looked up when a layer runs: only then is one that is sharded over ranks whole
    (its own hooks gather it before ours run).
    """
    for part in [*model.encoder.block, model.encoder.final_layer_norm]:
        stored: list[tuple[nn.Parameter, Tensor]] = []

        def upcast(module: nn.Module, _: Any, stored: Any = stored) -> None:
            stored.extend((parameter, parameter.data) for parameter in module.parameters())
            for parameter, data in stored:
                parameter.data = data.to(dtype)

        def restore(_: nn.Module, __: Any, ___: Any, stored: Any = stored) -> None:
            for parameter, data in stored:
                parameter.data = data
            stored.clear()

        part.register_forward_pre_hook(upcast)
        part.register_forward_hook(restore, always_call=True)
    model.get_input_embeddings().register_forward_hook(lambda *args: args[-1].to(dtype))
