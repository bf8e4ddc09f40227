"""Whatever flags of attention come together: they fit each other, or one sentence refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.modules import schedule
from wan.modules.schedule import TokenPlan
from wan.settings import values
from wan.settings.attention import (
    RAINFUSION_TYPES,
    Attention,
    RainFusion,
    check_request,
    resolve,
)
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.numerics import LASER_ROWS
from wan.settings.parallel import Parallel

NPU = Execution(device="npu")
ANY = {
    "attention_algo": st.sampled_from(("fused", "laser")),
    "fa_quant": st.sampled_from(("fp8", "none")),
    "quant_alltoall": st.booleans(),
    "fused_ops": st.sampled_from(((), ("rope",))),
}
SPARSE = {
    "sparsity": st.sampled_from((0.0, 0.8)),
    "sparse_start_step": st.integers(0, 6),
    "rainfusion_type": st.sampled_from((*RAINFUSION_TYPES, "v3")),
    "mask_refresh_interval": st.integers(1, 3),
}
CAPPED = {"fa_freq_restore": st.sampled_from((1300, 1700))}
FLAGS = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    st.fixed_dictionaries({}, optional=ANY),
    st.just({}) | st.fixed_dictionaries({"use_rainfusion": st.just(True)}, optional=SPARSE),
    st.just({}) | st.fixed_dictionaries({"fa_freq_cap": st.just(1400)}, optional=CAPPED),
)
EXECUTIONS = st.builds(
    Execution,
    device=st.sampled_from(("auto", "cpu", "cuda", "npu")),
    precision=st.sampled_from(("auto", "fp32")),
    compile=st.booleans(),
)


def sizes(ring: int, ulysses: int, **more: Any) -> Parallel:
    return Parallel(ring * ulysses, 1, ring, ulysses, **more)


@settings(max_examples=400)
@given(
    FLAGS,
    EXECUTIONS,
    st.integers(1, 8),
    st.builds(sizes, st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from((64, 96)),
)
def test_what_is_accepted_has_an_effect_and_no_contradiction(
    given_flags: dict[str, Any], execution: Execution, steps: int, parallel: Parallel, dim: int
) -> None:
    try:
        found = resolve(
            given_flags, execution, steps=steps, tokens=9000, parallel=parallel, head_dim=dim
        )
    except InputError as error:
        text = str(error)
        assert text.endswith(".") and "\n" not in text and "--" in text
        return
    rain = found.rainfusion
    assert (rain is not None) == ("use_rainfusion" in given_flags)
    if rain is not None:
        assert rain.type in ("v2", "v3") and rain.start_step < steps and not execution.compile
        assert rain.refresh == 1 or steps - rain.start_step > 1, "no step uses a mask again"
        assert found.algorithm == "fused" or rain.start_step > 0, "no step is dense"
    if found.fa_quant is not None:
        assert dim == 64 and found.algorithm == "fused" and not execution.compile
        assert rain is None or rain.type == "v3"
    if found.quant_alltoall:
        assert found.fa_quant == "fp8" and rain is None and parallel.ulysses_size > 1
    if found.algorithm == "laser" or found.fused_ops or found.freq_cap is not None:
        assert execution.device in ("auto", "npu")
    if found.freq_cap is not None:
        assert found.freq_cap <= found.freq_restore and not execution.compile


@given(
    st.integers(1, 40000),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from((*schedule.MODES, "overlap")),
    st.booleans(),
)
def test_laser_is_refused_where_any_call_would_be_too_short(
    tokens: int, ring: int, ulysses: int, mode: int | str, sparse: bool
) -> None:
    """Counted from the shards and query blocks that the layer itself uses."""
    modes = {"fa_alltoall_overlap": True} if mode == "overlap" else {"comm_type": mode}
    parallel = sizes(ring, ulysses, **modes)
    flags: dict[str, Any] = {"attention_algo": "laser", "use_rainfusion": sparse}
    attention = resolve(flags, NPU, steps=8)
    plan = TokenPlan(tokens, ring * ulysses, attention.row_multiple(ring))
    held = [sum(plan.valid(r * ulysses + u) for u in range(ulysses)) for r in range(ring)]
    calls = [
        b - a for rows in held for a, b in schedule.q_ranges(rows, parallel.mode.blocks) if a < b
    ]
    if min(calls) >= LASER_ROWS:
        assert resolve(flags, NPU, steps=8, tokens=tokens, parallel=parallel) == attention
        return
    with pytest.raises(InputError, match=f"has one of {min(calls)} x {tokens}"):
        resolve(flags, NPU, steps=8, tokens=tokens, parallel=parallel)


def test_what_is_not_known_yet_is_not_checked() -> None:
    flags = {"fa_quant": "fp8", "quant_alltoall": True}
    assert resolve(flags, NPU, steps=8).quant_alltoall
    with pytest.raises(InputError, match="none with --ulysses_size 1"):
        resolve(flags, NPU, steps=8, parallel=Parallel())
    with pytest.raises(InputError, match="has 6 channels"):
        resolve(flags, NPU, steps=8, head_dim=6)


def test_a_request_is_checked_when_it_comes() -> None:
    flags = {"use_rainfusion": True, "sparse_start_step": 40, "mask_refresh_interval": 2}
    attention = resolve(flags, NPU, steps=40, parallel=Parallel())
    check_request(attention, 42, 9000, Parallel())
    with pytest.raises(InputError, match="as only the last of 41 steps is sparse"):
        check_request(attention, 41, 9000, Parallel())
    with pytest.raises(
        InputError, match=r"begin at step 40, but there are 40 .*; lower --sparse_st"
    ):
        check_request(attention, 40, 9000, Parallel())
    laser = resolve({"attention_algo": "laser"}, NPU, steps=40, parallel=Parallel())
    check_request(laser, 40, LASER_ROWS, Parallel())
    with pytest.raises(InputError, match="has one of 2047 x 2047"):
        check_request(laser, 40, LASER_ROWS - 1, Parallel())


@pytest.mark.parametrize(
    ("attention", "ring", "multiple"),
    [
        (Attention(), 2, 1),
        (Attention(rainfusion=RainFusion("v2", 0.5, 0)), 1, 1),
        (Attention(rainfusion=RainFusion("v2", 0.5, 0)), 2, 128),
        (Attention(fa_quant="fp8"), 1, 1),
        (Attention(fa_quant="fp8"), 2, 128),
        (Attention(fa_quant="fp8", quant_alltoall=True), 1, 256),
    ],
)
def test_shards_are_padded_for_blocks_only_where_one_can_be_cut(
    attention: Attention, ring: int, multiple: int
) -> None:
    assert attention.row_multiple(ring) == multiple


def test_a_clock_may_be_restored_to_what_it_is_capped_at() -> None:
    flags = {"fa_freq_cap": 1650}
    assert resolve(flags, NPU, steps=1).freq_cap == 1650
    with pytest.raises(InputError, match="--compile does not work with --fa_freq_cap"):
        resolve(flags, replace(NPU, compile=True), steps=1)


def test_a_choice_of_several_words() -> None:
    read = values.some_of("a", "b", "c")
    assert read("--x", "c, a,a") == read("--x", ["a", "c"]) == ("a", "c")
    assert read("--x", "none") == read("--x", ["none"]) == read("--x", []) == ()
    for wrong in ("d", "a,none", "", None, 3, [1], {"a": 1}):
        with pytest.raises(InputError, match="give some of a,b,c, or none"):
            read("--x", wrong)


def test_a_share() -> None:
    assert values.share("--x", "0") == 0.0 and values.share("--x", 0.999) == 0.999
    for wrong in (1, "1e9", None, "inf", True, "-1e-9", "nan"):
        with pytest.raises(InputError):
            values.share("--x", wrong)


@pytest.mark.parametrize(("tokens", "ok"), [(LASER_ROWS, True), (LASER_ROWS - 1, False)])
def test_the_least_that_laser_takes(tokens: int, ok: bool) -> None:
    try:
        resolve({"attention_algo": "laser"}, NPU, steps=1, tokens=tokens, parallel=Parallel())
    except InputError:
        assert not ok
    else:
        assert ok
