"""How self-attention is computed: kernel, quantisation, sparsity, clock; and what contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from wan.modules.schedule import TokenPlan
from wan.settings.backends import BACKENDS, Backend
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.fields import layout, loading
from wan.settings.numerics import KV_ROWS, LASER_HEAD, LASER_ROWS, Q_ROWS
from wan.settings.parallel import Parallel
from wan.settings.presets import TRAIN_TIMESTEPS
from wan.settings.values import choice, either, integer, real, some_of, switch

RAINFUSION_TYPES = ("v1", "v2", "v3")
VENDOR_OPS = ("rope", "rms_norm", "layer_norm", "scale_shift")  # of NPUs
COMPILED_OPS = ("modulated_norm", "norm_rope", "add_norm", "gelu")  # of CPUs and GPUs
FUSED_OPS = (*VENDOR_OPS, *COMPILED_OPS)
_MHZ = integer(100, 4000)


@dataclass(frozen=True)
class Algorithm:
    """A dense attention kernel that can be asked for by name.

    Attributes:
        devices: Names of `wan.settings.devices.DEVICES` that have it.
        has_lse: Whether it returns the log-sum-exp; without it a ring gathers keys and values.
        precisions: What it can compute with.
        min_rows: Fewest queries and keys of a call.
        max_head: Most channels of a head.
    """

    name: str
    devices: tuple[str, ...]
    has_lse: bool = True
    precisions: tuple[str, ...] = ("bf16", "fp32")
    min_rows: int = 1
    max_head: int | None = None


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("fused", ("CPU", "CUDA GPU", "A2", "A3", "A5")),
        # With fewer rows, or on other NPUs, mindiesd silently takes its other kernel.
        Algorithm("laser", ("A2", "A3"), False, ("bf16",), LASER_ROWS, LASER_HEAD),
    )
}


@dataclass(frozen=True)
class Attention:
    """What an attention layer does with one chunk of heads.

    Attributes:
        attention_algo: A key of ALGORITHMS: the dense kernel, of NPUs.
        attention_backend: A key of BACKENDS: the dense kernel, of CPUs and GPUs.
        fa_quant: "none" or "fp8".
        quant_alltoall: FP8 tensors are exchanged.
        use_rainfusion: Block-sparse attention (MindIE-SD's RainFusion) after the first steps.
        rainfusion_type: One of RAINFUSION_TYPES.
        sparsity: Share of each row's blocks that is left out, 0 <= sparsity < 1.
        sparse_start_step: First sparse step; None: a quarter of the steps, see `start_step`.
        mask_refresh_interval: Steps that a mask is used for.
        fused_ops: Which of FUSED_OPS run as one kernel each; ("auto",): all of the device's.
        fa_freq_cap: Clock in MHz around self-attention; None: not touched.
        fa_freq_restore: Clock in MHz after it.
    """

    attention_algo: str = loading(
        "fused",
        choice(*ALGORITHMS),
        "dense kernel of NPUs (default fused)",
        diffusers="attention_algo",
        variables={"ALGO": {"0": "fused", "1": "laser"}},
    )
    attention_backend: str = loading(
        "auto",
        choice(*BACKENDS),
        "dense kernel of GPUs: PyTorch's (default auto, sdpa, cudnn) or one of xfuser's",
        diffusers="attention_backend",
    )
    fa_quant: str = loading(
        "none",
        choice("fp8", "none"),
        "fp8: attention in FP8 (default none)",
        diffusers="fa_quant",
        variables={"ALGO": {"3": "fp8"}},
    )
    quant_alltoall: bool = layout(
        False,
        switch,
        "exchange FP8 tensors",
        diffusers="quant_alltoall",
        variables={"QUANT_ALLTOALL": {"0": False, "1": True}},
    )
    use_rainfusion: bool = loading(
        False,
        switch,
        "block-sparse attention after the first steps",
        diffusers="use_rainfusion",
    )
    sparsity: float = loading(
        0.64,
        real(0, 1, below=True),
        "share of blocks left out (0.64)",
        needs="use_rainfusion",
        diffusers="sparsity",
    )
    sparse_start_step: int | None = loading(
        None,
        integer(0, TRAIN_TIMESTEPS),
        "first sparse step, from 0; default: a quarter of the steps",
        needs="use_rainfusion",
        diffusers="sparse_start_step",
    )
    rainfusion_type: str = loading(
        "v2",
        choice(*RAINFUSION_TYPES),
        "default v2",
        needs="use_rainfusion",
        diffusers="rainfusion_type",
    )
    mask_refresh_interval: int = loading(
        1,
        integer(1, TRAIN_TIMESTEPS),
        "steps that a mask is used for (1)",
        needs="use_rainfusion",
        diffusers="mask_refresh_interval",
    )
    fused_ops: tuple[str, ...] = loading(
        ("auto",),
        some_of(*FUSED_OPS),
        f"auto (default), none, or of CPUs and GPUs {','.join(COMPILED_OPS)}, of NPUs "
        f"{','.join(VENDOR_OPS)}",
        variables={
            "ROPE_OPT": {"0": None, "1": ("rope",)},
            "FAST_LAYERNORM": {"0": None, "1": ("layer_norm",)},
        },
    )
    fa_freq_cap: int | None = layout(
        None,
        _MHZ,
        "clock of an NPU during self-attention, MHz",
        diffusers="fa_freq_cap",
    )
    fa_freq_restore: int = layout(
        1650,
        _MHZ,
        "clock after it, MHz (1650)",
        needs="fa_freq_cap",
        diffusers="fa_freq_restore",
    )

    @property
    def algorithm(self) -> Algorithm:
        """The dense kernel that was asked for."""
        return ALGORITHMS[self.attention_algo]

    @property
    def backend(self) -> Backend:
        """The backend that was asked for."""
        return BACKENDS[self.attention_backend]

    @property
    def packages(self) -> tuple[str, ...]:
        """What computes dense attention beside PyTorch, by names in registries."""
        return () if self.backend.member is None else ("xfuser", *self.backend.install)

    @property
    def fp8(self) -> bool:
        """Whether attention is computed in FP8."""
        return self.fa_quant == "fp8"

    def start_step(self, steps: int) -> int:
        """The first sparse step, from 0, of this many sampling steps."""
        return -(-steps // 4) if self.sparse_start_step is None else self.sparse_start_step

    def row_multiple(self, ring_size: int) -> int:
        """A rank's tokens are padded to a multiple of this.

        So that blocks end where the rows do that a rank attends from: without a ring all of them,
        unless tensors are quantised before they are exchanged.
        """
        if self.quant_alltoall:
            return KV_ROWS
        return Q_ROWS if ring_size > 1 and (self.fp8 or self.use_rainfusion) else 1


def check(attention: Attention, execution: Execution) -> None:
    """InputError for flags that contradict each other."""
    _refuse(
        _about_kernels(attention),
        _about_backend(attention, execution),
        _about_execution(attention, execution),
    )


def check_layout(attention: Attention, parallel: Parallel, head_dim: int) -> None:
    """InputError for what does not go with the ranks' layout or the network's heads."""
    _refuse(_about_layout(attention, parallel, head_dim))


def check_request(attention: Attention, parallel: Parallel, steps: int, tokens: int) -> None:
    """InputError for what has no effect, or no kernel, with a request's steps and tokens."""
    _refuse(_about_steps(attention, steps), _about_rows(attention, parallel, tokens))


def _refuse(*objections: Iterator[str]) -> None:
    for objection in chain(*objections):
        raise InputError(objection)


def _about_kernels(attention: Attention) -> Iterator[str]:
    dense = None if attention.attention_algo == "fused" else attention.attention_algo
    rainfusion = attention.rainfusion_type if attention.use_rainfusion else None
    if rainfusion == "v1":
        yield (
            "--rainfusion_type v1 is not supported: on NPUs it needs torch_atb, which mindiesd has "
            "given up; use v2 or v3."
        )
    if attention.quant_alltoall and not attention.fp8:
        yield "--quant_alltoall (or QUANT_ALLTOALL=1) exchanges FP8 tensors; add --fa_quant fp8."
    if attention.quant_alltoall and rainfusion:
        yield (
            "--quant_alltoall (or QUANT_ALLTOALL=1) quantises before the exchange, but "
            "--use_rainfusion plans its masks on unquantised tensors; drop one of them."
        )
    if attention.fp8 and rainfusion == "v2":
        yield "--rainfusion_type v2 has no FP8 kernel for --fa_quant fp8; use --rainfusion_type v3."
    if attention.fp8 and dense:
        yield (
            f"--attention_algo {dense} (or ALGO) and --fa_quant fp8 (or ALGO=3) are different "
            "kernels; choose one."
        )
    if rainfusion and attention.sparse_start_step == 0 and dense:
        yield (
            f"--attention_algo {dense} (or ALGO) is the kernel of dense steps, and with "
            "--sparse_start_step 0 there are none; drop one of them."
        )
    if attention.fa_freq_cap is not None and attention.fa_freq_cap > attention.fa_freq_restore:
        yield (
            f"--fa_freq_cap {attention.fa_freq_cap} lies above the {attention.fa_freq_restore} MHz "
            "that are restored afterwards; lower it or give a higher --fa_freq_restore."
        )


def _about_backend(attention: Attention, execution: Execution) -> Iterator[str]:
    backend = attention.backend
    if backend.name == "auto":
        return
    flag = f"--attention_backend {backend.name}"
    if attention.attention_algo != "fused":
        yield (
            f"{flag} and --attention_algo {attention.attention_algo} (or ALGO) both name the dense "
            "kernel; drop one of them."
        )
    if attention.fp8:
        why = "quantises by itself" if backend.low_precision else "is another kernel"
        yield f"{flag} {why} and excludes --fa_quant fp8 (or ALGO=3); drop one of them."
    if attention.use_rainfusion and attention.sparse_start_step == 0:
        yield (
            f"{flag} is the kernel of dense steps, and with --sparse_start_step 0 there are none; "
            "drop one of them."
        )
    if execution.precision not in ("auto", *backend.precisions):
        yield (
            f"{flag} takes no --precision {execution.precision}; use {either(backend.precisions)}, "
            "or --attention_backend auto."
        )
    if execution.compile and backend.member is not None:
        yield f"--compile does not work with {flag}, which is xfuser's; drop one of them."


def _about_execution(attention: Attention, execution: Execution) -> Iterator[str]:
    if execution.precision not in ("auto", *attention.algorithm.precisions):
        yield (
            f"--attention_algo {attention.attention_algo} (or ALGO) takes no --precision "
            f"{execution.precision}; use {either(attention.algorithm.precisions)}, or "
            "--attention_algo fused."
        )
    if execution.compile:
        for flag, asked in (
            ("--fa_quant fp8", attention.fp8),
            ("--use_rainfusion", attention.use_rainfusion),
            ("--fa_freq_cap", attention.fa_freq_cap is not None),
            ("--fused_ops LIST", not set(attention.fused_ops) <= {"auto"}),
        ):
            if asked:
                yield f"--compile does not work with {flag}; drop one of them."


def _about_layout(attention: Attention, parallel: Parallel, head_dim: int) -> Iterator[str]:
    if attention.quant_alltoall and parallel.ulysses_size == 1:
        yield (
            "--quant_alltoall (or QUANT_ALLTOALL=1) makes all-to-all exchanges smaller, and there "
            "are none with --ulysses_size 1; use a larger one or drop the flag."
        )
    if attention.fp8 and head_dim & (head_dim - 1):
        yield (
            "--fa_quant fp8 (or ALGO=3) rotates each head by a Hadamard matrix, whose size is a "
            f"power of two; here a head has {head_dim} channels: drop the flag."
        )
    most = attention.algorithm.max_head
    if most is not None and head_dim > most:
        yield (
            f"--attention_algo {attention.attention_algo} (or ALGO) takes heads of at most {most} "
            f"channels, not {head_dim}: use --attention_algo fused."
        )


def _about_steps(attention: Attention, steps: int) -> Iterator[str]:
    if not attention.use_rainfusion:
        return
    start, refresh = attention.start_step(steps), attention.mask_refresh_interval
    if start >= steps:
        yield (
            f"--use_rainfusion would begin at step {start}, but there are {steps} "
            "(--sample_steps), so it has no effect; lower --sparse_start_step."
        )
    if refresh > 1 and start == steps - 1:
        yield (
            f"--mask_refresh_interval {refresh} has no effect, as only the last of {steps} steps "
            "is sparse; give 1, or a lower --sparse_start_step."
        )


def _about_rows(attention: Attention, parallel: Parallel, tokens: int) -> Iterator[str]:
    least, rows = attention.algorithm.min_rows, _fewest_queries(attention, parallel, tokens)
    if rows < least:
        yield (
            f"--attention_algo {attention.attention_algo} (or ALGO) needs {least} rows of queries "
            f"and keys in each call; a rank with --ring_size {parallel.ring_size} and --comm_type "
            f"{parallel.comm_type} has one of {rows} x {tokens}: use --attention_algo fused."
        )


def _fewest_queries(attention: Attention, parallel: Parallel, tokens: int) -> int:
    """Rows of the smallest dense attention call of a run."""
    plan = TokenPlan(tokens, parallel.sequence_size, attention.row_multiple(parallel.ring_size))
    rows = plan.shard_len * parallel.ulysses_size  # after the exchange
    last = tokens - (-(-tokens // rows) - 1) * rows  # of the last rank that has any
    return max(last // parallel.mode.blocks, 1)
