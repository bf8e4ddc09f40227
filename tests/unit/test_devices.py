"""The table of devices: which one is detected, and which settings each one refuses."""

from __future__ import annotations

import pytest

from tests.refusals import check_refusals, get_refusal
from wan.settings import devices
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.kernels import DENSE_KERNELS, RAINFUSION, SMALL_OPS
from wan.settings.kernels import FP8 as KERNEL

BF16, FP32 = Execution(precision="bf16"), Execution(precision="fp32")
ALL = {"CPU", "CUDA GPU", "A2", "A3", "A5"}
NPUS = {"A2", "A3", "A5"}


def test_npu_of_a_soc_version() -> None:
    """From mindiesd's own device table; 260 alone is an A5."""
    ends = {200: "Duo", 205: "Duo", 220: "A2", 225: "A2", 250: "A3", 255: "A3", 260: "A5"}
    assert {soc: devices.get_capabilities("npu", soc).name for soc in ends} == ends
    unknown_socs = (0, 199, 206, 219, 226, 249, 256, 259, 261)
    messages = {str(soc): get_refusal(devices.get_capabilities, "npu", soc) for soc in unknown_socs}
    assert all(messages.values())
    check_refusals("devices: SOC versions", {"261": messages["261"]})


def test_what_a_device_flag_may_mean() -> None:
    names = [row.name for row in devices.list_candidate_devices("npu")]
    assert names == list(devices.CHIPS) == ["A2", "A3", "A5", "Duo"]
    assert [row.name for row in devices.list_candidate_devices("cpu")] == ["CPU"]
    assert {row.name for row in devices.list_candidate_devices("auto")} == {*devices.DEVICES}
    assert [row.name for row in devices.list_candidate_devices("npu", "A5")] == ["A5"]


def rain(kind: str, fa_quant: str = "none") -> Attention:
    return Attention(use_rainfusion=True, rainfusion_type=kind, fa_quant=fa_quant)


def refusal(
    row: devices.Capabilities,
    attention: Attention,
    execution: Execution = BF16,
    head_dim: int = 128,
    weights: tuple[str, ...] = (),
) -> str:
    check = devices.check_device_support
    return get_refusal(check, (row,), attention, execution, head_dim, weights)


PLAIN, LASER = Attention(), Attention(attention_backend="laser")
FP8 = Attention(fa_quant="fp8")
# Requested feature -> the devices that support it.
DEVICES_BY_FEATURE = {
    "plain": (PLAIN, ALL),
    "laser": (LASER, {"A2", "A3"}),
    "fp8": (FP8, ALL - {"A2", "A3"}),
    "v2": (rain("v2"), ALL - {"A5"}),
    "v3": (rain("v3"), ALL),
    "fp8 v3": (rain("v3", "fp8"), ALL - {"A2", "A3"}),
    "fused": (Attention(fused_ops=("rms_norm",)), NPUS),
    "rope": (Attention(fused_ops=("rope",)), {"A2", "A3"}),
    "sdpa": (Attention(attention_backend="sdpa"), ALL),
    "cudnn": (Attention(attention_backend="cudnn"), {"CUDA GPU"}),
    "flash_3": (Attention(attention_backend="flash_3"), {"CUDA GPU"}),
    "sdpa_math": (Attention(attention_backend="sdpa_math"), {"CPU", "CUDA GPU"}),
    "clock": (Attention(fa_freq_cap=1400), NPUS),
}


def test_devices_that_support_each_feature() -> None:
    messages: dict[str, str] = {}
    for feature, (attention, takers) in DEVICES_BY_FEATURE.items():
        refusals = {name: refusal(row, attention) for name, row in devices.DEVICES.items()}
        assert {name for name, sentence in refusals.items() if not sentence} == takers, feature
        if feature != "plain":  # the Duo is refused with every feature
            del refusals["Duo"]
        messages |= {f"{feature} on {name}": text for name, text in refusals.items() if text}
    check_refusals("devices: attention", messages)


INTEGERS = ("W8A8", "W8A8_TIMESTEP", "W4A4_DYNAMIC", "W8A16", "W4A16")
MX = ("W8A8_MXFP8", "W4A4_MXFP4", "W4A4_MXFP4_DUALSCALE")


def test_weights_that_each_device_takes() -> None:
    takers = {"W8A8_DYNAMIC": ALL} | dict.fromkeys(INTEGERS, NPUS) | {name: {"A5"} for name in MX}
    messages = {}
    for algorithm in takers:
        weights = ("W8A8_DYNAMIC", algorithm)
        for name in sorted(ALL):
            sentence = refusal(devices.DEVICES[name], PLAIN, weights=weights)
            assert (not sentence) == (name in takers[algorithm]), (name, algorithm)
            if sentence and name in ("CPU", "A2"):
                messages[f"{algorithm} on {name}"] = sentence
    check_refusals("devices: weights", messages)


def test_compile_dtypes_and_heads() -> None:
    compiled = Execution(precision="bf16", compile=True)
    compile_messages = {name: refusal(x, PLAIN, compiled) for name, x in devices.DEVICES.items()}
    assert not compile_messages.pop("CPU") and not compile_messages.pop("CUDA GPU")
    check_refusals("devices: compile", compile_messages)
    flash, row = Attention(attention_backend="flash"), devices.DEVICES
    messages = {
        "heads of 96": refusal(row["A5"], FP8, BF16, 96),
        "fp8 of fp32": refusal(row["A5"], FP8, FP32),
        "v2 of fp32": refusal(row["A3"], rain("v2"), FP32),
        "Duo": refusal(row["Duo"], PLAIN, FP32),
        "flash of fp32": refusal(row["CUDA GPU"], flash, FP32),
    }
    check_refusals("devices: dtypes and heads", messages)
    accepted = [(name, PLAIN, 96) for name in ALL]
    accepted += [(name, rain("v3", "fp8"), 64) for name in ("CPU", "CUDA GPU")]
    assert not any(refusal(row[name], x, FP32, head) for name, x, head in accepted)


def test_refused_only_where_every_device_that_may_be_meant_refuses() -> None:
    devices.check_device_support(devices.list_candidate_devices("npu"), LASER, BF16, 128)
    with pytest.raises(InputError, match="this device is an A5"):
        devices.check_device_support(devices.list_candidate_devices("npu", "A5"), LASER, BF16, 128)


def test_kernels_name_npus_of_the_table() -> None:
    for row in (*DENSE_KERNELS.values(), *RAINFUSION.values(), *SMALL_OPS.values(), KERNEL):
        assert set(row.chips) <= set(devices.CHIPS)
        assert set(row.factories) <= {
            capabilities.type for capabilities in devices.DEVICES.values()
        }
