"""How self-attention is computed: kernel, quantisation, sparsity, clock. Values only.

The attention that a run's flags ask for, and which of them do not go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.numerics import KV_ROWS, LASER_ROWS, Q_ROWS
from wan.settings.parallel import Parallel

ALGORITHMS = ("fused", "laser")
RAINFUSION_TYPES = ("v1", "v2", "v3")
FUSED_OPS = ("rope", "rms_norm", "layer_norm", "scale_shift")
RESTORE = 1650  # MHz


@dataclass(frozen=True)
class RainFusion:
    """Block-sparse attention (MindIE-SD's RainFusion) from sampling step `start_step` on.

    sparsity: share of each row's blocks that is left out, 0 <= sparsity < 1. refresh: a mask is
    used for that many steps.
    """

    type: str
    sparsity: float
    start_step: int
    refresh: int = 1


@dataclass(frozen=True)
class Attention:
    """What an attention layer does with q, k, v of one chunk. `attention_flags` makes checked ones.

    algorithm: which dense kernel of an NPU. fa_quant: None or "fp8". quant_alltoall: FP8 numbers
    travel in the exchanges. fused_ops: which small operations run as fused vendor kernels.
    freq_cap, freq_restore: clock in MHz around self-attention, and after it; None: not touched.
    """

    algorithm: str = "fused"
    fa_quant: str | None = None
    quant_alltoall: bool = False
    rainfusion: RainFusion | None = None
    fused_ops: tuple[str, ...] = ()
    freq_cap: int | None = None
    freq_restore: int = RESTORE

    @property
    def is_plain(self) -> bool:
        """Dense attention in the run's own number format, at every step."""
        return self.fa_quant is None and self.rainfusion is None

    def row_multiple(self, ring_size: int) -> int:
        """A rank's tokens are padded to a multiple of this.

        So that blocks end where the rows do that a rank attends from: without a ring all of them,
        unless numbers are quantised before they are exchanged.
        """
        if self.quant_alltoall:
            return KV_ROWS
        return Q_ROWS if ring_size > 1 and not self.is_plain else 1

    def record(self) -> dict[str, Any]:
        """Under their flags' names, what a repeat of the video needs beside the flags given.

        Also what is off, as a variable may ask for it. RainFusion's first step is not among it: if
        it was not given, it follows the repeat's own steps.
        """
        rain = self.rainfusion
        chosen = {
            "attention_algo": self.algorithm,
            "fa_quant": self.fa_quant or "none",
            "fused_ops": self.fused_ops,
        }
        if rain is None:
            return chosen
        return chosen | {
            "sparsity": rain.sparsity,
            "rainfusion_type": rain.type,
            "mask_refresh_interval": rain.refresh,
        }


def npu_flag(attention: Attention) -> str | None:
    """The first flag given of those that exist on NPUs only."""
    if attention.algorithm == "laser":
        return "--attention_algo laser (or ALGO=1)"
    if attention.fused_ops:
        return "--fused_ops (or FAST_LAYERNORM=1, ROPE_OPT=1)"
    return None if attention.freq_cap is None else "--fa_freq_cap"


_SPARSITY = 0.64


def resolve(
    values: Mapping[str, Any],
    execution: Execution,
    *,
    steps: int,
    tokens: int | None = None,
    parallel: Parallel | None = None,
    head_dim: int | None = None,
) -> Attention:
    """The attention that the given flags ask for.

    values: checked settings. tokens: of one forward pass. steps: of sampling; while no tokens are
    known those a request usually has, which decide RainFusion's default start and no more.
    head_dim: channels of a head. What is None is not known yet, and what depends on it is not
    checked. Raises InputError for flags that contradict each other or would have no effect.
    """
    quant = values.get("fa_quant", "none")
    attention = Attention(
        algorithm=values.get("attention_algo", "fused"),
        fa_quant=None if quant == "none" else quant,
        quant_alltoall=values.get("quant_alltoall", False),
        rainfusion=_rainfusion(values, steps),
        fused_ops=values.get("fused_ops", ()),
        freq_cap=values.get("fa_freq_cap"),
        freq_restore=values.get("fa_freq_restore", RESTORE),
    )
    objections = chain(
        _about_sparsity(values, attention),
        _about_numbers(attention, head_dim),
        _about_clock(values, attention),
        _about_execution(attention, execution),
        () if tokens is None else _about_request(attention, steps, tokens, parallel),
        () if parallel is None else _about_topology(attention, parallel),
    )
    for objection in objections:
        raise InputError(objection)
    return attention


def check_request(attention: Attention, steps: int, tokens: int, parallel: Parallel) -> None:
    """The same for the request of an attention that was resolved before there was one."""
    for objection in _about_request(attention, steps, tokens, parallel):
        raise InputError(objection)


def _rainfusion(values: Mapping[str, Any], steps: int) -> RainFusion | None:
    if not values.get("use_rainfusion", False):
        return None
    return RainFusion(
        type=values.get("rainfusion_type", "v2"),
        sparsity=values.get("sparsity", _SPARSITY),
        start_step=values.get("sparse_start_step", -(-steps // 4)),
        refresh=values.get("mask_refresh_interval", 1),
    )


def _about_sparsity(values: Mapping[str, Any], attention: Attention) -> Iterator[str]:
    rain = attention.rainfusion
    if rain is None:
        for flag in ("sparsity", "sparse_start_step", "rainfusion_type", "mask_refresh_interval"):
            if flag in values:
                yield f"--{flag} has no effect without --use_rainfusion; add it or drop --{flag}."
        return
    if rain.type == "v1":
        yield (
            "--rainfusion_type v1 is not available: it exists here as a reference mask only, and "
            "on NPUs it needs torch_atb; use v2 or v3."
        )
    if attention.algorithm == "laser" and rain.start_step == 0:
        yield (
            "--attention_algo laser (or ALGO=1) is the kernel of dense steps, and with "
            "--sparse_start_step 0 there is none; drop one of them."
        )


def _about_request(
    attention: Attention, steps: int, tokens: int, parallel: Parallel | None
) -> Iterator[str]:
    rain = attention.rainfusion
    if rain is not None and rain.start_step >= steps:
        yield (
            f"--use_rainfusion would begin at step {rain.start_step}, but there are {steps} "
            "(--sample_steps; in Python sampling_steps), so it has no effect; lower "
            "--sparse_start_step."
        )
    if rain is not None and rain.refresh > 1 and rain.start_step == steps - 1:
        yield (
            f"--mask_refresh_interval {rain.refresh} has no effect, as only the last of {steps} "
            "steps is sparse; give 1, or a lower --sparse_start_step."
        )
    if attention.algorithm == "laser" and parallel is not None:
        rows = _fewest_queries(attention, parallel, tokens)
        if rows < LASER_ROWS:
            yield (
                f"--attention_algo laser (or ALGO=1) needs {LASER_ROWS} rows of queries and keys "
                "in each call, else mindiesd silently takes its other kernel; a rank with "
                f"--ring_size {parallel.ring_size} and --comm_type {parallel.comm_type} has one "
                f"of {rows} x {tokens}: use --attention_algo fused."
            )


def _about_numbers(attention: Attention, head_dim: int | None) -> Iterator[str]:
    rain, fp8 = attention.rainfusion, attention.fa_quant
    if attention.quant_alltoall and fp8 is None:
        yield "--quant_alltoall (or QUANT_ALLTOALL=1) exchanges FP8 numbers; add --fa_quant fp8."
    if attention.quant_alltoall and rain is not None:
        yield (
            "--quant_alltoall (or QUANT_ALLTOALL=1) quantises before the exchange, but "
            "--use_rainfusion plans its masks on unquantised numbers; drop one of them."
        )
    if fp8 is None:
        return
    if rain is not None and rain.type == "v2":
        yield "--rainfusion_type v2 has no FP8 kernel for --fa_quant fp8; use --rainfusion_type v3."
    if attention.algorithm == "laser":
        yield (
            "--attention_algo laser (or ALGO=1) and --fa_quant fp8 (or ALGO=3) are different "
            "kernels; choose one."
        )
    if head_dim is not None and head_dim & (head_dim - 1):
        yield (
            "--fa_quant fp8 (or ALGO=3) rotates each head by a Hadamard matrix, whose size is a "
            f"power of two (64 or 128 on NPUs); here a head has {head_dim} channels: drop the flag."
        )


def _about_clock(values: Mapping[str, Any], attention: Attention) -> Iterator[str]:
    cap, restore = attention.freq_cap, attention.freq_restore
    if cap is None and "fa_freq_restore" in values:
        yield "--fa_freq_restore has no effect without --fa_freq_cap; add it or drop the flag."
    if cap is not None and cap > restore:
        yield (
            f"--fa_freq_cap {cap} lies above the {restore} MHz that are restored afterwards; lower "
            "it or give a higher --fa_freq_restore."
        )


def _about_execution(attention: Attention, execution: Execution) -> Iterator[str]:
    if attention.algorithm == "laser" and execution.precision == "fp32":
        yield (
            "--attention_algo laser (or ALGO=1) computes in float16 and takes no --precision fp32; "
            "use bf16, or --attention_algo fused."
        )
    flag = npu_flag(attention)
    if flag is not None and execution.device in ("cpu", "cuda"):
        yield f"{flag} exists on NPUs only; drop it, or drop --device {execution.device}."
    if execution.compile:
        for flag, asked in (
            ("--fa_quant fp8", attention.fa_quant is not None),
            ("--use_rainfusion", attention.rainfusion is not None),
            ("--fa_freq_cap", attention.freq_cap is not None),
        ):
            if asked:
                yield f"--compile does not work with {flag}; drop one of them."


def _about_topology(attention: Attention, parallel: Parallel) -> Iterator[str]:
    if attention.quant_alltoall and parallel.ulysses_size == 1:
        yield (
            "--quant_alltoall (or QUANT_ALLTOALL=1) makes all-to-all exchanges smaller, and there "
            "are none with --ulysses_size 1; use a larger one or drop the flag."
        )


def _fewest_queries(attention: Attention, parallel: Parallel, tokens: int) -> int:
    """Rows of the smallest dense attention call; its keys are all tokens (laser has no LSE)."""
    multiple = attention.row_multiple(parallel.ring_size)
    shard = -(-tokens // (parallel.sequence_size * multiple)) * multiple
    rows = shard * parallel.ulysses_size  # after the exchange
    last = tokens - (-(-tokens // rows) - 1) * rows  # of the last rank that has any
    return max(last // parallel.mode.blocks, 1)
