"""What each kind of device can do: one table. A run that asks for more is refused by name.

Sources for NPUs: mindiesd 3.1.0 (its device table, its operators' own checks, the kernel manifests
and strings of its binaries), the operator reference of torch-npu, and the vendor's data sheets for
memory. Facts about kernels that CANN itself brings (block-sparse attention, rotary) are these two
packages' word; none was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from wan.settings.attention import COMPILED_OPS, VENDOR_OPS, Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.values import either


@dataclass(frozen=True)
class Capabilities:
    """One kind of device; of NPUs, one generation of chips.

    Which devices have a dense attention kernel stands in `wan.settings.attention.ALGORITHMS` and
    in `wan.settings.backends`.

    Attributes:
        type: torch's device type.
        socs: Values of `torch_npu.npu.get_soc_version()`, both ends included.
        memory: Bytes of one device, where all have the same.
        precisions: Values of --precision it computes in. A Duo knows float16 only, which no run
            uses: it is in the table to be refused by name.
        methods_in: What q, k, v must be for FP8 and block-sparse attention and quantised weights.
        fp8_heads: Head sizes of FP8 attention; None: any power of two; empty: no FP8 attention.
        rainfusion: Values of --rainfusion_type that run as asked; on A5 mindiesd turns v2 into v3.
        sparse_precise: `inner_precise` of block-sparse attention; A5 takes 4 only.
        fused_ops: Values of --fused_ops, all of which "auto" stands for.
        clock: Whether --fa_freq_cap can set it.
        compile: Whether --compile works.
        weights: Quantised linear layers: names of algorithms, or families (`_family`). The
            operators of MX formats exist on A5 only.
    """

    name: str
    type: str
    socs: tuple[int, int] | None = None
    memory: int | None = None
    precisions: tuple[str, ...] = ("bf16", "fp32")
    methods_in: tuple[str, ...] = ("bf16", "fp32")
    fp8_heads: tuple[int, ...] | None = None
    rainfusion: tuple[str, ...] = ("v2", "v3")
    sparse_precise: int = 0
    fused_ops: tuple[str, ...] = COMPILED_OPS
    clock: bool = False
    compile: bool = True
    weights: tuple[str, ...] = ("W8A8_DYNAMIC",)

    def fused(self, attention: Attention, compiled: bool) -> tuple[str, ...]:
        """Which small operations run as one kernel each; compiled blocks are fused anyway."""
        if attention.fused_ops != ("auto",):
            return attention.fused_ops
        return () if compiled else self.fused_ops


def _npu(name: str, socs: tuple[int, int], **differences: object) -> Capabilities:
    usual: dict[str, object] = {
        "methods_in": ("bf16",),
        "fp8_heads": (),
        "fused_ops": VENDOR_OPS,
        "clock": True,
        "compile": False,
        "weights": ("integer",),
    }
    return Capabilities(name, "npu", socs, **usual | differences)  # type: ignore[arg-type]


DEVICES = {
    device.name: device
    for device in (
        Capabilities("CPU", "cpu"),
        Capabilities("CUDA GPU", "cuda"),
        _npu("A2", (220, 225), memory=64 * 10**9),
        _npu("A3", (250, 255), memory=64 * 10**9),
        _npu(
            "A5",
            (260, 260),
            fp8_heads=(64, 128),
            rainfusion=("v3",),
            sparse_precise=4,
            # The rotation of neighbouring channels is documented for A2 and A3 only.
            fused_ops=tuple(name for name in VENDOR_OPS if name != "rope"),
            weights=("integer", "MX"),
        ),
        _npu("Duo", (200, 205), precisions=(), rainfusion=(), fused_ops=(), weights=()),
    )
}
CHIPS = tuple(name for name, device in DEVICES.items() if device.type == "npu")
"""NPU models that --chip names."""


def of_type(device: str, soc: int | None = None) -> Capabilities:
    """The row of a torch device type ("cpu", "cuda", "npu").

    Args:
        device: The type.
        soc: `get_soc_version()` of an NPU; InputError for one that mindiesd does not know.
    """
    for row in DEVICES.values():
        if row.type == device and (soc is None or (row.socs and row.socs[0] <= soc <= row.socs[1])):
            return row
    known = ", ".join(f"{name} {DEVICES[name].socs}" for name in CHIPS)
    raise InputError(
        f"This NPU's SoC version {soc} is unknown to mindiesd (known: {known}); use --device cpu "
        "or one of these models."
    )


def candidates(device: str, chip: str | None = None) -> tuple[Capabilities, ...]:
    """The rows that --device (and --chip) may mean."""
    if chip is not None:
        return (DEVICES[chip],)
    return tuple(row for row in DEVICES.values() if device in ("auto", row.type))


def check(
    rows: tuple[Capabilities, ...],
    attention: Attention,
    execution: Execution,
    head_dim: int,
    weights: tuple[str, ...] = (),
) -> None:
    """InputError where none of the devices can run such a DiT; it says what to use instead.

    Of several devices, what the one that could do the most says.

    Args:
        rows: The devices that may be meant.
        attention: What the flags ask for.
        execution: What the flags ask for.
        head_dim: Channels of one head.
        weights: Algorithms of quantised linear layers.
    """
    found = [_refusal(row, attention, execution, head_dim, weights) for row in rows]
    refusals = [refusal for refusal in found if refusal is not None]
    if refusals and len(refusals) == len(rows):
        _, sentence = max(refusals, key=lambda refusal: refusal[0])
        raise InputError(sentence)


def _refusal(
    row: Capabilities,
    attention: Attention,
    execution: Execution,
    head_dim: int,
    weights: tuple[str, ...],
) -> tuple[int, str] | None:
    """How many wishes the device meets, and what is wrong with the next or the last one."""
    precision = execution.dit_precision_on(row.type)
    if precision not in row.precisions:
        return -1, (
            f"{_an(row.name)} computes in float16 only, which is not supported; use "
            f"{_an(either(_names(lambda row: precision in row.precisions)))}."
        )
    for met, wish in enumerate(_wishes(attention, execution, head_dim, weights)):
        if not wish.met(row):
            having = _names(wish.met)
            needs = f"needs {_an(either(having))}; this device is" if having else "does not work on"
            return met, f"{wish.flag} {needs} {_an(row.name)}: {wish.instead}."
        if precision not in wish.precisions:
            return met + 1, (
                f"{wish.flag} takes no {precision}, which a run on {_an(row.name)} would compute "
                f"in: use --precision {either(wish.precisions)}, or {wish.instead}."
            )
        if wish.method and precision not in row.methods_in:
            return met + 1, (
                f"{wish.flag} takes 16-bit tensors only on an NPU: use --precision bf16, or "
                f"{wish.instead}."
            )
    return None


@dataclass(frozen=True)
class _Wish:
    """Something a run asks of its device."""

    flag: str
    met: Callable[[Capabilities], bool]
    instead: str = "drop the flag"
    method: bool = False  # bound to `methods_in`
    precisions: tuple[str, ...] = ("bf16", "fp32")


def _wishes(
    attention: Attention, execution: Execution, head_dim: int, weights: tuple[str, ...]
) -> Iterator[_Wish]:
    yield from _dense_kernels(attention)
    if attention.fp8:
        yield _Wish("--fa_quant fp8", lambda row: row.fp8_heads != (), method=True)
        yield _Wish(
            f"--fa_quant fp8 with heads of {head_dim} channels",
            lambda row: row.fp8_heads is None or head_dim in row.fp8_heads,
        )
    if attention.use_rainfusion:
        kind, other = attention.rainfusion_type, "v3" if attention.rainfusion_type == "v2" else "v2"
        yield _Wish("--use_rainfusion", lambda row: bool(row.rainfusion), method=True)
        yield _Wish(
            f"--rainfusion_type {kind}",
            lambda row: kind in row.rainfusion,
            f"use --rainfusion_type {other}",
        )
    for name in sorted({*attention.fused_ops} - {"auto"}):
        yield _Wish(
            f"--fused_ops {name} (or FAST_LAYERNORM=1, ROPE_OPT=1)",
            partial(lambda name, row: name in row.fused_ops, name),
            f"leave {name} out",
        )
    if attention.fa_freq_cap is not None:
        yield _Wish("--fa_freq_cap", lambda row: row.clock)
    if execution.compile:
        yield _Wish("--compile", lambda row: row.compile)
    yield from _offloads(execution, bool(weights))
    for name in weights:
        yield _Wish(
            f"--quant_dit_path with {name} weights",
            lambda row, name=name: name in row.weights or _family(name) in row.weights,  # type: ignore[misc]
            "use an export in W8A8_DYNAMIC",
            method=True,
        )


def _offloads(execution: Execution, quantised: bool) -> Iterator[_Wish]:
    offload = execution.offload_model
    if offload == "cpu":
        yield _Wish(
            "--offload_model cpu",
            lambda row: row.type != "cpu",
            "use --offload_model false, which keeps all networks in its memory",
        )
    if quantised and not isinstance(offload, bool):
        yield _Wish(
            f"--offload_model {offload} with --quant_dit_path",
            lambda row: row.type != "npu",  # mindiesd lays its weights out in its own ways
            "use --offload_model true",
        )


def _dense_kernels(attention: Attention) -> Iterator[_Wish]:
    """Of NPUs, and of CPUs and GPUs; one of the two is the default."""
    algorithm = attention.algorithm
    yield _Wish(
        f"--attention_algo {algorithm.name} (or ALGO)",
        lambda row: row.name in algorithm.devices,
        "use --attention_algo fused",
    )
    backend = attention.backend
    yield _Wish(
        f"--attention_backend {backend.name}",
        lambda row: row.name in backend.devices,
        "use --attention_backend auto (an NPU's own kernels are named by --attention_algo)",
        precisions=backend.precisions,
    )


def _family(algorithm: str) -> str:
    """Of a linear layer's format: integers, or floating point with scales per small group (MX)."""
    return "MX" if "_MXFP" in algorithm else "integer"


def _names(met: Callable[[Capabilities], bool]) -> list[str]:
    return [name for name, row in DEVICES.items() if row.precisions and met(row)]


def _an(words: str) -> str:
    return f"{'an' if words[0] == 'A' else 'a'} {words}"
