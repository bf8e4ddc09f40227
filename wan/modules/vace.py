"""The network of VACE (arXiv:2503.07598), with the official names and forward signature.

It is `WanModel` with control blocks: Wan blocks on a second residual stream, the control stream,
which starts as the embedded control plus the video tokens. After some blocks of the network, the
hint of a control block is added to the video stream. A control block runs just before its hint is
added, so that only one hint is in memory. Its self-attention covers all tokens, like that of any
other block.

Legend: B batch, C channels, F H W latent frames/height/width, L this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wan.kernels.forward_context import StepInfo
from wan.kernels.linear import Linear
from wan.modules.blocks import BlockSizes, WanAttentionBlock
from wan.modules.frame_attention import add_to_video_tokens, check_shapes
from wan.modules.interfaces import ModelComponents
from wan.modules.model import (
    BlockInputs,
    StreamConditioning,
    WanModel,
    embed_patches,
    extract_patches,
)
from wan.modules.text_kv_cache import ContextKV
from wan.settings.presets import VACE_CONTEXT_CHANNELS
from wan.utils import trace

HintScales = float | Sequence[float]
"""Factor of the hints: one number, or one per control block."""


class VaceWanModel(WanModel):
    """Predicts the flow velocity of noisy video latents with a control video.

    The arguments are those of the official config.json.

    Args:
        vace_layers: Layers after which hints are added; None: every second one.
        vace_in_dim: Channels of the control.

    Raises:
        ValueError: `vace_layers` does not contain 0, or a layer that does not exist.
    """

    def __init__(
        self,
        vace_layers: Sequence[int] | None = None,
        vace_in_dim: int = VACE_CONTEXT_CHANNELS,
        *,
        model_type: str = "vace",
        components: ModelComponents | None = None,
        **config: Any,
    ) -> None:
        components = ModelComponents() if components is None else components
        super().__init__(model_type, **config, components=components)
        layers = range(0, self.num_layers, 2) if vace_layers is None else sorted(vace_layers)
        self.injected = {layer: i for i, layer in enumerate(layers)}
        if 0 not in self.injected or max(self.injected) >= self.num_layers:
            raise ValueError(
                f"vace_layers is {list(layers)}; it must begin with 0 and stay below the "
                f"{self.num_layers} layers of the network."
            )
        patch, sizes = self.patch_size, self.block_sizes
        self.vace_blocks = nn.ModuleList(
            VaceWanAttentionBlock(sizes, self.num_layers + i, components, i == 0)
            for i in range(len(layers))
        )
        self.vace_patch_embedding = nn.Conv3d(vace_in_dim, self.dim, patch, patch)

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        vace_context: list[Tensor],
        context: list[Tensor],
        seq_len: int,
        vace_context_scale: HintScales = 1.0,
        *,
        step: StepInfo | Sequence[StepInfo] | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [C, F, H, W] each.
            t: Timesteps 0..1000, [B].
            vace_context: Control latents and masks, [vace_in_dim, F, H, W] each.
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            vace_context_scale: Factor of the hints.
            step: Sampling step, expert and branch, for attention layers and caches; a list of one
                for each sample: samples are not computed as a batch.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        self._check_inputs(x, t, context, seq_len, None, None)
        channels = self.vace_patch_embedding.in_channels
        scales = self._expand_scale(vace_context_scale)
        for sample, control in zip(x, vace_context, strict=True):
            check_shapes(sample, {"vace_context": (control, (channels, *sample.shape[1:]))})

        def make_conditioning(*samples: int) -> StreamConditioning:
            return self._make_conditioning([vace_context[i] for i in samples], scales)

        return self._run_samples(
            x, t.expand(len(x)), context, None, step, make_conditioning, can_be_batch=True
        )

    @property
    def num_cross_attention_layers(self) -> int:
        return self.num_layers + len(self.injected)

    def adapter_modules(self, layer: int) -> Sequence[nn.Module]:
        return (self.vace_blocks[self.injected[layer]],) if layer in self.injected else ()

    def _make_conditioning(
        self, controls: list[Tensor], scales: Sequence[float]
    ) -> StreamConditioning:
        control_BCFHW = torch.stack(controls)
        grid = self.token_grid(control_BCFHW.shape[2:])
        streams = dict[str, Tensor]()

        def save_video_stream(x_BLC: Tensor) -> None:
            streams["x"] = x_BLC.clone()  # block 0 updates it in place

        def add_hint(index: int, x_BLC: Tensor, block_inputs: BlockInputs) -> Tensor:
            initial_x_BLC = streams.pop("x", None)
            if initial_x_BLC is not None:
                local_patches_BLK = self.sequence_shard.shard(
                    extract_patches(control_BCFHW, self.patch_size), grid
                )
                streams["c"] = embed_patches(self.vace_patch_embedding, local_patches_BLK)
            text_layer, block = self.num_layers + index, self.vace_blocks[index]
            with trace.span("control", layer=text_layer):
                cached_kv = block_inputs.context.kv[text_layer]
                streams["c"], hint, kv = block(
                    streams.pop("c"), initial_x_BLC, block_inputs, cached_kv
                )
            self._cache_context_kv(block_inputs.context, text_layer, kv)
            return add_to_video_tokens(x_BLC, hint, scales[index])

        return self._make_stream(
            grid,
            control_BCFHW.device,
            after_block={layer: partial(add_hint, i) for layer, i in self.injected.items()},
            before_blocks=save_video_stream,
        )

    def _expand_scale(self, scale: HintScales) -> Sequence[float]:
        """Returns a factor for each control block."""
        count = len(self.injected)
        scales = [scale] * count if isinstance(scale, int | float) else [*scale]
        if len(scales) != count:
            raise ValueError(
                f"vace_context_scale has {len(scales)} numbers; give one, or one for each of the "
                f"{count} control blocks."
            )
        return scales


class VaceWanAttentionBlock(WanAttentionBlock):
    """A Wan block on the control stream; its output is projected to a hint for the video stream."""

    def __init__(
        self, sizes: BlockSizes, layer: int, components: ModelComponents, is_first: bool
    ) -> None:
        super().__init__(sizes, layer, components)
        self.before_proj = Linear(sizes.dim, sizes.dim) if is_first else None
        self.after_proj = Linear(sizes.dim, sizes.dim)

    def forward(  # type: ignore[override]
        self, c_BLC: Tensor, x_BLC: Tensor | None, block_inputs: BlockInputs, kv: ContextKV | None
    ) -> tuple[Tensor, Tensor, ContextKV]:
        """Runs the block.

        Args:
            c_BLC: Control stream, float32; updated in place in inference.
            x_BLC: Embedded video tokens, float32, which the first control block adds to the stream.
            kv: Cached keys and values of the text for this layer; None: they are computed.

        Returns:
            The control stream, the hint in the dtype of the weights, and the keys and values.
        """
        dtype = block_inputs.context.embedding.dtype
        if self.before_proj is not None:
            assert x_BLC is not None, "the first block gets the video's tokens"
            c_BLC = self.before_proj(c_BLC.to(dtype)).float() + x_BLC
        text = block_inputs.context.embedding
        c_BLC, kv = super().forward(
            c_BLC, block_inputs.modulation, text, kv, block_inputs.shared_inputs
        )
        return c_BLC, self.after_proj(c_BLC.to(dtype)), kv
