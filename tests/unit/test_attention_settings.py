"""Any combination of attention flags is either consistent or refused in one sentence."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import check_refusals, get_refusal
from wan.settings import attention as subject
from wan.settings import attention_modes, values
from wan.settings.attention import Attention
from wan.settings.attention_modes import MODES, TokenPlan
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.kernels import DENSE_KERNELS, RAINFUSION
from wan.settings.numerics import LASER_ROWS
from wan.settings.parallel import Parallel

LASER = Attention(attention_backend="laser")
ATTENTIONS = st.builds(
    Attention,
    attention_backend=st.sampled_from(("auto", "auto", "laser", *DENSE_KERNELS)),
    fa_quant=st.sampled_from(("fp8", "none")),
    quant_alltoall=st.booleans(),
    use_rainfusion=st.booleans(),
    sparsity=st.sampled_from((0.0, 0.8)),
    sparse_start_step=st.none() | st.integers(0, 6),
    rainfusion_type=st.sampled_from((*RAINFUSION, "v3")),
    mask_refresh_interval=st.integers(1, 3),
    fused_ops=st.sampled_from(((), ("auto",), ("rope",), ("gelu",))),
    fa_freq_cap=st.none() | st.just((1400, 1650)),
)
EXECUTIONS = st.builds(
    Execution, precision=st.sampled_from(("auto", "fp32")), compile=st.booleans()
)


def sizes(ring: int, ulysses: int, **more: Any) -> Parallel:
    return Parallel(ring * ulysses, 1, ring, ulysses, **more)


@settings(max_examples=100)
@given(
    ATTENTIONS,
    EXECUTIONS,
    st.integers(1, 8),
    st.builds(sizes, st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from((64, 96)),
)
def test_accepted_settings_have_an_effect_and_no_contradiction(
    attention: Attention, execution: Execution, steps: int, parallel: Parallel, dim: int
) -> None:
    try:
        subject.check_attention(attention, execution)
        subject.check_attention_layout(attention, parallel, dim)
        subject.check_attention_request(attention, parallel, steps, 9000)
    except InputError as error:
        text = str(error)
        assert text.endswith(".") and "\n" not in text
        assert any(field.name in text for field in fields(attention)), "it names a setting"
        return
    if attention.use_rainfusion:
        start = attention.resolve_sparse_start_step(steps)
        assert attention.rainfusion_type in ("v2", "v3") and start < steps and not execution.compile
        assert attention.mask_refresh_interval == 1 or steps - start > 1, (
            "no step uses a mask again"
        )
    if attention.fp8:
        assert dim == 64 and not execution.compile
        assert not attention.use_rainfusion or attention.rainfusion_type == "v3"
    if attention.attention_backend not in ("auto", "fused"):
        row = DENSE_KERNELS[attention.attention_backend]
        assert not attention.fp8
        assert not attention.use_rainfusion or attention.resolve_sparse_start_step(steps) > 0, (
            "no step is dense"
        )
        assert execution.precision in ("auto", *row.precisions)
        assert not execution.compile or row.xfuser_member is None
    if attention.quant_alltoall:
        assert attention.fp8 and not attention.use_rainfusion and parallel.ulysses_size > 1
    if attention.fa_freq_cap is not None:
        assert not execution.compile


@given(
    st.integers(1, 40000),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from((*MODES, "overlap")),
    st.booleans(),
)
def test_laser_is_refused_where_any_call_would_be_too_short(
    tokens: int, ring: int, ulysses: int, mode: int | str, sparse: bool
) -> None:
    """Counted from the shards and query blocks that the layer itself uses."""
    modes = {"fa_alltoall_overlap": True} if mode == "overlap" else {"comm_type": mode}
    parallel = sizes(ring, ulysses, **modes)
    attention = Attention(attention_backend="laser", use_rainfusion=sparse)
    plan = TokenPlan(tokens, ring * ulysses, attention.row_multiple(ring))
    rows_by_ring = [
        sum(plan.count_valid_tokens(r * ulysses + u) for u in range(ulysses)) for r in range(ring)
    ]
    blocks = parallel.mode.blocks
    calls = [
        b - a for rows in rows_by_ring for a, b in attention_modes.q_ranges(rows, blocks) if a < b
    ]
    if min(calls) >= LASER_ROWS:
        subject.check_attention_request(attention, parallel, 8, tokens)
        return
    with pytest.raises(InputError, match=f"has a call of {min(calls)} x {tokens}"):
        subject.check_attention_request(attention, parallel, 8, tokens)


def test_limits() -> None:
    """Each refused value, and the accepted one next to it."""
    exchanged = Attention(fa_quant="fp8", quant_alltoall=True)
    rain = Attention(use_rainfusion=True, sparse_start_step=40, mask_refresh_interval=2)
    compiled = Execution(compile=True)
    one_rank, two_ranks = Parallel(), sizes(1, 2)
    check_layout, check_request = subject.check_attention_layout, subject.check_attention_request
    capped, clocks = Attention(fa_freq_cap=(1400, 1650)), subject.read_clocks
    plain, fp32 = Execution(precision="auto"), Execution(precision="fp32")
    table: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
        "an exchange of one rank": (
            check_layout,
            (exchanged, one_rank, 128),
            (exchanged, two_ranks, 128),
        ),
        "an exchange of heads of 6": (
            check_layout,
            (exchanged, two_ranks, 6),
            (exchanged, two_ranks, 8),
        ),
        "LASER's heads": (check_layout, (LASER, one_rank, 256), (LASER, one_rank, 128)),
        "one sparse step": (check_request, (rain, one_rank, 41, 9000), (rain, one_rank, 42, 9000)),
        "no sparse step": (check_request, (rain, one_rank, 40, 9000), (rain, one_rank, 42, 9000)),
        "LASER's rows": (check_request, (LASER, one_rank, 40, 2047), (LASER, one_rank, 40, 2048)),
        "LASER in fp32": (subject.check_attention, (LASER, fp32), (LASER, plain)),
        "a clock above": (clocks, ("`fa_freq_cap`", "1651"), ("`fa_freq_cap`", "1650")),
        "a clock, compiled": (subject.check_attention, (capped, compiled), (capped, plain)),
    }
    messages = {name: get_refusal(check, *refused) for name, (check, refused, _) in table.items()}
    check_refusals("attention: settings", messages)
    for check, _, accepted in table.values():
        check(*accepted)


def test_the_first_sparse_step_is_a_quarter_of_the_steps() -> None:
    steps_by_start = {1: 1, 4: 1, 5: 2, 40: 10}
    for steps, start in steps_by_start.items():
        assert Attention().resolve_sparse_start_step(steps) == start
    assert Attention(sparse_start_step=0).resolve_sparse_start_step(40) == 0


def test_shards_are_padded_for_blocks_only_where_one_can_be_split() -> None:
    rain, fp8 = Attention(use_rainfusion=True), Attention(fa_quant="fp8")
    exchanged = Attention(fa_quant="fp8", quant_alltoall=True)
    table = [(Attention(), 2, 1), (exchanged, 1, 256)]
    table += [(rain, 1, 1), (rain, 2, 128), (fp8, 1, 1), (fp8, 2, 128)]
    assert [row for row in table if row[0].row_multiple(row[1]) != row[2]] == []


def test_a_choice_of_several_words() -> None:
    parse_subset = values.subset_of("a", "b", "c")
    table: list[tuple[Any, tuple[str, ...]]] = [
        *(("c, a,a", ("a", "c")), (["a", "c"], ("a", "c"))),
        *((none, ()) for none in ("none", ["none"], [])),
        *((auto, ("auto",)) for auto in ("auto", ["auto"])),
    ]
    for value, choice in table:
        assert parse_subset("--x", value) == choice
    wrong = {repr(x): x for x in ("d", "a,none", "a,auto", "", None, 3, [1], {"a": 1})}
    check_refusals(
        "values: some words",
        {name: get_refusal(parse_subset, "--x", x) for name, x in wrong.items()},
    )


def test_real_numbers_within_bounds() -> None:
    parse_share = values.real(0, 1, exclude_max=True)
    assert parse_share("--x", "0") == 0.0 and parse_share("--x", 0.999) == 0.999
    wrong = (1, "1e9", None, "inf", True, "-1e-9", "nan")
    messages = {f"share {x!r}": get_refusal(parse_share, "--x", x) for x in wrong}
    parse_positive = values.real(0, 5, exclude_min=True)
    assert parse_positive("--x", 5) == 5.0
    check_refusals("values: numbers", messages | {"above 0": get_refusal(parse_positive, "--x", 0)})
