"""The network of Wan-Animate-2: Wan2.1's image-to-video network with reference attention.

It has no further weights. The tokens of the driving video (the reference tokens) pass the
network once per clip, at timestep 1; in the denoising steps each token also attends to the
reference tokens of its latent frame (`wan.modules.reference_kv`). The first latent frame of the
generated video is the reference image.

Legend: C channels, F H W latent frames/height/width.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.modules.interfaces import ModelComponents
from wan.modules.model import StreamConditioning, WanModel
from wan.modules.reference_kv import ReferenceKV, ReferenceLayout, ReferencePass
from wan.modules.rope import make_rope_table

_IMAGE_DIM = 1280  # channels of CLIP features
_REFERENCE_TIMESTEP = 1.0


class WanAnimate2Model(WanModel):
    """Predicts the flow velocity of noisy video latents from a reference image and a video.

    The arguments are those of `WanModel`.
    """

    def __init__(
        self,
        model_type: str = "animate2",
        *,
        in_dim: int = 36,
        image_dim: int = _IMAGE_DIM,
        components: ModelComponents | None = None,
        **config: Any,
    ) -> None:
        components = ModelComponents() if components is None else components
        self._streams_reference = components.streams_reference
        super().__init__(
            model_type, in_dim=in_dim, **config, image_dim=image_dim, components=components
        )

    def compute_reference_kv(
        self,
        reference_latents: Tensor,
        context: Tensor,
        clip_fea: Tensor,
        generated_size: tuple[int, int, int],
        *,
        full_frames: int | None = None,
        first_column: int | None = None,
    ) -> ReferenceKV:
        """Computes the keys and values of the reference tokens, once per clip.

        Args:
            reference_latents: [in_dim, F, H, W]: latents of the driving video, mask, latents again.
            context: Embedding of the reference prompt, [length <= text_len, text_dim].
            clip_fea: CLIP features of the driving video's first frame, [1, tokens, image_dim].
            generated_size: F + 1, height and width of the latents that are generated.
            full_frames: Latent frames of the generated video in a full clip, to which the official
                code pads a short clip; None: those of `generated_size`.
            first_column: Position of the first column of reference tokens; None: right of the
                generated tokens.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        grid = self.token_grid(reference_latents.shape[1:])
        generated = self.token_grid(generated_size)
        padded_len = self.sequence_shard.get_padded_length(math.prod(generated))
        layout = ReferenceLayout(
            grid,
            generated,
            padded_len,
            generated[0] if full_frames is None else full_frames,
            generated[2] if first_column is None else first_column,
        )
        reference_kv = ReferenceKV(layout, reference_latents.device, self._streams_reference)
        # Called as a module, because offloading and FSDP load the weights in forward hooks.
        self(
            [reference_latents[: self.out_dim]],
            torch.tensor([_REFERENCE_TIMESTEP]),
            [context],
            math.prod(grid),
            [reference_latents[self.out_dim :]],
            clip_fea=clip_fea,
            reference_kv=reference_kv,
        )
        reference_kv.is_complete = True
        return reference_kv

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor],
        *,
        clip_fea: Tensor,
        reference_kv: ReferenceKV,
        skip_blocks: Collection[int] = (),
        log_scale: float = 0.0,
        step: StepInfo | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [out_dim, F, H, W] each; the first frame is the reference image.
            t: Timesteps 0..1000, [B].
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            y: Masks and conditioning latents, [in_dim - out_dim, F, H, W] each.
            clip_fea: CLIP features of the reference image, [1, tokens, image_dim].
            reference_kv: Result of `compute_reference_kv`; all samples share it.
            skip_blocks: Indices of blocks that are left out.
            log_scale: Added to the attention logits of the tokens in latent frame 1.
            step: Sampling step, expert and branch, for attention layers and caches.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        x = [torch.cat(pair, dim=0) for pair in zip(x, y, strict=True)]
        self._check_inputs(x, t, context, seq_len, y, clip_fea)
        layers = [layer for layer in range(self.num_layers) if layer not in skip_blocks]
        reference_pass = ReferencePass(reference_kv, log_scale, layers)

        def make_conditioning(i: int) -> StreamConditioning:
            return self._make_conditioning(x[i], reference_pass)

        return self._run_samples(x, t.expand(len(x)), context, clip_fea, step, make_conditioning)

    def runs_in_lockstep(self, num_tokens: int) -> bool:
        """Never: the guidance branches may leave out different blocks."""
        return False

    def _make_conditioning(self, x: Tensor, reference_pass: ReferencePass) -> StreamConditioning:
        grid, reference_kv = self.token_grid(x.shape[1:]), reference_pass.kv
        layout, shard = reference_kv.layout, self.sequence_shard
        if reference_kv.is_complete and grid != layout.generated:
            raise ValueError(
                f"x has {list(grid)} tokens along frame, height and width, but reference_kv was "
                f"computed for {list(layout.generated)}."
            )
        stream = self._make_stream(grid, x.device, further_keys=reference_pass)
        if reference_kv.is_complete:
            return stream
        cos, sin = make_rope_table(layout.positions, self.dim // self.num_heads)
        cos, sin = (shard.shard(rows[None], grid)[0].to(x.device) for rows in (cos, sin))
        return replace(stream, rope=(cos, sin))
