"""The table of Ascend chips: which one it is, and what is refused on it and why."""

from __future__ import annotations

import re

import pytest

from wan.settings import devices as chips
from wan.settings.attention import Attention, RainFusion
from wan.settings.errors import InputError


# From mindiesd's own device table; 260 alone is an A5.
@pytest.mark.parametrize(
    ("soc", "name"),
    [(200, "Duo"), (205, "Duo"), (220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (260, "A5")],
)
def test_chip_of_soc(soc: int, name: str) -> None:
    assert chips.of_soc(soc).name == name
    assert chips.by_name(name) is chips.of_soc(soc)


@pytest.mark.parametrize("soc", [0, 199, 206, 219, 226, 249, 256, 259, 261])
def test_unknown_soc(soc: int) -> None:
    with pytest.raises(InputError, match=rf"{soc} is unknown to mindiesd .*A2 220-225"):
        chips.of_soc(soc)


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="no chip 'A4'; use one of A2, A3, A5, Duo"):
        chips.by_name("A4")


def rain(kind: str, fa_quant: str | None = None) -> Attention:
    return Attention(rainfusion=RainFusion(kind, 0.64, 0), fa_quant=fa_quant)


PLAIN, LASER, FP8 = Attention(), Attention(algorithm="laser"), Attention(fa_quant="fp8")
# What is asked for -> the chips that take it; every other chip refuses with these words.
TAKEN = {
    "plain": (PLAIN, {"A2", "A3", "A5"}, ""),
    "laser": (LASER, {"A2", "A3"}, "needs an A2 or A3; this is an {chip}"),
    "fp8": (FP8, {"A5"}, "--fa_quant fp8 needs an A5; this is an {chip}"),
    "v1": (rain("v1"), set(), "torch_atb.*use v2 or v3"),
    "v2": (rain("v2"), {"A2", "A3"}, "--rainfusion_type v3|an {chip}"),
    "v3": (rain("v3"), {"A2", "A3", "A5"}, "needs an A2 or A3 or A5; this is an {chip}"),
    "fp8 v3": (rain("v3", "fp8"), {"A5"}, "--fa_quant fp8 needs an A5; this is an {chip}"),
}


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("asked", TAKEN)
def test_what_each_chip_takes(chip: chips.Chip, asked: str) -> None:
    attention, takers, words = TAKEN[asked]
    said = chips.refusal(chip, attention, 128, "bf16")
    assert (said is None) == (chip.name in takers)
    if said is not None:
        duo = "A Duo computes in float16 only, .*: use an A2 or A3 or A5."
        assert re.search(duo if chip.name == "Duo" else words.format(chip=chip.name), said)
        assert said.endswith(".") and said.count(". ") == 0  # one sentence


INTEGERS = ("W8A8_DYNAMIC", "W8A8", "W8A8_TIMESTEP", "W4A4_DYNAMIC", "W8A16", "W4A16")
MX = ("W8A8_MXFP8", "W4A4_MXFP4", "W4A4_MXFP4_DUALSCALE")


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("algorithm", [*INTEGERS, *MX])
def test_weights_that_each_chip_takes(chip: chips.Chip, algorithm: str) -> None:
    said = chips.refusal(chip, PLAIN, 128, "bf16", ("W8A8_DYNAMIC", algorithm))
    assert (said is None) == (chip.name in ({"A5"} if algorithm in MX else {"A2", "A3", "A5"}))
    if said is not None and chip.name != "Duo":
        assert f"{algorithm} weights, which need an A5; this is an {chip.name}" in said


def test_v2_on_a5_names_v3() -> None:
    said = chips.refusal(chips.by_name("A5"), rain("v2"), 128, "bf16")
    assert said is not None and said.endswith("use --rainfusion_type v3.")


@pytest.mark.parametrize(
    ("name", "attention", "head_dim", "precision", "words"),
    [
        ("A2", LASER, 256, "bf16", "at most 128 channels, not 256"),
        ("A2", LASER, 128, "fp32", "takes no float32"),
        ("A5", FP8, 96, "bf16", "heads of 64 or 128 channels, not 96"),
        ("A5", FP8, 128, "fp32", "--precision bf16"),
        ("A3", rain("v2"), 128, "fp32", "--precision bf16"),
        ("Duo", PLAIN, 128, "fp32", "computes in float16 only"),
    ],
)
def test_numbers_and_heads(
    name: str, attention: Attention, head_dim: int, precision: str, words: str
) -> None:
    said = chips.refusal(chips.by_name(name), attention, head_dim, precision)
    assert said is not None and words in said


@pytest.mark.parametrize(("head_dim", "precision"), [(64, "bf16"), (128, "bf16")])
def test_what_fp8_takes(head_dim: int, precision: str) -> None:
    assert chips.refusal(chips.by_name("A5"), FP8, head_dim, precision) is None


def test_float32_where_the_kernel_takes_it() -> None:
    for name in ("A2", "A3", "A5"):
        assert chips.refusal(chips.by_name(name), PLAIN, 96, "fp32") is None
