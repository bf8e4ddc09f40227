"""Small operations as compiled functions: their results, and how often they are compiled.

Legend: L tokens, C channels, N heads, D head size.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.conftest import slow
from wan.kernels.compiled_ops import MIN_ELEMENTS, STEPS_BY_OP, CompiledOps
from wan.modules.fused_ops import BlockOps
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.rope import compute_rope_angles, make_rope_table

GRID, HEADS, HEAD_DIM = (3, 4, 6), 4, 12
L, C, EPS = 72, HEADS * HEAD_DIM, 1e-6
LIMITS = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SEGMENTS = 20, 52
SHIFT, SCALE, GATE = (random(1, len(SEGMENTS), C, seed=seed) for seed in range(3))
AFFINE = torch.nn.LayerNorm(C, EPS).requires_grad_(False)
AFFINE.weight.copy_(random(C, seed=3))
TABLE = make_rope_table(GRID, HEAD_DIM)


CASES: dict[str, Callable[[BlockOps, Tensor, Tensor], Tensor]] = {
    "modulated_norm": lambda ops, x, y: ops.modulated_norm(x, SHIFT, SCALE, SEGMENTS, EPS, y.dtype),
    "norm_rope": lambda ops, x, y: ops.norm_and_rotate(y, AFFINE.weight, HEADS, EPS, TABLE),
    "rms_norm": lambda ops, x, y: ops.norm_and_rotate(y, AFFINE.weight, HEADS, EPS),
    "gated_add_norm": lambda ops, x, y: ops.gated_add_norm(x, y, GATE, SEGMENTS, AFFINE, y.dtype)[
        1
    ],
    "add_modulated_norm": lambda ops, x, y: ops.add_modulated_norm(
        x, y, SHIFT, SCALE, SEGMENTS, EPS, y.dtype
    )[1],
    "gated_add": lambda ops, x, y: ops.gated_add(x, y, GATE, SEGMENTS),
    "gelu": lambda ops, x, y: ops.gelu(y),
}
"""Calls with the residual stream x, float32, which some change, and y."""


def normalise(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x_BLND: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_BLND.unflatten(-1, (-1, 2)))
    turns = torch.polar(torch.ones((), dtype=torch.float64), compute_rope_angles(GRID, HEAD_DIM))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def compute_definitions(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The results of `CASES`, in float64."""
    x, y, weight = x.double(), y.double(), AFFINE.weight.double()
    shift, scale, gate = (
        rows.double().repeat_interleave(torch.tensor(SEGMENTS), dim=1)
        for rows in (SHIFT, SCALE, GATE)
    )
    rms = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    rms_BLND = rms.unflatten(-1, (HEADS, -1))
    return {
        "modulated_norm": normalise(x) * (1 + scale) + shift,
        "norm_rope": rotate(rms_BLND),
        "rms_norm": rms_BLND,
        "gated_add_norm": normalise(x + gate * y) * weight,
        "add_modulated_norm": normalise(x + y) * (1 + scale) + shift,
        "gated_add": x + gate * y,
        "gelu": y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    }


@pytest.mark.parametrize("mode", ["one slice", "slices", "autograd", "compiling"])
def test_operations_are_their_definitions(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two segments; slices have ten tokens, and the last one of a segment fewer."""
    if mode == "slices":
        monkeypatch.setattr("wan.modules.fused_ops.get_slice_numel", lambda _: C * 10)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: mode == "compiling")
    wrong = []
    for name, dtype in product((*CASES, "written norm_rope"), LIMITS):
        x, y = random(1, L, C, seed=4), random(1, L, C, seed=5).to(dtype)
        y[:, 0] *= 1e-3  # as small as the norm's epsilon
        expected = compute_definitions(x, y)[name.removeprefix("written ")]
        with torch.set_grad_enabled(mode == "autograd"):
            if name in CASES:
                output = CASES[name](BlockOps(), x, y.clone())
            else:
                output = torch.full((1, L, HEADS, HEAD_DIM), torch.nan)

                def write(x_BLND: Tensor, first: int, output: Tensor = output) -> None:
                    output[:, first : first + x_BLND.shape[1]] = x_BLND

                BlockOps().norm_and_rotate(y.clone(), AFFINE.weight, HEADS, EPS, TABLE, write)
        difference = (output.double() - expected).abs()
        if not (difference <= LIMITS[output.dtype] * (1 + expected.abs())).all():
            wrong.append((name, dtype))
    assert not wrong


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gelu", torch.bfloat16), *(slow(*case) for case in product(CASES, LIMITS))],
)
def test_compiled_steps_compute_the_same(name: str, dtype: torch.dtype) -> None:
    """As the functions that are not compiled, which `test_ops` and `test_model` check."""
    results = []
    for run in (CompiledOps(()), CompiledOps(STEPS_BY_OP, min_elements=0)):
        x, y = random(1, L, C, seed=4), random(1, L, C, seed=5).to(dtype)
        with torch.inference_mode():
            results.append((CASES[name](BlockOps(run_op=run), x, y), x))
    assert run.compiled, "the compiler did not work"
    (expected, expected_x), (output, x) = results
    limit = LIMITS[output.dtype]
    assert_close(output, expected, atol=limit, rtol=limit)
    assert_close(x, expected_x, atol=4e-6, rtol=0)


def test_samples_of_a_batch_and_tokens_without_a_norm() -> None:
    """Each sample has its own row of modulation; a network without norms of q and k rotates."""
    x, y, rows = random(2, L, C, seed=4), random(2, L, C, seed=5), random(2, 1, C, seed=6)
    with torch.inference_mode():
        normed = BlockOps().modulated_norm(x, rows, 2 * rows, (L,), EPS, torch.float32)
        rotated = BlockOps().norm_and_rotate(y.clone(), None, HEADS, EPS, TABLE)
        added = BlockOps().gated_add(x.clone(), y, rows, (L,))
    for output, expected in (
        (normed, normalise(x.double()) * (1 + 2 * rows) + rows),
        (rotated, rotate(y.double().unflatten(-1, (HEADS, -1)))),
        (added, x.double() + rows * y),
    ):
        assert_close(output.double(), expected, rtol=4e-6, atol=4e-6)


def model(run: CompiledOps) -> WanModel:
    torch.manual_seed(0)
    sizes = {"dim": C, "ffn_dim": 64, "num_heads": HEADS, "num_layers": 2}
    components = ModelComponents(ops=BlockOps(run_op=run))
    net = WanModel("ti2v", **sizes, text_dim=16, text_len=8, components=components)
    return net.requires_grad_(False)


def velocity(net: WanModel, frames: int, t: Tensor) -> Tensor:
    x, context = random(16, frames, 4, 6, seed=1), random(5, 16, seed=2)
    with torch.inference_mode():
        return net([x], t, [context], frames * 6)[0]


class Graphs:
    """Counts the graphs of each function passed to `torch.compile`; no C++ is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.graph_counts: Counter[str] = Counter()
        compile = torch.compile

        def compile_and_count(step: Callable[..., Tensor], **_: Any) -> Any:
            def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                self.graph_counts[step.__name__] += 1
                return graph.forward

            return compile(step, backend=backend, fullgraph=True)

        monkeypatch.setattr(torch, "compile", compile_and_count)


@pytest.mark.slow
def test_two_graphs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each function and dtype, whatever the number of sequence lengths."""
    graphs = Graphs(monkeypatch)
    net = model(CompiledOps(STEPS_BY_OP, min_elements=0))
    for frames in (3, 5, 2):
        output = velocity(net, frames, torch.tensor([500.0]))
        assert_close(output, velocity(model(CompiledOps(())), frames, torch.tensor([500.0])))
        first_at_zero = torch.full((1, frames * 6), 500.0).index_fill(1, torch.arange(6), 0)
        velocity(net, frames, first_at_zero)
    # one graph for the first number of tokens, and one for any number
    assert set(graphs.graph_counts) == {step for steps in STEPS_BY_OP.values() for step in steps}
    assert max(graphs.graph_counts.values()) == 2
    net.bfloat16()
    for frames in (3, 5):
        velocity(net, frames, torch.tensor([500.0]))
    assert max(graphs.graph_counts.values()) <= 4


def test_small_tensors_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    run = CompiledOps(STEPS_BY_OP)
    velocity(model(run), 3, torch.tensor([500.0]))
    assert not graphs.graph_counts
    with torch.inference_mode():
        BlockOps(run_op=run).gelu(torch.zeros(1, 4, MIN_ELEMENTS // 4))
        assert set(graphs.graph_counts) == {"_gelu"}
        BlockOps(run_op=run).gelu(torch.zeros(1, 4, MIN_ELEMENTS // 4 - 1))
    assert graphs.graph_counts == {"_gelu": 1}


def test_only_videos_that_repay_compiling_use_compiled_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short video after a long one is computed as it would be in a new process."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: torch.full_like(x, torch.nan))
    run = CompiledOps(STEPS_BY_OP, min_elements=0, min_work=1000)
    for work, is_compiled in ((999, False), (1000, True), (999, False)):
        run.start_video(work)
        with torch.inference_mode():
            output = BlockOps(run_op=run).gelu(torch.zeros(1, 4, C))
        assert output.isnan().all() == is_compiled


@pytest.mark.parametrize("has_gradients", [False, True])
def test_only_the_chosen_steps_are_compiled(
    has_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With autograd, none."""
    graphs = Graphs(monkeypatch)
    net = model(CompiledOps(("add_norm",), min_elements=0)).requires_grad_(has_gradients)
    if has_gradients:
        net([random(16, 3, 4, 6)], torch.tensor([5.0]), [random(5, 16)], 18)[0].sum().backward()
        assert net.blocks[0].self_attn.q.weight.grad.abs().sum() > 0
    else:
        velocity(net, 3, torch.tensor([500.0]))
    assert set(graphs.graph_counts) == (set() if has_gradients else {*STEPS_BY_OP["add_norm"]})


@pytest.mark.parametrize("missing", ["compiler", "private cache"])
def test_without_a_compiler_or_a_cache_everything_runs_as_it_is_written(
    missing: str, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config

    tmp_path.chmod(0o777 if missing == "private cache" else 0o700)
    compiler = str(tmp_path / "g++") if missing == "compiler" else "g++"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    net = model(CompiledOps(STEPS_BY_OP, min_elements=0))
    with config.patch({"cpp.cxx": (compiler,)}), caplog.at_level(logging.WARNING):
        output = velocity(net, 3, torch.tensor([500.0]))
    assert torch.equal(output, velocity(model(CompiledOps(())), 3, torch.tensor([500.0])))
    (notice,) = caplog.messages
    assert notice.startswith("The small operations are not compiled, which costs speed only: ")
    assert "\n" not in notice and notice.endswith("(--fused_ops none does not try).")
