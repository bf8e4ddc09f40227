"""The planner's meta operators have the result layouts and peak memory of the vendor's.

mindiesd and the stand-in for torch-npu also run on meta tensors, without data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.npu_sim.oracles import make_random
from tests.npu_sim.ranks import (
    KINDS,
    Kind,
    make_ordered_qkv,
    make_step_info,
    make_target,
    run_backend,
)
from wan.kernels.registry import make_vendor_ops, select_kernels
from wan.modules.rope import make_rope_table
from wan.planner import operators
from wan.settings.kernels import SMALL_OPS
from wan.utils.torch_private import StorageTracker

GRID, LASER_GRID = (3, 11, 13), (3, 23, 31)  # laser takes 2048 tokens
# Allowed ratio of the planner's peak memory to the vendor's. The shape function of the laser kernel
# returns float16, its reference float32.
MEMORY_FACTORS = {"mindiesd:attention_forward": 1.4}


def describe_layouts(outputs: Any) -> list[tuple[Any, ...]]:
    """Return shape, stride and dtype of the tensors of a result."""
    return [(x.shape, x.stride(), x.dtype) for x in tree_leaves(outputs) if isinstance(x, Tensor)]


class ComparingLoader:
    """Loads the vendor's operators and compares each call with the planner's operator."""

    def __init__(self) -> None:
        self.called_names = set[str]()
        self.wrong = dict[str, Any]()

    def __call__(self, name: str) -> Any:
        vendor, planned = resolve_name(name), operators.load_operator(name)
        if not name.startswith(("torch_npu", "mindiesd")):
            return vendor
        if not callable(vendor):
            assert planned == vendor
            return vendor
        if planned is vendor:
            self.wrong[name] = "a plan has nothing for it"

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called_names.add(name)
            actual = vendor(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            vendor_outputs, vendor_bytes = call_on_meta(vendor, args, kwargs)
            planned_outputs, planned_bytes = call_on_meta(planned, args, kwargs)
            num_outputs = len(
                describe_layouts(planned_outputs)
            )  # further results are small and unused
            is_same = (
                describe_layouts(actual)[:num_outputs]
                == describe_layouts(vendor_outputs)[:num_outputs]
                == describe_layouts(planned_outputs)
            )
            if (
                not is_same
                or not vendor_bytes / 1.02
                <= planned_bytes
                <= vendor_bytes * MEMORY_FACTORS.get(name, 1.02)
            ):
                self.wrong[name] = [
                    *map(describe_layouts, (actual, vendor_outputs, planned_outputs)),
                    vendor_bytes,
                    planned_bytes,
                ]
            return actual

        return call


def call_on_meta(operator: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Run an operator on meta tensors; return its result and peak bytes."""
    live = StorageTracker("meta")
    live.exclude(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    with live:
        outputs = operator(*args, **kwargs)
    return outputs, live.peak_bytes.total()


def attend_all(kind: Kind, loader: ComparingLoader) -> None:
    kernels = select_kernels(kind.attention, make_target(kind.chip, load=loader), {})
    grid = LASER_GRID if kind.way == "laser" else GRID
    q, k, v = make_ordered_qkv(kernels, 2, grid)
    kernels.dense_kernel(q, k, v)
    if kernels.dense_kernel.can_return_lse:
        kernels.dense_kernel.with_lse(q, k, v)
    for method in kernels.backends:
        run_backend(method, q, k, v, replace(make_step_info(kind, grid), layer=0))


def call_all(names: list[str], loader: ComparingLoader) -> None:
    """Call the small operations, each alone and all together."""
    x, (shift, scale) = make_random(1, 60, 3, 64), (make_random(1, 1, 192, seed=i) for i in (1, 2))
    flat, weight = x.flatten(2), shift[0, 0]
    for enabled_names in (*([name] for name in names), names):
        ops = make_vendor_ops(enabled_names, loader)
        if ops.rope:
            ops.rope(x.float(), make_rope_table((3, 4, 5), 64))
        if ops.rms_norm:
            ops.rms_norm(flat, weight, 1e-6)
        if ops.layer_norm:
            ops.layer_norm(flat, weight, weight, 1e-6)
        if ops.modulated_norm:
            ops.modulated_norm(flat, shift.float(), scale.float(), 1e-6)


def test_a_plan_makes_what_the_vendor_makes(chip: Callable[[str], None]) -> None:
    loader = ComparingLoader()
    for kind in KINDS.values():
        chip(kind.chip)
        attend_all(kind, loader)
    for name in ("A2", "A5"):
        chip(name)
        rows = SMALL_OPS.items()
        call_all([op for op, row in rows if "npu" in row.factories and name in row.chips], loader)
    assert not loader.wrong
    assert len(loader.called_names) == 10
