"""Modules beside the blocks of diffusers' networks: VACE's control blocks, Animate's face adapters.

diffusers calls control blocks before all blocks, and face adapters after their blocks. With a step
cache, the first block's call computes all blocks and calls the adapters; diffusers' own calls of
adapters then have no effect.

Legend: B batch, S all tokens, L this rank's tokens, C channels, F latent frames, A face tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from diffusers import WanAnimateTransformer3DModel, WanVACETransformer3DModel
from diffusers.hooks import ModelHook
from torch import Tensor

from wan.diffusers.session import Session
from wan.modules.interfaces import SequenceShard
from wan.settings.attention_modes import Grid

ForwardHook = Callable[..., Any]
"""hook(module, args, output) of `register_forward_hook`."""


def shard_patches(x_BCFHW: Tensor, tokens: SequenceShard, grid: Grid) -> Tensor:
    """Shards patch embeddings to [B,C,L,1,1], strided like a convolution's output."""
    x_BLC = tokens.shard(x_BCFHW.flatten(2).transpose(1, 2), grid)
    return x_BLC.transpose(1, 2).contiguous()[..., None, None]


def make_adapters(session: Session, network: Any) -> Adapters:
    """Returns the adapters of a network."""
    if isinstance(network, WanVACETransformer3DModel):
        return ControlBlocks(session, network)
    if isinstance(network, WanAnimateTransformer3DModel):
        return FaceAdapters(session, network)
    return Adapters(session, network)


class Adapters:
    """The adapters of a network without any; the base of the others.

    Attributes:
        modules: Layer -> the module that is applied after its block.
    """

    def __init__(self, session: Session, network: Any) -> None:
        self.session, self.network = session, network
        self.modules: Mapping[int, Any] = {}

    def make_hooks(self) -> list[tuple[Any, ModelHook]]:
        """Returns the hooks of the modules."""
        return []

    def start_call(self, inputs: Mapping[str, Any], grid: Grid) -> dict[str, ForwardHook]:
        """Starts a call of the network; returns the hooks of its modules during the call.

        inputs: The network's arguments by name.
        """
        tokens = self.session.components.sequence_shard
        return {"patch_embedding": lambda _, __, x: shard_patches(x, tokens, grid)}

    def apply(self, layer: int, x_before: Tensor, x_BLC: Tensor, block_args: Sequence[Any]) -> Any:
        """Returns the stream after the block of a layer with the adapter's output."""
        return x_BLC


class ControlBlocks(Adapters):
    """VACE's control blocks.

    Attributes:
        scales: Factors of the hints; None: 1.
        stream: The control stream [B,L,C] after the last computed control block.
    """

    def __init__(self, session: Session, network: Any) -> None:
        super().__init__(session, network)
        layers = sorted(network.config.vace_layers)
        self.modules = dict(zip(layers, network.vace_blocks, strict=True))
        self.scales: Tensor | None = None
        self.stream: Tensor | None = None

    def make_hooks(self) -> list[tuple[Any, ModelHook]]:
        if self.session.components.step_cache is None:
            return []
        return [(block, _ControlBlockHook(self)) for block in self.modules.values()]

    def start_call(self, inputs: Mapping[str, Any], grid: Grid) -> dict[str, ForwardHook]:
        self.scales = inputs.get("control_hidden_states_scale")
        hooks = super().start_call(inputs, grid)
        return {**hooks, "vace_patch_embedding": hooks["patch_embedding"]}

    def apply(self, layer: int, x_before: Tensor, x_BLC: Tensor, block_args: Sequence[Any]) -> Any:
        if layer not in self.modules:
            return x_BLC
        text, modulation, rope = block_args
        hint, self.stream = self.modules[layer](x_before, text, self.stream, modulation, rope)
        scale = 1 if self.scales is None else self.scales[[*self.modules].index(layer)]
        return x_BLC + hint * scale


class _ControlBlockHook(ModelHook):
    """The hook on a control block for a step cache.

    diffusers' call stores the control stream and returns a hint of zero.
    """

    def __init__(self, adapters: ControlBlocks) -> None:
        super().__init__()
        self.adapters = adapters

    def new_forward(
        self, _: Any, x_BLC: Tensor, text: Tensor, c_BLC: Tensor, *block_args: Any
    ) -> Any:
        if self.adapters.session.in_blocks:
            return self.fn_ref.original_forward(x_BLC, text, c_BLC, *block_args)
        self.adapters.stream = c_BLC
        return x_BLC.new_zeros(()), c_BLC


class FaceAdapters(Adapters):
    """Animate's face adapters: each token attends to the face tokens of its latent frame.

    Attributes:
        faces: The face tokens of all frames, [B,F,A,C]; only for a step cache.
    """

    def __init__(self, session: Session, network: Any) -> None:
        super().__init__(session, network)
        interval = network.config.inject_face_latents_blocks
        self.modules = {
            index * interval: module for index, module in enumerate(network.face_adapter)
        }
        self.faces: Tensor | None = None

    def make_hooks(self) -> list[tuple[Any, ModelHook]]:
        return [(module, _FaceAdapterHook(self.session)) for module in self.modules.values()]

    def start_call(self, inputs: Mapping[str, Any], grid: Grid) -> dict[str, ForwardHook]:
        # diffusers adds the pose to the patches of whole frames. Here it is added before the tokens
        # are sharded, and diffusers adds zero.
        pose = self.network.pose_patch_embedding(inputs["pose_hidden_states"])
        tokens = self.session.components.sequence_shard

        def embed_patches(_: Any, __: Any, x_BCFHW: Tensor) -> Tensor:
            x_BCFHW[:, :, 1:] += pose  # the first frame is the reference image
            return shard_patches(x_BCFHW, tokens, grid)

        hooks: dict[str, ForwardHook] = {
            "patch_embedding": embed_patches,
            "pose_patch_embedding": lambda _, __, pose: pose.new_zeros(()),
        }
        if self.session.components.step_cache is not None:
            hooks["face_encoder"] = self._store_faces
        return hooks

    def _store_faces(self, _: Any, __: Any, faces_BFAC: Tensor) -> None:
        self.faces = F.pad(faces_BFAC, (0, 0, 0, 0, 1, 0))  # zeros for the reference image

    def apply(self, layer: int, x_before: Tensor, x_BLC: Tensor, block_args: Sequence[Any]) -> Any:
        if layer not in self.modules:
            return x_BLC
        return self.modules[layer](x_BLC, self.faces) + x_BLC


class _FaceAdapterHook(ModelHook):
    """The hook on a face adapter: calls it for the latent frames of this rank's tokens."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def new_forward(self, _: Any, x_BLC: Tensor, faces_BFAC: Tensor, *args: Any) -> Tensor:
        session, tokens = self.session, self.session.components.sequence_shard
        if session.components.step_cache is not None and not session.in_blocks:
            return x_BLC.new_zeros(())
        num_tokens = session.valid_len
        frame_size = num_tokens // faces_BFAC.shape[1]
        offset, num_local = (
            tokens.get_local_offset(num_tokens),
            tokens.count_valid_tokens(num_tokens),
        )
        if not num_local:
            return x_BLC.new_zeros(())
        first, last = offset // frame_size, -(-(offset + num_local) // frame_size)
        # The adapter takes whole frames; the rows of other ranks' tokens are zeros.
        num_before = offset - first * frame_size
        num_after = last * frame_size - offset - num_local
        frames = F.pad(x_BLC[:, :num_local], (0, 0, num_before, num_after))
        y_BSC = self.fn_ref.original_forward(frames, faces_BFAC[:, first:last], *args)
        y_BLC = y_BSC[:, num_before : num_before + num_local]
        return F.pad(y_BLC, (0, 0, 0, x_BLC.shape[1] - num_local))
