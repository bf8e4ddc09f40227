"""Variables of the Ascend adaptation of Wan2.2 as other names of our flags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipelines import read_values, resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.settings.attention import Attention
from wan.utils import env


def test_aliases() -> None:
    table: tuple[tuple[dict[str, str], dict[str, Any]], ...] = (
        ({}, {}),
        ({"ALGO": "0"}, {"attention_backend": "fused"}),
        ({"ALGO": "1"}, {"attention_backend": "laser"}),
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
    )
    for environ, settings in table:
        assert env.read_variables(environ).values == settings, environ
        assert read_values(settings) == settings, "the flags would not take these values"


def test_other_values_are_refused() -> None:
    """Values of variables that mindiesd itself reads are refused by check_environment, too."""
    table = {"ALGO": "2", "OVERLAP": "yes", "QUANT_ALLTOALL": "", "ROPE_OPT": "2"}
    table |= {"FAST_LAYERNORM": "on", "T5_LOAD_CPU": "true", "PRECISION": "bf16"}
    table |= {"USE_SUB_HEAD": "4", "MINDIE_SD_FA_TYPE": "fused_attn_score"}
    environments = {name: {name: value} for name, value in table.items()}
    environments["MINDIE_SD_FA_TYPE, empty"] = {"MINDIE_SD_FA_TYPE": ""}
    messages = {
        name: get_refusal(env.read_variables, environ) for name, environ in environments.items()
    }
    check_refusals("variables", messages)
    for name, environ in environments.items():
        read_elsewhere = {"USE_SUB_HEAD", "MINDIE_SD_FA_TYPE"} & environ.keys()
        assert get_refusal(env.check_environment, environ) == (
            messages[name] if read_elsewhere else ""
        ), name


def attention(*argv: str) -> Attention:
    return resolve_plan(*argv).setup.attention


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALGO", "1")
    assert attention() == Attention(attention_backend="laser")
    assert attention("--attention_backend", "auto") == Attention()
    monkeypatch.setenv("FAST_LAYERNORM", "1")
    assert attention("--fused_ops", "rope").fused_ops == ("rope",)
    monkeypatch.setenv("OVERLAP", "1")
    assert attention("--fa_alltoall_overlap", "false", "--comm_type", "1", "--ulysses_size", "2")


def test_variables_and_flags_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALGO", "3")
    assert attention() == Attention(fa_quant="fp8")
    messages = {"ALGO=3 and laser": get_refusal(attention, "--attention_backend", "laser")}
    monkeypatch.setenv("QUANT_ALLTOALL", "1")
    messages["QUANT_ALLTOALL=1 of one rank"] = get_refusal(attention)
    check_refusals("variables and flags", messages)
    assert attention("--ulysses_size", "2").quant_alltoall
