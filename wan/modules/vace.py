"""The network of VACE (arXiv:2503.07598), with the official names and forward signature.

It is `WanModel` with control blocks: Wan blocks on a second residual stream, the control stream,
which starts as the embedded control plus the video tokens. After some blocks of the network, the
hint of a control block is added to the video stream. A control block runs just before its hint is
added, so that only one hint is in memory. Its self-attention covers all tokens, like that of any
other block.

Legend: B batch, C channels, F H W latent frames/height/width, L this rank's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wan import trace
from wan.kernels.base import StepInfo
from wan.modules.blocks import BlockSizes, WanAttentionBlock
from wan.modules.framewise import added, check_shapes
from wan.modules.interfaces import Collaborators
from wan.modules.model import After, BlockInputs, Conditioning, WanModel, embedded, patches
from wan.modules.textcache import TextKV
from wan.settings.presets import CONTROL_CHANNELS
from wan.settings.schedule import Grid

Scales = float | Sequence[float]
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
        vace_in_dim: int = CONTROL_CHANNELS,
        *,
        model_type: str = "vace",
        collaborators: Collaborators | None = None,
        **config: Any,
    ) -> None:
        given = Collaborators() if collaborators is None else collaborators
        super().__init__(model_type, **config, collaborators=given)
        layers = range(0, self.num_layers, 2) if vace_layers is None else sorted(vace_layers)
        self.injected = {layer: i for i, layer in enumerate(layers)}
        if 0 not in self.injected or max(self.injected) >= self.num_layers:
            raise ValueError(
                f"vace_layers is {list(layers)}; it must begin with 0 and stay below the "
                f"{self.num_layers} layers of the network."
            )
        patch, names = self.patch_size, ("qk_norm", "cross_attn_norm", "eps")
        norms = {name: config[name] for name in names if name in config}
        ffn_dim = self.blocks[0].ffn[0].out_features  # type: ignore[index, union-attr]
        sizes = BlockSizes(self.dim, ffn_dim, self.num_heads, text_len=self.text_len, **norms)
        self.vace_blocks = nn.ModuleList(
            ControlBlock(sizes, self.num_layers + i, given, i == 0) for i in range(len(layers))
        )
        self.vace_patch_embedding = nn.Conv3d(vace_in_dim, self.dim, patch, patch)

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        vace_context: list[Tensor],
        context: list[Tensor],
        seq_len: int,
        vace_context_scale: Scales = 1.0,
        *,
        step: StepInfo | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [C, F, H, W] each.
            t: Timesteps 0..1000, [B].
            vace_context: Control latents and masks, [vace_in_dim, F, H, W] each.
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            vace_context_scale: Factor of the hints.
            step: Sampling step, expert and branch, for attention layers and caches.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        self._check(x, t, context, seq_len, None, None)
        channels, scales = self.vace_patch_embedding.in_channels, self._scales(vace_context_scale)
        for sample, control in zip(x, vace_context, strict=True):
            check_shapes(sample, {"vace_context": (control, (channels, *sample.shape[1:]))})
        together = len({sample.shape for sample in x}) == 1
        rows, found = t.expand(len(x)), list[Tensor]()
        for part in [slice(None)] if together else [slice(i, i + 1) for i in range(len(x))]:
            x_BCFHW, control_BCFHW = torch.stack(x[part]), torch.stack(vace_context[part])
            given = self._conditioning(control_BCFHW, scales, self.grid(x_BCFHW.shape[2:]))
            at = step if together else step and replace(step, sample=part.start)
            found += self._forward(x_BCFHW, rows[part], context[part], None, at, given).unbind(0)
        return found

    @property
    def text_layers(self) -> int:
        return self.num_layers + len(self.injected)

    def behind(self, layer: int) -> Sequence[nn.Module]:
        return (self.vace_blocks[self.injected[layer]],) if layer in self.injected else ()

    def _conditioning(
        self, control_BCFHW: Tensor, scales: Sequence[float], grid: Grid
    ) -> Conditioning:
        tokens, stream = math.prod(grid), dict[str, Tensor]()

        def begin(x_BLC: Tensor) -> None:
            stream["x"] = x_BLC.clone()  # block 0 updates it in place

        def after(layer: int) -> After:
            def add_hint(x_BLC: Tensor, beside: BlockInputs) -> Tensor:
                index, before = self.injected[layer], stream.pop("x", None)
                if before is not None:
                    own = self.tokens.shard(patches(control_BCFHW, self.patch_size), grid)
                    stream["c"] = embedded(self.vace_patch_embedding, own)
                place, block = self.num_layers + index, self.vace_blocks[index]
                with trace.span("control", layer=place):
                    known = beside.text.kv[place]
                    stream["c"], hint, kv = block(stream.pop("c"), before, beside, known)
                self._keep_text(beside.text, place, kv)
                return added(x_BLC, hint, scales[index])

            return add_hint

        return Conditioning(
            self.rope.get(grid, control_BCFHW.device, self.tokens.shard),
            self.tokens.first(tokens),
            self.tokens.valid(tokens),
            after={layer: after(layer) for layer in self.injected},
            begin=begin,
        )

    def _scales(self, given: Scales) -> Sequence[float]:
        """Returns a factor for each control block."""
        count = len(self.injected)
        scales = [given] * count if isinstance(given, int | float) else [*given]
        if len(scales) != count:
            raise ValueError(
                f"vace_context_scale has {len(scales)} numbers; give one, or one for each of the "
                f"{count} control blocks."
            )
        return scales


class ControlBlock(WanAttentionBlock):
    """A Wan block on the control stream; its output is projected to a hint for the video stream."""

    def __init__(self, sizes: BlockSizes, layer: int, given: Collaborators, first: bool) -> None:
        super().__init__(sizes, layer, given)
        self.before_proj = nn.Linear(sizes.dim, sizes.dim) if first else None
        self.after_proj = nn.Linear(sizes.dim, sizes.dim)

    def forward(  # type: ignore[override]
        self, c_BLC: Tensor, x_BLC: Tensor | None, beside: BlockInputs, kv: TextKV | None
    ) -> tuple[Tensor, Tensor, TextKV]:
        """Runs the block.

        Args:
            c_BLC: Control stream, float32; updated in place in inference.
            x_BLC: Embedded video tokens, float32, which the first control block adds to the stream.
            kv: Cached keys and values of the text for this layer; None: they are computed.

        Returns:
            The control stream, the hint in the dtype of the weights, and the keys and values.
        """
        dtype = beside.text.embedding.dtype
        if self.before_proj is not None:
            assert x_BLC is not None, "the first block gets the video's tokens"
            c_BLC = self.before_proj(c_BLC.to(dtype)).float() + x_BLC
        text = beside.text.embedding
        c_BLC, kv = super().forward(c_BLC, beside.modulation, text, kv, beside.info)
        return c_BLC, self.after_proj(c_BLC.to(dtype)), kv
