"""Variables of the Ascend adaptation of Wan2.2 as other names of our flags."""

from __future__ import annotations

import re
from typing import Any

import pytest

from wan import env
from wan.cli import flags
from wan.cli.resolve import resolve
from wan.settings.attention import Attention
from wan.settings.errors import InputError


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({}, {}),
        ({"ALGO": "0"}, {"attention_algo": "fused"}),
        ({"ALGO": "1"}, {"attention_algo": "laser"}),
        ({"ALGO": "3"}, {"fa_quant": "fp8"}),
        ({"OVERLAP": "0"}, {"fa_alltoall_overlap": False}),
        ({"OVERLAP": "1"}, {"fa_alltoall_overlap": True}),
        ({"QUANT_ALLTOALL": "1"}, {"quant_alltoall": True}),
        ({"ROPE_OPT": "0", "FAST_LAYERNORM": "0"}, {}),
        ({"ROPE_OPT": "1"}, {"fused_ops": ("rope",)}),
        ({"ROPE_OPT": "0", "FAST_LAYERNORM": "1"}, {"fused_ops": ("layer_norm",)}),
        ({"ROPE_OPT": "1", "FAST_LAYERNORM": "1"}, {"fused_ops": ("rope", "layer_norm")}),
        ({"T5_LOAD_CPU": "1"}, {"t5_cpu": True}),
        ({"PRECISION": "0"}, {"noise_device": "device"}),
        ({"PRECISION": "1"}, {"noise_device": "cpu"}),
        ({"USE_SUB_HEAD": "0"}, {}),
    ],
)
def test_aliases(environ: dict[str, str], settings: dict[str, Any]) -> None:
    assert env.aliases(environ) == settings
    assert flags.read(settings, "{}") == settings, "the flags would not take these values"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"ALGO": "2"}, "ALGO '2' must be 0, 1 or 3"),
        ({"OVERLAP": "yes"}, "use fa_alltoall_overlap"),
        ({"QUANT_ALLTOALL": ""}, "QUANT_ALLTOALL '' must be 0 or 1"),
        ({"ROPE_OPT": "2"}, "use fused_ops"),
        ({"FAST_LAYERNORM": "on"}, "use fused_ops"),
        ({"T5_LOAD_CPU": "true"}, "use t5_cpu"),
        ({"PRECISION": "bf16"}, "use noise_device"),
        ({"USE_SUB_HEAD": "4"}, "use comm_type=1, which works head by head"),
        ({"MINDIE_SD_FA_TYPE": "fused_attn_score"}, "use attention_algo"),
        ({"MINDIE_SD_FA_TYPE": ""}, "use attention_algo"),
    ],
)
def test_other_values_are_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        env.aliases(environ)
    if environ.keys() & {"USE_SUB_HEAD", "MINDIE_SD_FA_TYPE"}:
        with pytest.raises(InputError, match=re.escape(str(caught.value))):
            env.refused(environ)
    else:
        env.refused(environ)
    assert sentence in str(caught.value) and str(caught.value).endswith(".")


def attention(*argv: str) -> Attention:
    def no_demo(*_: object) -> None:
        raise AssertionError("nothing is made for a plan")

    return resolve(flags.parse(["--plan", *argv]), no_demo, plan=True).setup.attention


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALGO", "1")
    assert attention() == Attention(attention_algo="laser")
    assert attention("--attention_algo", "fused") == Attention()
    monkeypatch.setenv("FAST_LAYERNORM", "1")
    assert attention("--fused_ops", "rope").fused_ops == ("rope",)
    monkeypatch.setenv("OVERLAP", "1")
    assert attention("--fa_alltoall_overlap", "false", "--comm_type", "1", "--ulysses_size", "2")


def test_variables_and_flags_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALGO", "3")
    assert attention() == Attention(fa_quant="fp8")
    with pytest.raises(InputError, match=r"excludes --fa_quant fp8 .or ALGO=3."):
        attention("--attention_algo", "laser")
    monkeypatch.setenv("QUANT_ALLTOALL", "1")
    with pytest.raises(InputError, match=r"QUANT_ALLTOALL=1. makes .*--ulysses_size 1"):
        attention()
    assert attention("--ulysses_size", "2").quant_alltoall
