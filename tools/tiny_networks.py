"""The content of a tiny checkpoint: recipes of the tasks, random tensors, a small tokenizer.

`tools/make_tiny_checkpoint.py` lays it out in folders.
"""

from __future__ import annotations

import math
import string
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from wan import keymaps
from wan.modules.model import WanModel
from wan.vae import VAE_22

State = OrderedDict[str, Tensor]
"""Tensors under official names."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # their ids are 0, 1, 2, as in T5
TEXT_DIM = 64


@dataclass(frozen=True)
class Recipe:
    """What distinguishes the tasks. The head counts are the real ones, the head sizes are not."""

    model_type: str
    num_heads: int
    head_dim: int
    in_dim: int
    out_dim: int
    flow_shift: float = 3.0  # of the published diffusers scheduler; not the official default
    boundary: float | None = None  # given where there are two experts
    sharded: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The DiT's config.json: the official keys, without text_dim or patch_size."""
        dim = self.num_heads * self.head_dim
        return {
            "_class_name": "WanModel",
            "_diffusers_version": "0.33.0",
            "dim": dim,
            "eps": 1e-6,
            "ffn_dim": 2 * dim,
            "freq_dim": 256,
            "in_dim": self.in_dim,
            "model_type": self.model_type,
            "num_heads": self.num_heads,
            "num_layers": 2,
            "out_dim": self.out_dim,
            "text_len": 512,
        }


RECIPES = {
    "t2v-A14B": Recipe("t2v", 40, 6, 16, 16, boundary=0.875),
    "i2v-A14B": Recipe("i2v", 40, 6, 36, 16, boundary=0.9),
    "ti2v-5B": Recipe("ti2v", 24, 8, 48, 48, flow_shift=5.0),
    "t2v-1.3B": Recipe("t2v", 12, 8, 16, 16, sharded=False),
}


class Networks:
    """A recipe's tensors and tokenizer, and the library modules that the tensors belong to.

    All tensors come from one generator: the DiTs (high noise first), the VAE, the text encoder.
    """

    def __init__(self, recipe: Recipe, seed: int, dtype: torch.dtype) -> None:
        self.recipe, self.tokenizer = recipe, train_tokenizer()
        with torch.device("meta"):  # no memory and no time for weights that are replaced
            self.vae: Any = _vae(recipe)
            self.text_encoder: Any = _text_encoder(self.tokenizer.get_vocab_size())
            official = {key: value for key, value in recipe.config.items() if key[0] != "_"}
            dit = WanModel(**official, text_dim=TEXT_DIM)
        random = torch.Generator().manual_seed(seed)
        experts = 1 if recipe.boundary is None else 2
        self.dit_states = [_draw(dit, str, random, dtype) for _ in range(experts)]
        self.vae_state = _draw(self.vae, self._vae_name, random, torch.float32)
        self.text_state = _draw(self.text_encoder, keymaps.t5_official_name, random, torch.bfloat16)

    @property
    def vae_version(self) -> str:
        return "2.2" if self.vae.config.is_residual else "2.1"

    def _vae_name(self, name: str) -> str:
        return keymaps.vae_official_name(name, self.vae.config.is_residual)


def diffusers_dit(recipe: Recipe) -> Any:
    """diffusers' DiT for the recipe, without memory."""
    with torch.device("meta"):
        return diffusers.WanTransformer3DModel(
            num_attention_heads=recipe.num_heads,
            attention_head_dim=recipe.head_dim,
            in_channels=recipe.in_dim,
            out_channels=recipe.out_dim,
            text_dim=TEXT_DIM,
            ffn_dim=recipe.config["ffn_dim"],
            num_layers=recipe.config["num_layers"],
        )


def _vae(recipe: Recipe) -> Any:
    if recipe.out_dim == 16:
        return diffusers.AutoencoderKLWan(base_dim=8, z_dim=16)
    return diffusers.AutoencoderKLWan(base_dim=8, decoder_base_dim=10, **VAE_22)


def _text_encoder(vocab_size: int) -> Any:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=TEXT_DIM,
            d_kv=8,
            d_ff=160,
            num_layers=3,
            num_heads=8,
            feed_forward_proj="gated-gelu",
        )
    )


def _draw(
    module: Any, official_name: Callable[[str], str], random: torch.Generator, dtype: torch.dtype
) -> State:
    """Random tensors for a module, in the order of their official names.

    Rounded to bfloat16 whatever the dtype, so that the dtype of the files changes no value.
    """
    shapes = {official_name(name): p.shape for name, p in module.named_parameters()}
    state: State = OrderedDict()
    for name, shape in sorted(shapes.items()):
        centre, spread = _distribution(name, shape)
        noise = torch.randn(shape, generator=random)
        state[name] = (centre + spread * noise).bfloat16().to(dtype)
    return state


def _distribution(name: str, shape: torch.Size) -> tuple[float, float]:
    """Mean and deviation that keep activations near 1."""
    if name.endswith("gamma") or (name.endswith("weight") and len(shape) == 1):
        return 1.0, 0.1  # the gain of a norm
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("modulation"):
        return 0.0, 0.3
    if name == "token_embedding.weight":
        return 0.0, 1.0
    return 0.0, math.prod(shape[1:]) ** -0.5


def train_tokenizer() -> Tokenizer:
    """A tokenizer of 1000 tokens with T5's special tokens and T5's mark for spaces.

    BPE, not T5's Unigram: the Unigram trainer gives another vocabulary in every process.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=list(string.ascii_letters + string.digits + string.punctuation),
        show_progress=False,
    )
    text = Path(__file__).with_name("tokenizer_text.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer
