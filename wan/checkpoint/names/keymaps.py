"""Translates tensor names between the official code, diffusers and transformers.

Each network has one table of (official, library) name parts. A part that starts with a dot is
replaced anywhere in a name, any other only at its beginning; both end at a dot or with the name.
Renames are applied in order, so the inverse applies them in reverse. A name that no row matches is
equal in both libraries, or already in the wanted form, and passes unchanged.

Proven by strict loading into the library modules in `tests/unit/test_keymaps.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

Renames = tuple[tuple[str, str], ...]

_PROJECTIONS: Renames = (
    (".q", ".to_q"),
    (".k", ".to_k"),
    (".v", ".to_v"),
    (".o", ".to_out.0"),
    (".k_img", ".add_k_proj"),
    (".v_img", ".add_v_proj"),
    (".norm_k_img", ".norm_added_k"),
)

_DIT: Renames = (
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.head", "proj_out"),
    ("head.modulation", "scale_shift_table"),
    (".modulation", ".scale_shift_table"),
    (".self_attn", ".attn1"),
    (".cross_attn", ".attn2"),
    *_PROJECTIONS,
    (".ffn.0", ".ffn.net.0.proj"),
    (".ffn.2", ".ffn.net.2"),
    # The norm before cross-attention. Official and diffusers names are swapped for the norm before
    # the FFN, but that norm has no tensors.
    (".norm3", ".norm2"),
    (".before_proj", ".proj_in"),  # in VACE's blocks
    (".after_proj", ".proj_out"),
    # After .norm3, since these have a norm2 in diffusers.
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
)

_NESTED_BLOCK = re.compile(r"^(blocks\.\d+\.)block\.")  # in Animate-2's official files

# Animate's motion encoder, face encoder and face adapters, to which _DIT does not apply.
_FACE: Renames = (
    ("motion_encoder.enc.net_app.convs.0.0", "motion_encoder.conv_in"),
    ("motion_encoder.enc.net_app.convs.0.1", "motion_encoder.conv_in.act_fn"),
    *(
        (f"motion_encoder.enc.net_app.convs.{k + 1}", f"motion_encoder.res_blocks.{k}")
        for k in range(7)
    ),
    ("motion_encoder.enc.net_app.convs.8", "motion_encoder.conv_out"),
    ("motion_encoder.enc.fc", "motion_encoder.motion_network"),
    ("motion_encoder.dec.direction.weight", "motion_encoder.motion_synthesis_weight"),
    (".conv1.0.weight", ".conv1.weight"),
    (".conv1.1.bias", ".conv1.act_fn.bias"),
    (".conv2.1.weight", ".conv2.weight"),
    (".conv2.2.bias", ".conv2.act_fn.bias"),
    (".skip.1", ".conv_skip"),
    *((f"face_adapter.fuser_blocks.{k}", f"face_adapter.{k}") for k in range(8)),
    (".linear1_q", ".to_q"),
    (".linear1_k", ".to_k"),  # official files store both in one tensor, linear1_kv
    (".linear1_v", ".to_v"),
    (".linear2", ".to_out"),
    (".q_norm", ".norm_q"),
    (".k_norm", ".norm_k"),
    # Last, since the convolutions have the same names as those above.
    *(
        (f"face_encoder.{layer}.conv.{suffix}", f"face_encoder.{layer}.{suffix}")
        for layer in ("conv1_local", "conv2", "conv3")
        for suffix in ("weight", "bias")
    ),
)

_T5: Renames = (
    ("token_embedding", "shared"),
    ("norm", "encoder.final_layer_norm"),
    ("blocks", "encoder.block"),
    (".norm1", ".layer.0.layer_norm"),
    (".attn", ".layer.0.SelfAttention"),
    (".pos_embedding.embedding", ".layer.0.SelfAttention.relative_attention_bias"),
    (".norm2", ".layer.1.layer_norm"),
    (".ffn.gate.0", ".layer.1.DenseReluDense.wi_0"),
    (".ffn.fc1", ".layer.1.DenseReluDense.wi_1"),
    (".ffn.fc2", ".layer.1.DenseReluDense.wo"),
)

_T5_GGUF: Renames = (  # (llama.cpp's, transformers')
    ("token_embd", "shared"),
    ("enc.output_norm", "encoder.final_layer_norm"),
    ("enc.blk", "encoder.block"),
    (".attn_norm", ".layer.0.layer_norm"),
    *((f".attn_{suffix}", f".layer.0.SelfAttention.{suffix}") for suffix in "qkvo"),
    (".attn_rel_b", ".layer.0.SelfAttention.relative_attention_bias"),
    (".ffn_norm", ".layer.1.layer_norm"),
    (".ffn_gate", ".layer.1.DenseReluDense.wi_0"),
    (".ffn_up", ".layer.1.DenseReluDense.wi_1"),
    (".ffn_down", ".layer.1.DenseReluDense.wo"),
)

_VAE: Renames = (
    ("conv1", "quant_conv"),
    ("conv2", "post_quant_conv"),
    ("encoder.conv1", "encoder.conv_in"),
    ("decoder.conv1", "decoder.conv_in"),
    (".head.0", ".norm_out"),
    (".head.2", ".conv_out"),
    (".middle.0", ".mid_block.resnets.0"),
    (".middle.1", ".mid_block.attentions.0"),
    (".middle.2", ".mid_block.resnets.1"),
    (".residual.0", ".norm1"),
    (".residual.2", ".conv1"),
    (".residual.3", ".norm2"),
    (".residual.6", ".conv2"),
    (".shortcut", ".conv_shortcut"),
)

_CLIP: Renames = (  # the vision tower; transformers splits `to_qkv` (`wan.modules.clip`)
    ("visual.cls_embedding", "embeddings.class_embedding"),
    ("visual.pos_embedding", "embeddings.position_embedding.weight"),
    ("visual.patch_embedding", "embeddings.patch_embedding"),
    ("visual.pre_norm", "pre_layrnorm"),
    ("visual.post_norm", "post_layernorm"),
    ("visual.transformer", "encoder.layers"),
    (".norm1", ".layer_norm1"),
    (".norm2", ".layer_norm2"),
    (".attn.proj", ".attn.out_proj"),
    (".attn", ".self_attn"),
    (".mlp.0", ".mlp.fc1"),
    (".mlp.2", ".mlp.fc2"),
)

# The 2.1 VAE numbers its blocks flat: in the decoder three residual blocks, then an upsampler.
_VAE_FLAT: Renames = (
    (".downsamples", ".down_blocks"),
    *((f".upsamples.{4 * b + 3}", f".up_blocks.{b}.upsamplers.0") for b in range(3)),
    *(
        (f".upsamples.{4 * b + r}", f".up_blocks.{b}.resnets.{r}")
        for b in range(4)
        for r in range(3)
    ),
)

# The 2.2 VAE nests them: two (encoder) or three (decoder) residual blocks, then the resampler.
_VAE_NESTED: Renames = (
    *((f".downsamples.{b}.downsamples.2", f".down_blocks.{b}.downsampler") for b in range(4)),
    *((f".upsamples.{b}.upsamples.3", f".up_blocks.{b}.upsampler") for b in range(4)),
    *((f".downsamples.{b}.downsamples", f".down_blocks.{b}.resnets") for b in range(4)),
    *((f".upsamples.{b}.upsamples", f".up_blocks.{b}.resnets") for b in range(4)),
)


def rename_dit_to_official(name: str) -> str:
    """Returns the official name of a DiT tensor, from diffusers' name or a name with a prefix."""
    for prefix in ("net.", "model.", "diffusion_model."):  # net.: from training code
        name = name.removeprefix(prefix)
    name = _NESTED_BLOCK.sub(r"\1", name)
    return _apply_rules(name, _invert_rules(_get_dit_rules(name)))


def rename_dit_to_diffusers(official: str) -> str:
    """Returns the diffusers name of an official DiT tensor.

    Animate's official `linear1_kv` must be given as its halves `linear1_k` and `linear1_v`.
    """
    return _apply_rules(official, _get_dit_rules(official))


def rename_animate2_to_diffusers(official: str) -> str:
    """Returns the diffusers name of a tensor of Animate-2's DiT, which renames projections only."""
    return _apply_rules(official, _PROJECTIONS)


def nest_animate2_block(official: str) -> str:
    """Returns the name of a block's tensor in Animate-2's official files."""
    return re.sub(r"^(blocks\.\d+\.)", r"\1block.", official)


def rename_t5_to_transformers(name: str) -> str:
    """Returns the UMT5EncoderModel name of an official or llama.cpp text encoder tensor."""
    return _apply_rules(name, _T5_GGUF + _T5)


def rename_t5_to_official(name: str) -> str:
    """Returns the official name of a UMT5EncoderModel tensor."""
    return _apply_rules(name, _invert_rules(_T5))


def rename_clip_to_transformers(official: str) -> str:
    """Returns the CLIPVisionModel name of an official CLIP tensor."""
    return _apply_rules(official.removeprefix("vision_model."), _CLIP)


def rename_clip_to_official(name: str) -> str:
    """Returns the official name of a CLIPVisionModel tensor."""
    return _apply_rules(name.removeprefix("vision_model."), _invert_rules(_CLIP))


@lru_cache(maxsize=1024)  # estimates rename the 200 tensors several times in a run
def rename_vae_to_diffusers(official: str) -> str:
    """Returns the AutoencoderKLWan name of an official tensor of the 2.1 or the 2.2 VAE."""
    return _apply_rules(official, _VAE_NESTED + _VAE_FLAT + _VAE)


def rename_vae_to_official(name: str, residual: bool) -> str:
    """Returns the official name of an AutoencoderKLWan tensor; `residual` selects the 2.2 VAE."""
    return _apply_rules(name, _invert_rules((_VAE_NESTED if residual else _VAE_FLAT) + _VAE))


def _get_dit_rules(name: str) -> Renames:
    return _FACE if name.startswith(("motion_encoder.", "face_")) else _DIT


def _invert_rules(rules: Renames) -> Renames:
    return tuple((new, old) for old, new in reversed(rules))


def _apply_rules(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for old, new in rules:
        if old.startswith("."):
            name = f"{name}.".replace(f"{old}.", f"{new}.")[:-1]
        elif f"{name}.".startswith(f"{old}."):
            name = new + name[len(old) :]
    return name
