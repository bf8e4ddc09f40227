"""The table of devices: which one it is, and what is refused on it and why."""

from __future__ import annotations

import pytest

from wan.settings import devices
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.kernels import DENSE, RAINFUSION, SMALL_OPS
from wan.settings.kernels import FP8 as KERNEL

BF16, FP32 = Execution(precision="bf16"), Execution(precision="fp32")
ALL = {"CPU", "CUDA GPU", "A2", "A3", "A5"}
NPUS = {"A2", "A3", "A5"}


# From mindiesd's own device table; 260 alone is an A5.
@pytest.mark.parametrize(
    ("soc", "name"),
    [(200, "Duo"), (205, "Duo"), (220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (260, "A5")],
)
def test_npu_of_a_soc_version(soc: int, name: str) -> None:
    assert devices.of_type("npu", soc) is devices.DEVICES[name]


@pytest.mark.parametrize("soc", [0, 199, 206, 219, 226, 249, 256, 259, 261])
def test_unknown_soc_versions(soc: int) -> None:
    with pytest.raises(InputError, match=rf"{soc} is unknown to mindiesd .*A2 \(220, 225\)"):
        devices.of_type("npu", soc)


def test_what_a_device_flag_may_mean() -> None:
    names = [row.name for row in devices.candidates("npu")]
    assert names == list(devices.CHIPS) == ["A2", "A3", "A5", "Duo"]
    assert [row.name for row in devices.candidates("cpu")] == ["CPU"]
    assert {row.name for row in devices.candidates("auto")} == {*devices.DEVICES}
    assert [row.name for row in devices.candidates("npu", "A5")] == ["A5"]


def rain(kind: str, fa_quant: str = "none") -> Attention:
    return Attention(use_rainfusion=True, rainfusion_type=kind, fa_quant=fa_quant)


def refusal(
    row: devices.Capabilities,
    attention: Attention,
    execution: Execution = BF16,
    head_dim: int = 128,
    weights: tuple[str, ...] = (),
) -> str | None:
    try:
        devices.check((row,), attention, execution, head_dim, weights)
    except InputError as error:
        return str(error)
    return None


PLAIN, LASER = Attention(), Attention(attention_algo="laser")
FP8 = Attention(fa_quant="fp8")
NPU_KERNELS = "this device is {row}; use attention_backend=auto (attention_algo names an NPU's own"
# What is asked for -> the devices that take it; every other device refuses with these words.
TAKEN = {
    "plain": (PLAIN, ALL, ""),
    "laser": (LASER, {"A2", "A3"}, "attention_algo=laser needs an A2 or A3; this device is {row}"),
    "fp8": (FP8, ALL - {"A2", "A3"}, "fa_quant=fp8 needs a CPU, CUDA GPU or A5; this device is"),
    "v2": (rain("v2"), ALL - {"A5"}, "{row}; use rainfusion_type=v3"),
    "v3": (rain("v3"), ALL, ""),
    "fp8 v3": (rain("v3", "fp8"), ALL - {"A2", "A3"}, "fa_quant=fp8 needs"),
    "fused": (Attention(fused_ops=("rms_norm",)), NPUS, "needs an A2, A3 or A5; this device is"),
    "rope": (Attention(fused_ops=("rope",)), {"A2", "A3"}, "{row}; leave rope out"),
    "sdpa": (Attention(attention_backend="sdpa"), ALL, ""),
    "cudnn": (Attention(attention_backend="cudnn"), {"CUDA GPU"}, NPU_KERNELS),
    "flash_3": (Attention(attention_backend="flash_3"), {"CUDA GPU"}, NPU_KERNELS),
    "sdpa_math": (Attention(attention_backend="sdpa_math"), {"CPU", "CUDA GPU"}, NPU_KERNELS),
    "clock": (Attention(fa_freq_cap=1400), NPUS, "needs an A2, A3 or A5; this device is {row}"),
}


@pytest.mark.parametrize("name", devices.DEVICES)
@pytest.mark.parametrize("asked", TAKEN)
def test_what_each_device_takes(name: str, asked: str) -> None:
    attention, takers, words = TAKEN[asked]
    said = refusal(devices.DEVICES[name], attention)
    assert (said is None) == (name in takers), said
    if said is not None:
        article = "an" if name[0] == "A" else "a"
        if name == "Duo":
            words = "computes in float16 only, which is not supported; use a CPU, CUDA GPU, A2, A3"
        assert words.format(row=f"{article} {name}") in said
        assert said.endswith(".") and ". " not in said  # one sentence


def test_compile_is_refused_on_npus() -> None:
    for name, row in devices.DEVICES.items():
        said = refusal(row, PLAIN, Execution(precision="bf16", compile=True))
        assert (said is None) == (name in ("CPU", "CUDA GPU")), said


INTEGERS = ("W8A8_DYNAMIC", "W8A8", "W8A8_TIMESTEP", "W4A4_DYNAMIC", "W8A16", "W4A16")
MX = ("W8A8_MXFP8", "W4A4_MXFP4", "W4A4_MXFP4_DUALSCALE")


@pytest.mark.parametrize("name", devices.DEVICES)
@pytest.mark.parametrize("algorithm", [*INTEGERS, *MX])
def test_weights_that_each_device_takes(name: str, algorithm: str) -> None:
    takers = {"A5"} if algorithm in MX else NPUS
    takers = ALL if algorithm == "W8A8_DYNAMIC" else takers
    said = refusal(devices.DEVICES[name], PLAIN, weights=("W8A8_DYNAMIC", algorithm))
    assert (said is None) == (name in takers)
    if said is not None and name != "Duo":
        assert f"quant_dit_path with {algorithm} weights needs" in said
        assert said.endswith("use an export in W8A8_DYNAMIC.")


@pytest.mark.parametrize(
    ("name", "attention", "head_dim", "execution", "words"),
    [
        ("A5", FP8, 96, BF16, "with heads of 96 channels"),
        ("A5", FP8, 128, FP32, "use precision=bf16"),
        ("A3", rain("v2"), 128, FP32, "use precision=bf16"),
        ("Duo", PLAIN, 128, FP32, "computes in float16 only"),
        (
            "CUDA GPU",
            Attention(attention_backend="flash"),
            128,
            FP32,
            "attention_backend=flash takes no fp32, which a run on a CUDA GPU would compute in",
        ),
    ],
)
def test_dtypes_and_heads(
    name: str, attention: Attention, head_dim: int, execution: Execution, words: str
) -> None:
    assert words in (refusal(devices.DEVICES[name], attention, execution, head_dim) or "")


def test_float32_where_the_kernels_take_it() -> None:
    for name in ALL:
        assert refusal(devices.DEVICES[name], PLAIN, FP32, 96) is None
    for name in ("CPU", "CUDA GPU"):
        assert refusal(devices.DEVICES[name], rain("v3", "fp8"), FP32, 64) is None


def test_refused_only_where_every_device_that_may_be_meant_refuses() -> None:
    devices.check(devices.candidates("npu"), LASER, BF16, 128)
    with pytest.raises(InputError, match="needs an A2 or A3; this device is an A5"):
        devices.check(devices.candidates("npu", "A5"), LASER, BF16, 128)
    with pytest.raises(InputError, match="needs an A2 or A3; this device is a CPU"):
        devices.check(devices.candidates("cpu"), Attention(fused_ops=("rope",)), BF16, 128)


def test_kernels_name_npus_of_the_table() -> None:
    for row in (*DENSE.values(), *RAINFUSION.values(), *SMALL_OPS.values(), KERNEL):
        assert set(row.chips) <= set(devices.CHIPS)
        assert set(row.make) <= {one.type for one in devices.DEVICES.values()}
