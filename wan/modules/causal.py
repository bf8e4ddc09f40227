"""The network of causal students (Self-Forcing, LongLive): Wan's, block by block of its frames.

It has no further weights. Each call computes a few frames, which attend to the kept keys and values
of earlier frames (`wan.modules.kv_cache`). Their rotary positions are those in the whole video.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.modules.host_kv import HostKV
from wan.modules.interfaces import ModelComponents
from wan.modules.kv_cache import CachedPass, KVCache
from wan.modules.model import StreamConditioning, WanModel
from wan.modules.rope import RopeTable, make_rope_table
from wan.settings.attention_modes import Grid
from wan.settings.presets import MAX_POSITIONS


class WanCausalModel(WanModel):
    """Predicts the flow velocity of a block of frames from the frames before it.

    The arguments are those of `WanModel`.
    """

    def __init__(
        self,
        model_type: str = "causal",
        *,
        components: ModelComponents | None = None,
        **config: Any,
    ) -> None:
        components = ModelComponents() if components is None else components
        self._keeps_kv_in_host_memory = components.keeps_kv_in_host_memory
        super().__init__(model_type, **config, components=components)
        self._block_rope: tuple[object, RopeTable] | None = None

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        *,
        kv_cache: KVCache,
        start_frame: int = 0,
        step: StepInfo | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W], and keeps the block's keys and values.

        Args:
            x: Latents of the block, a list of one tensor [in_dim, F, H, W].
            t: Timesteps 0..1000, [1] or one per token, [1, >= tokens].
            context: Embeddings of its prompt, [length <= text_len, text_dim].
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            kv_cache: That of the video; the block's own keys in it are replaced.
            start_frame: Index of the block's first latent frame in the video.
            step: Sampling step, for attention layers.

        Raises:
            ValueError: The arguments do not fit each other, the cache or the network.
        """
        self._check_inputs(x, t, context, seq_len, None, None)
        grid = self.token_grid(x[0].shape[1:])
        frames = range(start_frame, start_frame + grid[0])
        if len(x) != 1:
            raise ValueError(f"A causal network computes one sample at a time, not {len(x)}.")
        if not 0 <= start_frame <= MAX_POSITIONS - grid[0]:
            raise ValueError(
                f"Frames {frames.start} to {frames.stop - 1} are outside the network's "
                f"{MAX_POSITIONS} positions."
            )
        if grid[0] > kv_cache.window - kv_cache.sink:
            raise ValueError(
                f"A block of {grid[0]} frames does not fit into a window of {kv_cache.window} "
                f"frames with a sink of {kv_cache.sink}."
            )

        if not kv_cache.layers and self._keeps_kv_in_host_memory():
            kv_cache.host = HostKV(x[0].device, kv_cache.layers)
        further_keys = CachedPass(kv_cache, frames, range(self.num_layers))

        def make_conditioning(_: int) -> StreamConditioning:
            stream = self._make_stream(grid, x[0].device, further_keys=further_keys)
            return replace(stream, rope=self._get_rope(frames, grid, x[0].device))

        return self._run_samples(x, t, context, None, step, make_conditioning)

    def _get_rope(self, frames: range, grid: Grid, device: torch.device) -> RopeTable:
        """Returns the RoPE rows of a block's tokens on this rank; all its passes share them."""
        key = frames, grid, device
        if self._block_rope is None or self._block_rope[0] != key:
            positions = frames, range(grid[1]), range(grid[2])
            table = make_rope_table(positions, self.dim // self.num_heads)
            shard = self.sequence_shard.shard
            cos, sin = (shard(rows[None], grid)[0].to(device) for rows in table)
            self._block_rope = key, (cos, sin)
        return self._block_rope[1]

    def runs_in_lockstep(self, num_tokens: int) -> bool:
        """Never: there is one sample."""
        return False
