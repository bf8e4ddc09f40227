"""Hooks and an attention processor for diffusers' networks.

A network's tokens are sharded after the patch embedding and gathered after the last projection.
In between diffusers' modules, including cross-attention, compute on a rank's tokens. Only
self-attention needs the tokens of all ranks; our attention layer computes it.

Adapters are the modules next to the blocks: VACE's control blocks and Animate's face adapters.
diffusers calls control blocks before all blocks, and face adapters after their blocks. With a step
cache, the first block's call computes all blocks and calls the adapters; diffusers' own calls of
adapters then have no effect.

Legend: B batch, S all tokens, L this rank's tokens, C channels, N heads, D head size, F latent
frames, A face tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import WanAnimateTransformer3DModel, WanVACETransformer3DModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import StateManager
from torch import Tensor

from wan.diffusers.session import Networks, Session
from wan.kernels.forward_context import StepInfo
from wan.modules.interfaces import AttentionCall, SequenceShard
from wan.modules.lockstep import BlockIterator, run_to_end
from wan.modules.rope import RopeTable, apply_rope
from wan.settings.attention_modes import Grid

NAME = "wan"
_REGISTRY = "_diffusers_hook"  # attribute of a module with hooks


def attach_hooks(session: Session) -> None:
    """Registers the hooks of a session on its networks."""
    for expert, network in session.networks.items():
        adapters = make_adapters(session, network)
        _get_registry(network).register_hook(_NetworkHook(session, expert, adapters), NAME)
        module_hooks = adapters.make_hooks()
        if session.components.step_cache is not None:
            for layer, block in enumerate(network.blocks):
                block_hook = _BlockHook(session, network.blocks, layer, adapters)
                module_hooks.append((block, block_hook))
        for module, hook in module_hooks:
            _get_registry(module).register_hook(hook, NAME)


def detach_hooks(networks: Networks) -> None:
    """Removes our hooks from networks, with what an aborted video has left in their session.

    Attributes that diffusers adds for the first hook of a module are removed with the last one.
    """
    session = get_session(networks)
    if session is None:
        return
    session.end_video()
    for network in networks.values():
        registry = _get_registry(network)
        registry.remove_hook(NAME, recurse=True)
        if hasattr(registry, "invalidate_child_registries_cache"):  # of newer releases
            registry.invalidate_child_registries_cache()
        for module in network.modules():
            _remove_unused_registry(module)


def _remove_unused_registry(module: Any) -> None:
    registry = vars(module).get(_REGISTRY)
    if registry is None or registry.hooks:
        return
    delattr(module, _REGISTRY)
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward


def get_session(networks: Networks) -> Session | None:
    """Returns the session whose hooks are on the networks, or None."""
    for network in networks.values():
        registry = getattr(network, _REGISTRY, None)
        hook = None if registry is None else registry.get_hook(NAME)
        return None if hook is None else hook.session
    return None


def _get_registry(module: Any) -> Any:
    return HookRegistry.check_if_exists_or_initialize(module)


class _CallContext(StateManager):
    """Stores the `cache_context` of the current call: only a name before diffusers 0.41."""

    def __init__(self) -> None:
        super().__init__(None)
        self.call_context: Any = None

    def set_context(self, context: Any) -> None:
        self.call_context = context


class _NetworkHook(ModelHook):
    """The hook on a transformer: determines the step of a call and shards the tokens."""

    _is_stateful = True

    def __init__(self, session: Session, expert: str, adapters: Adapters) -> None:
        super().__init__()
        self.session, self.expert, self.calls = session, expert, _CallContext()
        self.adapters = adapters

    def initialize_hook(self, module: Any) -> Any:
        self.processors = module.attn_processors
        # Of the arguments after hidden_states and timestep.
        self._input_names = [*inspect.signature(type(module).forward).parameters][3:]
        # The layers of control blocks follow those of the video.
        first_layer = {"blocks": 0, "vace_blocks": len(module.blocks)}
        ours = {}
        for name in self.processors:
            if name.endswith("attn1.processor"):
                blocks, index = name.split(".")[:2]
                ours[name] = _AttentionProcessor(self.session, first_layer[blocks] + int(index))
        module.set_attn_processor({**self.processors, **ours})
        return module

    def deinitalize_hook(self, module: Any) -> Any:
        module.set_attn_processor(dict(self.processors))
        return module

    def reset_state(self, module: Any) -> Any:
        """Ends a video: a pipeline calls this after it."""
        self.session.end_video()
        return module

    def new_forward(
        self, module: Any, hidden_states: Tensor, timestep: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        session, tokens = self.session, self.session.components.sequence_shard
        session.check_network(module)
        sizes = zip(hidden_states.shape[2:], module.config.patch_size, strict=True)
        grid = cast(Grid, tuple(size // patch for size, patch in sizes))
        step = self._make_step(grid)
        if session.loop is not None and step is not None and step.branch == "cond":
            if step.index == 0:
                session.start_video(grid, hidden_states)
                session.check_inputs(hidden_states, [*args, *kwargs.values()])
            elif step.index == 1:
                session.check_noise(hidden_states)
        if timestep.ndim == 2:  # one for each token
            timestep = tokens.shard(timestep, grid)
        inputs = dict(zip(self._input_names, args, strict=False)) | kwargs

        def compute() -> Any:
            session.step, session.valid_len = step, prod(grid)
            hooks = {
                **self.adapters.start_call(inputs, grid),
                "rope": lambda _, __, table: _shard_rotation(table, tokens, grid),
                "proj_out": lambda _, __, x: tokens.gather(x, grid),
            }
            # For this call only: a LoRA may replace these modules.
            handles = [getattr(module, name).register_forward_hook(hooks[name]) for name in hooks]
            try:
                return self.fn_ref.original_forward(hidden_states, timestep, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        if step is None or not session.pairs_branches:
            result = compute()
        else:
            result = session.compute_paired_branch(step, hidden_states, compute)
        if step is not None:
            session.end_step(step)
        return result

    def _make_step(self, grid: Grid) -> StepInfo | None:
        """Returns the step of the current call; None if it is unknown."""
        call_context = self.calls.call_context
        name = getattr(call_context, "name", call_context)
        if self.session.loop is not None:
            step = self.session.loop.find_step(self.expert, name)
        else:
            counts = ("step_index", "num_inference_steps")
            index, count = (getattr(call_context, attribute, None) for attribute in counts)
            if index is None or count is None:
                return None
            step = index, count, name or "cond"
        return StepInfo(*step, self.expert, grid, prod(grid))


class _BlockHook(ModelHook):
    """The hook on a block for a step cache: the first block's call computes all blocks."""

    def __init__(
        self, session: Session, blocks: Sequence[Any], layer: int, adapters: Adapters
    ) -> None:
        super().__init__()
        self.session, self.blocks, self.layer = session, blocks, layer
        self.adapters = adapters

    def new_forward(self, _: Any, x_BLC: Tensor, *block_args: Any) -> Tensor:
        if self.session.in_blocks:
            return self.fn_ref.original_forward(x_BLC, *block_args)
        return x_BLC if self.layer else self._compute_all_blocks(x_BLC, block_args)

    @torch.compiler.disable  # the blocks may be compiled
    def _compute_all_blocks(self, x_BLC: Tensor, block_args: tuple[Any, ...]) -> Tensor:
        session, cache = self.session, self.session.components.step_cache
        assert cache is not None

        def iterate_blocks(x_BLC: Tensor, first: int, last: int | None) -> BlockIterator[Tensor]:
            for layer, block in islice(enumerate(self.blocks), first, last):
                yield layer
                x_before, x_BLC = x_BLC, block(x_BLC, *block_args)
                x_BLC = self.adapters.apply(layer, x_before, x_BLC, block_args)
            return x_BLC

        session.in_blocks = True
        try:
            valid = session.components.sequence_shard.count_valid_tokens(session.valid_len)
            iterator = cache.iterate(x_BLC, iterate_blocks, session.step, valid, x_BLC.dtype)
            return run_to_end(iterator)
        finally:
            session.in_blocks = False


class _AttentionProcessor:
    """A block's attention processor: diffusers' projections and norms around our layer."""

    def __init__(self, session: Session, layer: int) -> None:
        self.session, self.layer = session, layer
        self.attention = session.components.attention(layer)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: RopeTable | None = None,
    ) -> Tensor:
        """Returns [B,L,C]; rotary_emb is a result of `_shard_rotation`."""
        session, cache = self.session, self.session.components.attention_cache
        assert rotary_emb is not None, "self-attention has RoPE"

        def attend() -> Tensor:
            call = self.attention.start(
                hidden_states, attn.heads, valid_len=session.valid_len, step=session.step
            )
            _write_qkv(attn, hidden_states, rotary_emb, call)
            out_BLND = call.finish()
            return attn.to_out[1](attn.to_out[0](out_BLND.flatten(2)))

        return attend() if cache is None else cache(attend, session.step, self.layer)


def _write_qkv(attn: Any, x_BLC: Tensor, rope: RopeTable, call: AttentionCall) -> None:
    """Computes q, k and v by diffusers' projections and norms, and writes them into a call."""
    if attn.fused_projections:
        q, k, v = attn.to_qkv(x_BLC).chunk(3, dim=-1)
    else:
        q, k, v = (layer(x_BLC) for layer in (attn.to_q, attn.to_k, attn.to_v))
    call.write(0, _rotate_qk(attn.norm_q(q), attn.heads, rope))
    call.write(1, _rotate_qk(attn.norm_k(k), attn.heads, rope))
    call.write(2, v.unflatten(-1, (attn.heads, -1)))


def _rotate_qk(x_BLC: Tensor, heads: int, table: RopeTable) -> Tensor:
    """Splits x into heads [B,L,N,D] and applies RoPE."""
    return apply_rope(x_BLC.unflatten(-1, (heads, -1)).float(), table).type_as(x_BLC)


def _shard_rotation(table: RopeTable, tokens: SequenceShard, grid: Grid) -> RopeTable:
    """Shards diffusers' RoPE table, two tensors [1,S,1,D], in the form of `apply_rope`."""
    cos, sin = (tokens.shard(rows, grid) for rows in table)
    signs = torch.tensor([-1.0, 1.0], device=sin.device).repeat(sin.shape[-1] // 2)
    return cos, sin * signs


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
