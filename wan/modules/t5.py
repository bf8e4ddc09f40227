"""Encodes prompts: the official cleaning, and the tokenizer and encoder of UMT5.

The encoder (arXiv:2304.09151) has the tensor names of transformers' UMT5EncoderModel and the
operations of its eager attention in their order, so its results are bit-equal; importing
transformers takes as long as a short video on a small machine.

Legend: B batch, T tokens of one prompt (at most text_len), C channels, N heads, D head size.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.formats.embedded_tokenizer import UnigramVocab, read_embedded_tokenizer
from wan.checkpoint.load import DtypeRule, ModelSpec, describe_mismatch, read_headers
from wan.checkpoint.names.keymaps import rename_t5_to_transformers
from wan.device import select_device
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


_MAX_DISTANCE = 128  # from which on all distances share a bucket
_EPS = 1e-6


class T5EncoderModel:
    """Encodes prompts under the official name, with the network and tokenizer of `TextEncoder`.

    Args:
        text_len: Maximum number of tokens; longer prompts are truncated.
        dtype: Of the computation, and unless it is float32 of the weights.
        device: None: the accelerator, without one the CPU.
        checkpoint_path: `models_t5_umt5-xxl-enc-bf16.pth` or another file with its weights.
        tokenizer_path: The folder `google/umt5-xxl` of the checkpoint.
        shard_fn: Called with the network on the CPU, such as `wan.distributed.fsdp.shard_model`
            with a `device_id`; returns the network.

    Attributes:
        model: The network; a caller may move it to another device.

    Raises:
        InputError: A ValueError: a file is missing or holds another network.
    """

    def __init__(
        self,
        text_len: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device | int | None = None,
        checkpoint_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        shard_fn: Callable[..., nn.Module] | None = None,
    ) -> None:
        if checkpoint_path is None or tokenizer_path is None:
            why = "needs `checkpoint_path` and `tokenizer_path`"
            raise InputError("T5EncoderModel", None, why, "give those of a checkpoint")
        if device is None:
            device = select_device("auto").torch_device
        spec = read_text_encoder_spec(Path(checkpoint_path))
        load_device = torch.device("cpu" if shard_fn is not None else device)
        self.model = spec.load(device=load_device, dtype_of=choose_text_encoder_dtypes(dtype))
        if shard_fn is not None:
            self.model = shard_fn(self.model, sync_module_states=False)
        self.text_len, self.dtype = text_len, dtype
        self._encode = TextEncoder(
            self.model, load_tokenizer(Path(tokenizer_path)), dtype=dtype, text_len=text_len
        )

    def __call__(
        self, texts: str | Sequence[str], device: str | torch.device | int
    ) -> list[Tensor]:
        """Encodes prompts to a tensor [T,C] each, without padding, on `device`."""
        texts = [texts] if isinstance(texts, str) else texts
        return [self._encode(text).to(device) for text in texts]


class Umt5Encoder(nn.Module):
    """Encodes token ids. Its arguments have the names of transformers' UMT5Config."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        d_kv: int,
        d_ff: int,
        num_layers: int,
        num_heads: int,
        relative_attention_num_buckets: int = 32,
    ) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder: Any = nn.Module()
        self.encoder.block = nn.ModuleList(
            _Block(d_model, d_kv, d_ff, num_heads, relative_attention_num_buckets)
            for _ in range(num_layers)
        )
        self.encoder.final_layer_norm = _RmsNorm(d_model)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Encodes tokens to [B,T,C].

        Args:
            ids_BT: Token ids, int64.
            mask_BT: 1 for tokens, 0 for padding, which is never attended to.
        """
        x_BTC = self.shared(ids_BT)
        mask_B11T = torch.zeros(mask_BT.shape, dtype=x_BTC.dtype, device=x_BTC.device)
        mask_B11T = mask_B11T.masked_fill(mask_BT == 0, torch.finfo(x_BTC.dtype).min)
        mask_B11T = mask_B11T[:, None, None]
        for block in self.encoder.block:
            x_BTC = block(x_BTC, mask_B11T)
        out_BTC: Tensor = self.encoder.final_layer_norm(x_BTC)
        return out_BTC


class _Block(nn.Module):
    def __init__(self, dim: int, head_dim: int, ff_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        attention = _AttentionLayer(dim, head_dim, heads, buckets)
        self.layer = nn.ModuleList([attention, _FeedForwardLayer(dim, ff_dim)])

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        attention, feed_forward = self.layer
        return feed_forward(attention(x_BTC, mask_B11T))


class _AttentionLayer(nn.Module):
    def __init__(self, dim: int, head_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        self.SelfAttention = _RelativeAttention(dim, head_dim, heads, buckets)
        self.layer_norm = _RmsNorm(dim)

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        return x_BTC + self.SelfAttention(self.layer_norm(x_BTC), mask_B11T)


class _RelativeAttention(nn.Module):
    """Attention without scaling of the products, with a bias for each relative position."""

    def __init__(self, dim: int, head_dim: int, heads: int, buckets: int) -> None:
        super().__init__()
        self.num_heads, self.num_buckets = heads, buckets
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, heads)

    def forward(self, x_BTC: Tensor, mask_B11T: Tensor) -> Tensor:
        q_BNTD, k_BNTD, v_BNTD = (
            linear(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        buckets_TT = assign_buckets(x_BTC.shape[1], self.num_buckets, x_BTC.device)
        bias_NTT = self.relative_attention_bias(buckets_TT).permute(2, 0, 1)
        scores_BNTT = q_BNTD @ k_BNTD.transpose(2, 3) + bias_NTT + mask_B11T
        return self.o((scores_BNTT.softmax(-1) @ v_BNTD).transpose(1, 2).flatten(2))


class _FeedForwardLayer(nn.Module):
    def __init__(self, dim: int, ff_dim: int) -> None:
        super().__init__()
        self.DenseReluDense = _GatedGelu(dim, ff_dim)
        self.layer_norm = _RmsNorm(dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.DenseReluDense(self.layer_norm(x_BTC))


class _GatedGelu(nn.Module):
    def __init__(self, dim: int, ff_dim: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(dim, ff_dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(ff_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate = self.wi_0(x_BTC)
        # Written out: PyTorch's fused approximation rounds differently.
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3.0))
        return self.wo(0.5 * gate * (1.0 + inner.tanh()) * self.wi_1(x_BTC))


class _RmsNorm(nn.Module):
    """Divides by the root mean square over the channels, in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTC: Tensor) -> Tensor:
        mean_square = x_BTC.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x_BTC * torch.rsqrt(mean_square + _EPS)).to(self.weight.dtype)


def assign_buckets(num_tokens: int, num_buckets: int, device: torch.device) -> Tensor:
    """Assigns the distance of each pair of tokens (query, key) to a bucket; int64 [T,T].

    Keys after the query have the upper half of the buckets. In each half, short distances have a
    bucket each, and the longer ones share buckets whose widths grow exponentially.
    """
    positions = torch.arange(num_tokens, device=device)
    offset_TT = positions[None] - positions[:, None]
    distance_TT, half = offset_TT.abs(), num_buckets // 2
    num_exact = half // 2
    log_ratio = torch.log(distance_TT.float() / num_exact) / math.log(_MAX_DISTANCE / num_exact)
    # The logarithm of distance 0 is replaced below.
    shared = (num_exact + (log_ratio * (half - num_exact)).to(torch.int64)).clamp(max=half - 1)
    buckets_TT = torch.where(distance_TT < num_exact, distance_TT, shared)
    return buckets_TT + (offset_TT > 0) * half
