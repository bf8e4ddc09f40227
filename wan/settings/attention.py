"""Settings of self-attention: kernel, quantization, sparsity, NPU clock; and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from wan.settings.attention_modes import TokenPlan
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import layout_option, load_option
from wan.settings.kernels import (
    DEFAULT_KERNEL,
    DENSE_KERNELS,
    RAINFUSION,
    SMALL_OPS,
    DenseKernelRow,
)
from wan.settings.numerics import KV_ROWS, Q_ROWS
from wan.settings.parallel import Parallel
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.values import (
    Reader,
    choice,
    format_value,
    integer,
    join_with_or,
    real,
    split_list,
    subset_of,
    switch,
)

_AUTO = "auto"
_DEFAULT = "`attention_backend=auto`"
_PYTORCH_KERNELS = [
    name
    for name, row in DENSE_KERNELS.items()
    if row.xfuser_member is None and {*row.factories} != {"npu"}
]


def _list_small_ops(device_type: str) -> list[str]:
    return [name for name, row in SMALL_OPS.items() if device_type in row.factories]


@partial(Reader, metavar="MHZ[,MHZ]")
def read_clocks(name: str, raw: Any) -> tuple[int, int]:
    """Reads the clock during self-attention and the one after it, 1650 by default."""
    parts = split_list(raw)
    parts = parts if isinstance(parts, list | tuple) else [parts]
    if not 1 <= len(parts) <= 2:
        raise InputError(name, format_value(raw), "must be one clock, or two: during and after")
    cap, restore = (int(integer(100, 4000)(name, part)) for part in (*parts, 1650)[:2])
    if cap > restore:
        why = f"is above the {restore} MHz that are restored afterwards"
        raise InputError(name, cap, why, f"lower it, or give both: {cap},{cap}")
    return cap, restore


@dataclass(frozen=True)
class Attention:
    """Settings of the attention kernel and of the operations around it."""

    attention_backend: str = load_option(
        _AUTO,
        choice(_AUTO, *DENSE_KERNELS),
        f"dense attention kernel (default {_AUTO}: {DEFAULT_KERNEL}, on GPUs PyTorch chooses); of "
        f"NPUs: fused, laser; of PyTorch: {', '.join(_PYTORCH_KERNELS)}; other names are xfuser's",
        diffusers=True,
        variables={"ALGO": {"0": "fused", "1": "laser"}},
    )
    fa_quant: str = load_option(
        "none",
        choice("fp8", "none"),
        "fp8: compute attention in FP8 (default none: in the dtype of --precision)",
        diffusers=True,
        variables={"ALGO": {"3": "fp8"}},
    )
    quant_alltoall: bool = layout_option(
        False,
        switch,
        "quantize q, k and v to FP8 before the all-to-all: half the bytes (default false)",
        diffusers=True,
        variables={"QUANT_ALLTOALL": {"0": False, "1": True}},
    )
    use_rainfusion: bool = load_option(
        False,
        switch,
        "block-sparse attention (RainFusion) from --sparse_start_step on (default false)",
        diffusers=True,
    )
    sparsity: float = load_option(
        0.64,
        real(0, 1, exclude_max=True),
        "share of key blocks that RainFusion skips, 0 to below 1 (default 0.64)",
        needs="use_rainfusion",
        diffusers=True,
    )
    sparse_start_step: int | None = load_option(
        None,
        integer(0, TRAIN_TIMESTEPS),
        "first step with RainFusion, counted from 0 (default: a quarter of the steps, rounded up)",
        needs="use_rainfusion",
        diffusers=True,
    )
    rainfusion_type: str = load_option(
        "v2",
        choice(*RAINFUSION),
        "RainFusion kernel (default v2); v3 also works with --fa_quant fp8; v1 is not supported",
        needs="use_rainfusion",
        diffusers=True,
    )
    mask_refresh_interval: int = load_option(
        1,
        integer(1, TRAIN_TIMESTEPS),
        "steps for which a RainFusion mask is reused (default 1: a new mask in each step)",
        needs="use_rainfusion",
        diffusers=True,
    )
    fused_ops: tuple[str, ...] = load_option(
        ("auto",),
        subset_of(*SMALL_OPS),
        "small operations to run as fused kernels: auto (default: all that the device has), none, "
        f"or a list; CPUs and GPUs: {','.join(_list_small_ops('cpu'))}; "
        f"NPUs: {','.join(_list_small_ops('npu'))}",
        variables={
            "ROPE_OPT": {"0": None, "1": ("rope",)},
            "FAST_LAYERNORM": {"0": None, "1": ("layer_norm",)},
        },
    )
    fa_freq_cap: tuple[int, int] | None = layout_option(
        None,
        read_clocks,
        "NPU clock during self-attention, and after it if it is not 1650 MHz (default: unchanged)",
        diffusers=True,
    )

    @property
    def dense_kernel(self) -> DenseKernelRow:
        """Row of the dense kernel that the flags select."""
        backend = self.attention_backend
        return DENSE_KERNELS[DEFAULT_KERNEL if backend == _AUTO else backend]

    @property
    def required_packages(self) -> tuple[str, ...]:
        """Packages that the dense kernel needs in addition to PyTorch, by their PyPI names."""
        if self.dense_kernel.xfuser_member is None:
            return ()
        return ("xfuser", *self.dense_kernel.install)

    @property
    def fp8(self) -> bool:
        """Whether attention is computed in FP8."""
        return self.fa_quant == "fp8"

    def resolve_sparse_start_step(self, steps: int) -> int:
        """Returns the first sparse step, counted from 0, of a video with `steps` steps."""
        return -(-steps // 4) if self.sparse_start_step is None else self.sparse_start_step

    def row_multiple(self, ring_size: int) -> int:
        """Returns the number of tokens to a multiple of which each rank's shard is padded.

        Quantization blocks and mask blocks must not cross a shard's border. Without a ring, a rank
        attends with the rows of all ranks at once, so that only tensors that are quantized before
        the exchange need padding.
        """
        if self.quant_alltoall:
            return KV_ROWS
        return Q_ROWS if ring_size > 1 and (self.fp8 or self.use_rainfusion) else 1


def check_attention(attention: Attention, execution: Execution) -> None:
    """Raises InputError for attention settings that contradict each other."""
    sparse, kind = attention.use_rainfusion, RAINFUSION[attention.rainfusion_type]
    if sparse and kind.unsupported_reason:
        supported_types = join_with_or([row.name for row in RAINFUSION.values() if row.factories])
        why = f"is not supported: {kind.unsupported_reason}"
        raise InputError("`rainfusion_type`", kind.name, why, f"use {supported_types}")
    if attention.quant_alltoall:
        if not attention.fp8:
            why, remedy = "exchanges FP8 tensors", "add `fa_quant=fp8`"
            raise InputError("`quant_alltoall`", None, why, remedy)
        if sparse:
            why = "quantizes before the exchange, but `use_rainfusion` computes its masks from "
            why += "unquantized tensors"
            raise InputError("`quant_alltoall`", None, why, "drop one of them")
    if attention.fp8 and sparse and not kind.has_fp8:
        fp8_types = [f"`rainfusion_type={row.name}`" for row in RAINFUSION.values() if row.has_fp8]
        why = "has no FP8 kernel for `fa_quant=fp8`"
        raise InputError("`rainfusion_type`", kind.name, why, f"use {join_with_or(fp8_types)}")
    _check_dense_kernel(attention, execution)
    uncompiled_settings = {
        attention.dense_kernel.setting: attention.dense_kernel.xfuser_member is not None,
        "`fa_quant=fp8`": attention.fp8,
        "`use_rainfusion`": sparse,
        "`fa_freq_cap`": attention.fa_freq_cap is not None,
        "a list of `fused_ops`": not set(attention.fused_ops) <= {_AUTO},
    }
    for setting, is_used in uncompiled_settings.items():
        if execution.compile and is_used:
            raise InputError("`compile`", None, f"does not work with {setting}", "drop one of them")


def _check_dense_kernel(attention: Attention, execution: Execution) -> None:
    """Raises InputError where a dense kernel that is not the default contradicts other settings."""
    kernel = attention.dense_kernel
    why, remedy = "", "drop one of them"
    if kernel.name == DEFAULT_KERNEL:
        return
    if attention.fp8:
        reason = "quantizes by itself" if kernel.low_precision else "is another kernel"
        why = f"{reason} and excludes `fa_quant=fp8`"
    elif attention.use_rainfusion and attention.sparse_start_step == 0:
        why = "computes the dense steps, and with `sparse_start_step=0` there are none"
    elif execution.precision not in (_AUTO, *kernel.precisions):
        why = f"does not support `precision={execution.precision}`"
        remedy = f"use {join_with_or(kernel.precisions)}, or {_DEFAULT}"
    if why:
        raise InputError(kernel.setting, None, why, remedy)


def check_attention_layout(attention: Attention, parallel: Parallel, head_dim: int) -> None:
    """Raises InputError for settings that the rank topology or the head size does not support."""
    if attention.quant_alltoall and parallel.ulysses_size == 1:
        why = "makes all-to-all exchanges smaller, and there are none with `ulysses_size=1`"
        raise InputError("`quant_alltoall`", None, why, "use a larger one or drop the flag")
    if attention.fp8 and head_dim & (head_dim - 1):
        why = (
            "rotates each head by a Hadamard matrix, whose size is a power of two, but the heads "
            f"of this network have {head_dim} channels"
        )
        raise InputError("`fa_quant=fp8`", None, why, "drop it")
    max_head_dim = attention.dense_kernel.max_head_dim
    if max_head_dim is not None and head_dim > max_head_dim:
        why = f"supports heads of at most {max_head_dim} channels, not {head_dim}"
        raise InputError(
            attention.dense_kernel.setting,
            None,
            why,
            f"use {_DEFAULT}",
        )


def check_attention_request(
    attention: Attention, parallel: Parallel, steps: int, tokens: int
) -> None:
    """Raises InputError for settings without effect or kernel at a video's steps and tokens."""
    start, refresh = attention.resolve_sparse_start_step(steps), attention.mask_refresh_interval
    if attention.use_rainfusion and start >= steps:
        why = (
            f"would begin at step {start}, but there are {steps} (from `sample_steps`), so it has "
            "no effect"
        )
        raise InputError(
            "`use_rainfusion`", None, why, "lower `sparse_start_step`, or give more steps"
        )
    if attention.use_rainfusion and refresh > 1 and start == steps - 1:
        why = f"has no effect, as only the last of {steps} steps is sparse"
        remedy = "give 1, a lower `sparse_start_step`, or more `sample_steps`"
        raise InputError("`mask_refresh_interval`", refresh, why, remedy)
    kernel, ring_size = attention.dense_kernel, parallel.ring_size
    plan = TokenPlan(tokens, parallel.sequence_size, attention.row_multiple(ring_size))
    num_rows = plan.shard_len * parallel.ulysses_size  # query rows of a rank after the exchange
    # Query rows of the last rank that has tokens.
    last_rank_rows = tokens - (-(-tokens // num_rows) - 1) * num_rows
    smallest_block = max(last_rank_rows // parallel.mode.blocks, 1)
    if smallest_block < kernel.min_rows:
        why = (
            f"needs {kernel.min_rows} rows of queries and keys in each call, but a rank with "
            f"`ring_size={ring_size}` and `comm_type={parallel.comm_type}` has a call of "
            f"{smallest_block} x {tokens}"
        )
        raise InputError(kernel.setting, None, why, f"use {_DEFAULT}")
