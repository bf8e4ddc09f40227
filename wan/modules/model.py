"""The Wan2.2 diffusion transformer (DiT) with the official names and forward signature.

Legend: B batch, C channels, F H W latent frames/height/width, L this rank's tokens, S all tokens,
N this rank's video tokens, M this rank's extra tokens, T text tokens, R timestep segments, K values
of a patch.

Dtypes are explicit, without autocast; `docs/numerics.md` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.kernels.forward_context import StepInfo
from wan.modules.blocks import (
    BlockSizes,
    Head,
    ImageEmbedding,
    SharedInputs,
    TanhGELU,
    WanAttentionBlock,
    fp32_linear,
)
from wan.modules.interfaces import FurtherKeys, ModelComponents
from wan.modules.lockstep import (
    BlockIterator,
    HoldWeights,
    can_run_in_lockstep,
    run_in_lockstep,
    run_to_end,
)
from wan.modules.lora_branch import add_lora_branches
from wan.modules.pretrained import PretrainedNetwork
from wan.modules.rope import RopeCache, RopeTable
from wan.modules.rope import rope_apply as rope_apply
from wan.modules.rope import rope_params as rope_params
from wan.modules.text_kv_cache import ContextKV, EmbeddedContext, InputCache
from wan.settings.attention_modes import Grid
from wan.settings.presets import MODEL_TYPES
from wan.utils import trace


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of one forward pass that VACE's control blocks and hooks after a block need.

    Attributes:
        modulation: [B,R,6,C] float32, of each timestep segment.
        context: Embedded text and image tokens, and their cached keys and values.
    """

    modulation: Tensor
    context: EmbeddedContext
    shared_inputs: SharedInputs


AfterBlock = Callable[[Tensor, BlockInputs], Tensor]
"""after_block(x_BLC, block_inputs): returns the residual stream; may update it in place in
inference."""


@dataclass(frozen=True)
class StreamConditioning:
    """Extra tokens, embeddings and hooks that a subclass adds to the forward pass of `WanModel`.

    Attributes:
        rope: Rows of the RoPE table of this rank's tokens, including the extra tokens.
        token_offset: Global index of this rank's first token.
        num_local_video_tokens: Video tokens on this rank; they precede the extra tokens.
        video_embedding: [B,N,C], added to the embedded video tokens.
        num_extra_tokens: Tokens appended to the video tokens in the global sequence, at timestep 0.
        extra_tokens: [B,M,C] float32, the ones on this rank.
        after_block: Layer -> hook that updates the residual stream after its block.
        before_blocks: Hook that receives the residual stream before block 0; not called in steps in
            which the step cache skips block 0.
        further_keys: To which self-attention attends as well; they name the layers that run.
    """

    rope: RopeTable
    token_offset: int
    num_local_video_tokens: int
    video_embedding: Tensor | None = None
    num_extra_tokens: int = 0
    extra_tokens: Tensor | None = None
    after_block: Mapping[int, AfterBlock] = field(default_factory=dict)
    before_blocks: Callable[[Tensor], None] | None = None
    further_keys: FurtherKeys | None = None

    @property
    def local_video_tokens(self) -> slice:
        """This rank's video tokens in the global sequence."""
        return slice(self.token_offset, self.token_offset + self.num_local_video_tokens)


class WanModel(PretrainedNetwork):
    """Predicts the flow velocity of noisy video latents.

    The arguments up to `eps` are those of the official config.json.

    Args:
        image_dim: Channels of the CLIP features of a Wan2.1 image-to-video model, else 0.
        image_positions: Tokens of both images of a Wan2.1 first-and-last-frame model, else 0.
        components: Attention, kernels, sharding and caches; None: those for one device.

    Attributes:
        hold_weights: Set if a block's weights are dequantized or copied before each use; several
            samples may then run in lockstep.

    Raises:
        ValueError: The model type, window size or number of heads is not supported.
    """

    def __init__(
        self,
        model_type: str = "t2v",
        patch_size: tuple[int, int, int] = (1, 2, 2),
        text_len: int = 512,
        in_dim: int = 16,
        dim: int = 2048,
        ffn_dim: int = 8192,
        freq_dim: int = 256,
        text_dim: int = 4096,
        out_dim: int = 16,
        num_heads: int = 16,
        num_layers: int = 32,
        window_size: tuple[int, int] = (-1, -1),
        qk_norm: bool = True,
        cross_attn_norm: bool = True,
        eps: float = 1e-6,
        *,
        image_dim: int = 0,
        image_positions: int = 0,
        components: ModelComponents | None = None,
    ) -> None:
        super().__init__()
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"model_type is {model_type!r}; known types: {', '.join(MODEL_TYPES)}."
            )
        if tuple(window_size) != (-1, -1):
            raise ValueError(
                f"window_size is {window_size}; only global attention, (-1, -1), exists."
            )
        if num_heads < 1 or dim % num_heads or (dim // num_heads) % 2:
            raise ValueError(f"dim {dim} cannot be divided into {num_heads} heads of an even size.")
        self.model_type, self.text_len = model_type, text_len
        p, q, r = patch_size
        self.patch_size = (p, q, r)
        self.in_dim, self.out_dim, self.dim = in_dim, out_dim, dim
        self.freq_dim, self.text_dim, self.ffn_dim, self.eps = freq_dim, text_dim, ffn_dim, eps
        self.num_heads, self.num_layers = num_heads, num_layers
        components = ModelComponents() if components is None else components
        self.sequence_shard = components.sequence_shard
        self.context_cache = InputCache[EmbeddedContext](components.text_kv_cache)
        self.step_cache = components.step_cache
        self.hold_weights: HoldWeights | None = None
        self.rope = RopeCache(dim // num_heads)

        self.patch_embedding = nn.Conv3d(in_dim, dim, self.patch_size, self.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(text_dim, dim), TanhGELU(components.ops), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim * 6))
        norms, has_image = (qk_norm, cross_attn_norm, eps), image_dim > 0
        self.block_sizes = sizes = BlockSizes(dim, ffn_dim, num_heads, *norms, has_image, text_len)
        self.blocks = nn.ModuleList(
            WanAttentionBlock(sizes, layer, components) for layer in range(num_layers)
        )
        self.head = Head(dim, math.prod(self.patch_size) * out_dim, eps, components.ops)
        self.img_emb = ImageEmbedding(image_dim, dim, image_positions) if has_image else None

    def forward(
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor] | None = None,
        *,
        clip_fea: Tensor | None = None,
        step: StepInfo | Sequence[StepInfo] | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [C, F, H, W] each.
            t: Timesteps 0..1000, [B] or one per token, [B, >= tokens]; a tensor on an accelerator
                is copied to the host.
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            y: Image conditioning latents, concatenated to x on channels.
            clip_fea: CLIP features [images, tokens, image_dim] of a Wan2.1 image model; all samples
                share them.
            step: Sampling step, expert and branch, for attention layers and caches; a list of one
                for each sample: samples are not computed as a batch.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        if y is not None:
            x = [torch.cat(pair, dim=0) for pair in zip(x, y, strict=True)]
        self._check_inputs(x, t, context, seq_len, y, clip_fea)
        return self._run_samples(
            x,
            t,
            context,
            clip_fea,
            step,
            lambda first, *_: self._make_stream(
                self.token_grid(x[first].shape[1:]), x[first].device
            ),
            can_be_batch=t.dim() == 1,
        )

    def runs_in_lockstep(self, num_tokens: int) -> bool:
        """Whether samples of this number of tokens share a block's weights."""
        return self.hold_weights is not None and can_run_in_lockstep(
            num_tokens, self.dim, self.ffn_dim
        )

    def _run_samples(
        self,
        x: Sequence[Tensor],
        t: Tensor,
        context: list[Tensor],
        clip_fea: Tensor | None,
        step: StepInfo | Sequence[StepInfo] | None,
        make_conditioning: Callable[..., StreamConditioning],
        *,
        can_be_batch: bool = False,
    ) -> list[Tensor]:
        """Computes the velocity of each sample: as one batch, in lockstep or one after the other.

        Args:
            x: The latents of each sample, with all channels; the next four are those of `forward`.
            make_conditioning: make_conditioning(*indices) makes that of a batch of samples.
            can_be_batch: Compute samples of one shape as a batch if they share a step.
        """
        batches, steps = [[i] for i in range(len(x))], list_sample_steps(step, len(x))
        has_one_shape = len({sample.shape for sample in x}) == 1
        if can_be_batch and has_one_shape and not isinstance(step, Sequence):
            batches, steps, timesteps = [[*range(len(x))]], [step], (t,)
        else:
            timesteps = t.expand(len(x), *t.shape[1:]).split(1)
        iterators = [
            self._iterate_forward(
                torch.stack([x[i] for i in batch]),
                timestep,
                [context[i] for i in batch],
                clip_fea,
                batch_step,
                make_conditioning(*batch),
            )
            for batch, timestep, batch_step in zip(batches, timesteps, steps, strict=True)
        ]
        num_tokens = max(math.prod(self.token_grid(sample.shape[1:])) for sample in x)
        if len(batches) > 1 and self.hold_weights and self.runs_in_lockstep(num_tokens):
            velocities = run_in_lockstep(iterators, steps, self.hold_weights)
        else:
            velocities = [run_to_end(iterator) for iterator in iterators]
        return [velocity for batch in velocities for velocity in batch.unbind(0)]

    def _make_stream(self, grid: Grid, device: torch.device, **fields: Any) -> StreamConditioning:
        """Makes the conditioning of a stream of video tokens, with a subclass's fields."""
        shard, num_tokens = self.sequence_shard, math.prod(grid)
        return StreamConditioning(
            self.rope.get(grid, device, shard.shard),
            shard.get_local_offset(num_tokens),
            shard.count_valid_tokens(num_tokens),
            **fields,
        )

    def _iterate_forward(
        self,
        x_BCFHW: Tensor,
        t: Tensor,
        context: list[Tensor],
        clip_fea: Tensor | None,
        step: StepInfo | None,
        conditioning: StreamConditioning,
    ) -> BlockIterator[Tensor]:
        """Predicts the velocity: embeds the inputs, runs the blocks and then the head.

        It yields before each block, so that samples may run in lockstep (`wan.modules.lockstep`).
        """
        grid = self.token_grid(x_BCFHW.shape[2:])
        e_BRC, lengths = self._embed_timesteps(t, grid, x_BCFHW.device, conditioning)
        modulation_BR6C = _run_in_fp32(self.time_projection, e_BRC).unflatten(-1, (6, self.dim))
        embedded_context = self._embed_context(context, clip_fea, step)
        shared_inputs = SharedInputs(
            timestep_segments=self.sequence_shard.get_local_segment_lengths(lengths),
            rope=conditioning.rope,
            valid_len=sum(lengths),
            step=step,
            further_keys=conditioning.further_keys,
            second_text=embedded_context.second_text,
        )
        inputs = BlockInputs(modulation_BR6C, embedded_context, shared_inputs)
        x_BLC = self._embed_tokens(x_BCFHW, grid, conditioning)
        run_blocks = partial(self._iterate_blocks, inputs, conditioning)
        if self.step_cache is None:
            x_BLC = yield from run_blocks(x_BLC, 0, None)
        else:
            num_valid, dtype = conditioning.num_local_video_tokens, embedded_context.embedding.dtype
            x_BLC = yield from self.step_cache.iterate(x_BLC, run_blocks, step, num_valid, dtype)
        patches_BLK = self.head(x_BLC, e_BRC, shared_inputs.timestep_segments)
        patches_BSK = self.sequence_shard.gather(patches_BLK, grid)
        return self._unpatchify(patches_BSK[:, : math.prod(grid)], grid)

    def _embed_timesteps(
        self, t: Tensor, grid: Grid, device: torch.device, conditioning: StreamConditioning
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Embeds timesteps: float32 [B,R,C] of the segments, and their global lengths."""
        num_video_tokens = math.prod(grid)
        if t.dim() == 2:
            t = self.sequence_shard.permute(t[:, :num_video_tokens].cpu(), grid)
        times_BR, lengths = find_timestep_segments(t, num_video_tokens)
        if conditioning.num_extra_tokens:
            times_BR = F.pad(times_BR, (0, 1))
            lengths = (*lengths, conditioning.num_extra_tokens)
        features = sinusoidal_embedding_1d(self.freq_dim, times_BR.cpu()).float()
        features = features.to(device, non_blocking=True)
        return _run_in_fp32(self.time_embedding, features), lengths

    def _iterate_blocks(
        self,
        inputs: BlockInputs,
        conditioning: StreamConditioning,
        x_BLC: Tensor,
        start: int,
        stop: int | None,
    ) -> BlockIterator[Tensor]:
        """Runs blocks start to stop - 1 and the hooks of a subclass; see `IterateBlocks`."""
        step, further_keys = inputs.shared_inputs.step, conditioning.further_keys
        if conditioning.before_blocks is not None and start == 0:
            conditioning.before_blocks(x_BLC)
        for layer, block in islice(enumerate(self.blocks), start, stop):
            yield layer
            if (step and layer in step.skipped_blocks) or (
                further_keys and layer not in further_keys.layers
            ):
                _skip_block(block, layer)
            else:
                x_BLC = self._run_block(layer, x_BLC, inputs)
            if layer in conditioning.after_block:
                x_BLC = conditioning.after_block[layer](x_BLC, inputs)
        return x_BLC

    def _run_block(self, layer: int, x_BLC: Tensor, inputs: BlockInputs) -> Tensor:
        context = inputs.context
        with trace.span("layer", x_BLC, layer=layer):
            x_BLC, kv = self.blocks[layer](
                x_BLC,
                inputs.modulation,
                context.embedding,
                context.kv[layer],
                inputs.shared_inputs,
            )
        self._cache_context_kv(context, layer, kv)
        return x_BLC

    def token_grid(self, latent_FHW: Sequence[int]) -> Grid:
        """Number of tokens along frame, height and width for a latent size."""
        f, h, w = (size // patch for size, patch in zip(latent_FHW, self.patch_size, strict=True))
        return f, h, w

    def blocks_and_adapters(self) -> list[nn.Module]:
        """Lists all blocks and adapters in the order in which they run."""
        groups = ((block, *self.adapter_modules(layer)) for layer, block in enumerate(self.blocks))
        return [module for group in groups for module in group]

    def self_attention_blocks(self) -> list[WanAttentionBlock]:
        """Lists the blocks with self-attention, including VACE's control blocks."""
        return [
            module for module in self.blocks_and_adapters() if isinstance(module, WanAttentionBlock)
        ]

    def adapter_modules(self, layer: int) -> Sequence[nn.Module]:
        """Adapters that run after a block and are offloaded with it.

        Every forward pass must call the last one: block offloading frees their memory after it.
        """
        return ()

    def _embed_tokens(
        self, x_BCFHW: Tensor, grid: Grid, conditioning: StreamConditioning
    ) -> Tensor:
        """Embeds this rank's tokens, float32 [B,L,C]."""
        patches_BSK = extract_patches(x_BCFHW, self.patch_size)
        if conditioning.video_embedding is None and not conditioning.num_extra_tokens:
            return embed_patches(self.patch_embedding, self.sequence_shard.shard(patches_BSK, grid))
        local_patches_BNK = patches_BSK[:, conditioning.local_video_tokens]
        embeddings = [embed_patches(self.patch_embedding, local_patches_BNK)]
        if conditioning.video_embedding is not None:
            embeddings[0] = embeddings[0] + conditioning.video_embedding
        if conditioning.extra_tokens is not None:
            embeddings.append(conditioning.extra_tokens.expand(len(local_patches_BNK), -1, -1))
        x_BLC = torch.cat(embeddings, dim=1)
        return F.pad(x_BLC, (0, 0, 0, len(conditioning.rope[0]) - x_BLC.shape[1]))

    def _unpatchify(self, x_BSC: Tensor, grid: Grid) -> Tensor:
        (f, h, w), (p, q, r) = grid, self.patch_size
        x = x_BSC.reshape(-1, f, h, w, p, q, r, self.out_dim).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.reshape(-1, self.out_dim, f * p, h * q, w * r)

    def _embed_context(
        self, context: list[Tensor], clip_fea: Tensor | None, step: StepInfo | None
    ) -> EmbeddedContext:
        """Embeds the image and text tokens of a call, or returns the cached embedding."""
        guidance = step.text_guidance if step else None
        second = [] if guidance is None else [guidance.context] * len(context)

        def embed() -> EmbeddedContext:
            embedding = self._embed_texts(context)
            if self.img_emb is not None and clip_fea is not None:
                image = self.img_emb(clip_fea).to(embedding).expand(len(context), -1, -1)
                embedding = torch.cat((image, embedding), dim=1)
            second_text = self._embed_texts(second) if second else None
            kv: list[ContextKV | None] = [None] * self.num_cross_attention_layers
            return EmbeddedContext(embedding, kv, second_text)

        cache_key = [*context, len(second), *second, *([] if clip_fea is None else [clip_fea])]
        return self.context_cache.get_or_compute(cache_key, embed)

    def _embed_texts(self, texts: list[Tensor]) -> Tensor:
        padded = torch.stack([F.pad(text, (0, 0, 0, self.text_len - len(text))) for text in texts])
        embedding: Tensor = self.text_embedding(padded.to(self.patch_embedding.weight.dtype))
        return embedding

    @property
    def num_cross_attention_layers(self) -> int:
        """Number of layers with cross-attention to the context."""
        return self.num_layers

    def _cache_context_kv(
        self, embedded_context: EmbeddedContext, layer: int, kv: ContextKV
    ) -> None:
        """Stores a layer's keys and values of the context, if `text_kv_cache` is on."""
        if self.context_cache.is_active:
            embedded_context.kv[layer] = kv

    def _check_inputs(
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor] | None,
        clip_fea: Tensor | None,
    ) -> None:
        """Raises ValueError if shapes do not fit each other or the network."""
        self._check_image_inputs(y, clip_fea)
        if (
            not x
            or len(context) != len(x)
            or t.dim() not in (1, 2)
            or t.shape[0] not in (1, len(x))
        ):
            raise ValueError(
                f"x, t and context must describe the same number of samples, but there are "
                f"{len(x)} latents, timesteps of shape {list(t.shape)} and {len(context)} contexts."
            )
        for sample in x:
            sizes = sample.shape[1:]
            if sample.shape[0] != self.in_dim or any(
                s % p for s, p in zip(sizes, self.patch_size, strict=True)
            ):
                raise ValueError(
                    f"Latents of shape {list(sample.shape)} do not fit: the model takes "
                    f"{self.in_dim} channels and sizes divisible by {self.patch_size}."
                )
            num_tokens = math.prod(self.token_grid(sizes))
            if seq_len < num_tokens or (t.dim() == 2 and t.shape[1] < num_tokens):
                raise ValueError(
                    f"{num_tokens} tokens do not fit into seq_len {seq_len} "
                    f"and timesteps of shape {list(t.shape)}."
                )
        longest = max(len(c) for c in context)
        if longest > self.text_len:
            raise ValueError(f"A context has {longest} rows; text_len is {self.text_len}.")

    def _check_image_inputs(self, y: list[Tensor] | None, clip_fea: Tensor | None) -> None:
        if self.in_dim > self.out_dim and y is None:
            raise ValueError(f"This {self.model_type} model needs y, the conditioning latents.")
        if self.img_emb is not None and clip_fea is None:
            raise ValueError("This image model of Wan2.1 needs clip_fea, the CLIP features.")
        if self.img_emb is None and clip_fea is not None:
            raise ValueError("This model takes no clip_fea; only image models of Wan2.1 do.")

    def clear_caches(self) -> None:
        """Frees the caches for the inputs of a video: embeddings, keys and values."""
        for value in vars(self).values():
            if isinstance(value, InputCache):
                value.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WanModel:
        """Moves or casts the model; clears the caches, which would be stale."""
        self.clear_caches()
        return super()._apply(fn, recurse)


def _skip_block(block: Any, layer: int) -> None:
    """Leaves a block out; FSDP's ranks gather it all the same, as others may compute it."""
    trace.record_marker("skip", layer=layer)
    if hasattr(block, "unshard"):
        block.unshard()
        block.reshard()


def extract_patches(x_BCFHW: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Flattens patches to [B,S,K] in the order of a Conv3d weight; incomplete patches are cut."""
    p, q, r = patch_size
    f, h, w = (length // side for length, side in zip(x_BCFHW.shape[2:], patch_size, strict=True))
    x_BCFHW = x_BCFHW[:, :, : f * p, : h * q, : w * r]
    x_BCfphqwr = x_BCFHW.reshape(*x_BCFHW.shape[:2], f, p, h, q, w, r)
    return x_BCfphqwr.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(len(x_BCFHW), f * h * w, -1)


def embed_patches(conv: nn.Conv3d, patches_BSK: Tensor) -> Tensor:
    """Embeds patches to [B,S,C] float32; a convolution with kernel = stride is a matmul."""
    patches_BSK = patches_BSK.to(conv.weight.dtype)
    embedded_BSC = F.linear(patches_BSK, conv.weight.flatten(1), conv.bias)
    return add_lora_branches(conv, patches_BSK, embedded_BSC).float()


def list_sample_steps(
    step: StepInfo | Sequence[StepInfo] | None, num_samples: int
) -> list[StepInfo | None]:
    """Lists the step of each sample of a call."""
    if step is None or isinstance(step, StepInfo):
        return [step and replace(step, sample=i) for i in range(num_samples)]
    return [*step]


def split_samples(values: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the values [1, ...] of each sample."""
    return values.split(1) if isinstance(values, Tensor) else values


def _run_in_fp32(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Runs layers in sequence, with linear layers in float32."""
    for layer in layers:
        x = fp32_linear(layer, x) if isinstance(layer, nn.Linear) else layer(x)
    return x


def find_timestep_segments(t: Tensor, num_tokens: int) -> tuple[Tensor, tuple[int, ...]]:
    """Splits timesteps [B] or [1, >= tokens] into segments: values [B or 1, R] and R lengths."""
    if t.dim() == 1:
        return t.unsqueeze(1), (num_tokens,)
    values, counts = torch.unique_consecutive(t[0, :num_tokens].cpu(), return_counts=True)
    return values.unsqueeze(0), tuple(counts.tolist())


def sinusoidal_embedding_1d(dim: int, position: Tensor) -> Tensor:
    """Returns float64 features [..., dim] of timesteps: first cosines, then sines.

    They are computed on the host and returned on the device of `position`; NPUs have no float64.
    """
    half = dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = position.to("cpu", torch.float64).unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(position.device)
