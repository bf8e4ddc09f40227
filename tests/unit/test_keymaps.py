"""Names of tensors against the modules of the libraries; other tests compare their outputs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from wan.checkpoint.names import keymaps
from wan.modules.model import WanModel
from wan.testing.random_checkpoint import TEXT_SIZES, VAE_22

# 11 layers: two-digit block numbers.
TINY_DIT = {"in_dim": 36, "out_dim": 16, "dim": 32, "ffn_dim": 64, "text_dim": 64}
TINY_DIT |= {"num_heads": 4, "num_layers": 11}

# Official names first. A bijection alone would accept two layers of one shape exchanged.
DIT_PAIRS = """
blocks.10.cross_attn.k_img.weight blocks.10.attn2.add_k_proj.weight
blocks.10.cross_attn.v_img.bias blocks.10.attn2.add_v_proj.bias
blocks.10.cross_attn.norm_k_img.weight blocks.10.attn2.norm_added_k.weight
img_emb.emb_pos condition_embedder.image_embedder.pos_embed
img_emb.proj.0.bias condition_embedder.image_embedder.norm1.bias
img_emb.proj.1.bias condition_embedder.image_embedder.ff.net.0.proj.bias
img_emb.proj.3.weight condition_embedder.image_embedder.ff.net.2.weight
img_emb.proj.4.weight condition_embedder.image_embedder.norm2.weight
"""
T5_PAIRS = """
token_embedding.weight shared.weight
blocks.1.norm1.weight encoder.block.1.layer.0.layer_norm.weight
blocks.1.norm2.weight encoder.block.1.layer.1.layer_norm.weight
blocks.1.attn.q.weight encoder.block.1.layer.0.SelfAttention.q.weight
blocks.1.attn.o.weight encoder.block.1.layer.0.SelfAttention.o.weight
blocks.1.ffn.gate.0.weight encoder.block.1.layer.1.DenseReluDense.wi_0.weight
blocks.1.ffn.fc1.weight encoder.block.1.layer.1.DenseReluDense.wi_1.weight
blocks.1.ffn.fc2.weight encoder.block.1.layer.1.DenseReluDense.wo.weight
"""
VAE_PAIRS = """
conv1.bias quant_conv.bias
conv2.weight post_quant_conv.weight
encoder.conv1.weight encoder.conv_in.weight
decoder.head.0.gamma decoder.norm_out.gamma
decoder.head.2.bias decoder.conv_out.bias
encoder.middle.1.to_qkv.bias encoder.mid_block.attentions.0.to_qkv.bias
encoder.middle.2.residual.3.gamma encoder.mid_block.resnets.1.norm2.gamma
encoder.downsamples.10.residual.6.bias encoder.down_blocks.10.conv2.bias
encoder.downsamples.3.shortcut.weight encoder.down_blocks.3.conv_shortcut.weight
encoder.downsamples.5.time_conv.bias encoder.down_blocks.5.time_conv.bias
decoder.upsamples.11.resample.1.bias decoder.up_blocks.2.upsamplers.0.resample.1.bias
decoder.upsamples.14.residual.2.weight decoder.up_blocks.3.resnets.2.conv1.weight
encoder.downsamples.1.downsamples.2.time_conv.bias encoder.down_blocks.1.downsampler.time_conv.bias
encoder.downsamples.1.downsamples.0.residual.0.gamma encoder.down_blocks.1.resnets.0.norm1.gamma
decoder.upsamples.0.upsamples.3.resample.1.weight decoder.up_blocks.0.upsampler.resample.1.weight
"""
CLIP_PAIRS = """
visual.cls_embedding embeddings.class_embedding
visual.pos_embedding embeddings.position_embedding.weight
visual.patch_embedding.weight embeddings.patch_embedding.weight
visual.pre_norm.bias pre_layrnorm.bias
visual.post_norm.weight post_layernorm.weight
visual.transformer.10.norm1.weight encoder.layers.10.layer_norm1.weight
visual.transformer.10.norm2.bias encoder.layers.10.layer_norm2.bias
visual.transformer.10.attn.to_qkv.weight encoder.layers.10.self_attn.to_qkv.weight
visual.transformer.10.attn.proj.bias encoder.layers.10.self_attn.out_proj.bias
visual.transformer.10.mlp.0.weight encoder.layers.10.mlp.fc1.weight
visual.transformer.10.mlp.2.bias encoder.layers.10.mlp.fc2.bias
"""


def dit(config: dict[str, Any]) -> WanTransformer3DModel:
    """diffusers' network for the official arguments `config`."""
    return WanTransformer3DModel(
        num_attention_heads=config["num_heads"],
        attention_head_dim=config["dim"] // config["num_heads"],
        in_channels=config["in_dim"],
        out_channels=config["out_dim"],
        text_dim=config["text_dim"],
        ffn_dim=config["ffn_dim"],
        num_layers=config["num_layers"],
    )


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every stored tensor once (transformers lists the tied embedding twice) and its shape."""
    buffers = [key for key in module.state_dict() if key in dict(module.named_buffers())]
    assert not buffers, f"stored buffers: {buffers}"
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_dit_names_are_those_of_diffusers_and_back():
    with torch.device("meta"):
        ours, theirs = shapes(WanModel(**TINY_DIT)), shapes(dit(TINY_DIT))
    assert {keymaps.rename_dit_to_diffusers(name): shape for name, shape in ours.items()} == theirs
    assert {keymaps.rename_dit_to_official(name): shape for name, shape in theirs.items()} == ours
    for name in theirs:
        assert keymaps.rename_dit_to_diffusers(keymaps.rename_dit_to_official(name)) == name


def test_prefixed_and_official_dit_names_become_official():
    with torch.device("meta"):
        names = list(shapes(WanModel(**TINY_DIT)))
    for prefix in ("", "model.diffusion_model.", "diffusion_model.", "model."):
        for rule in (str, keymaps.rename_dit_to_diffusers):
            assert [keymaps.rename_dit_to_official(prefix + rule(name)) for name in names] == names


def test_names_one_by_one():
    """Official names and the libraries' names, both ways; nested VAE names are of Wan2.2."""
    wrong = []
    for table, to_official, to_library in (
        (DIT_PAIRS, keymaps.rename_dit_to_official, keymaps.rename_dit_to_diffusers),
        (T5_PAIRS, keymaps.rename_t5_to_official, keymaps.rename_t5_to_transformers),
        (VAE_PAIRS, rename_vae_to_official, keymaps.rename_vae_to_diffusers),
        (CLIP_PAIRS, keymaps.rename_clip_to_official, keymaps.rename_clip_to_transformers),
    ):
        for official, other in (line.split() for line in table.strip().splitlines()):
            actual = to_official(other), to_library(official)
            wrong += [] if actual == (official, other) else [(official, other, actual)]
    assert not wrong
    name = "embeddings.class_embedding"
    assert keymaps.rename_clip_to_transformers(f"vision_model.{name}") == name


def rename_vae_to_official(name: str) -> str:
    is_nested = "downsampler." in name or "upsampler." in name or ".0.norm1" in name
    return keymaps.rename_vae_to_official(name, is_nested)


def test_t5_names_and_back():
    with torch.device("meta"):
        config = UMT5Config(feed_forward_proj="gated-gelu", **TEXT_SIZES)
        names = [*shapes(UMT5EncoderModel(config))]
    official = [keymaps.rename_t5_to_official(name) for name in names]
    layer = ["norm1", "attn.q", "attn.k", "attn.v", "attn.o", "pos_embedding.embedding"]
    layer += ["norm2", "ffn.gate.0", "ffn.fc1", "ffn.fc2"]
    expected = {f"blocks.{i}.{part}.weight" for i in range(3) for part in layer}
    assert {*official} == expected | {"token_embedding.weight", "norm.weight"}
    for renamed in (official, names):
        assert [keymaps.rename_t5_to_transformers(name) for name in renamed] == names


def test_vae_names_and_back():
    for arguments, count in (({"z_dim": 16}, 194), (VAE_22 | {"decoder_base_dim": 10}, 196)):
        residual = "is_residual" in arguments
        with torch.device("meta"):
            names = [*shapes(AutoencoderKLWan(base_dim=8, **arguments))]
        official = [keymaps.rename_vae_to_official(name, residual) for name in names]
        assert len({*official}) == len(names) == count
        for renamed in (official, names):
            assert [keymaps.rename_vae_to_diffusers(name) for name in renamed] == names
