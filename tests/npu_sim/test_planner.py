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

from tests.npu_sim.oracles import made
from tests.npu_sim.ranks import KINDS, Kind, arranged, attend, step_info, target
from wan.kernels.select import make_vendor_ops, select_kernels
from wan.modules.rope import make_rope_table
from wan.planner import operators
from wan.settings.kernels import SMALL_OPS
from wan.torch_private import StorageTracker

GRID, LASER_GRID = (3, 11, 13), (3, 23, 31)  # laser takes 2048 tokens
# Allowed ratio of the planner's peak memory to the vendor's. The shape function of the laser kernel
# returns float16, its reference float32.
MORE = {"mindiesd:attention_forward": 1.4}


def lies(found: Any) -> list[tuple[Any, ...]]:
    """Return shape, stride and dtype of the tensors of a result."""
    return [(x.shape, x.stride(), x.dtype) for x in tree_leaves(found) if isinstance(x, Tensor)]


class Both:
    """Loads the vendor's operators and compares each call with the planner's operator."""

    def __init__(self) -> None:
        self.called = set[str]()
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

        def call(*args: Any, **named: Any) -> Any:
            self.called.add(name)
            found = vendor(*args, **named)
            args, named = tree_map_only(Tensor, lambda x: x.to("meta"), (args, named))
            theirs, most = without_data(vendor, args, named)
            ours, planned_most = without_data(planned, args, named)
            first = len(lies(ours))  # further results are small and unused
            same = lies(found)[:first] == lies(theirs)[:first] == lies(ours)
            if not same or not most / 1.02 <= planned_most <= most * MORE.get(name, 1.02):
                self.wrong[name] = [*map(lies, (found, theirs, ours)), most, planned_most]
            return found

        return call


def without_data(operator: Any, args: Any, named: Any) -> tuple[Any, int]:
    """Run an operator on meta tensors; return its result and peak bytes."""
    live = StorageTracker("meta")
    live.exclude(x for x in tree_leaves((args, named)) if isinstance(x, Tensor))
    with live:
        found = operator(*args, **named)
    return found, live.peak_bytes.total()


def attend_all(kind: Kind, both: Both) -> None:
    chosen = select_kernels(kind.attention, target(kind.chip, load=both), {})
    grid = LASER_GRID if kind.way == "laser" else GRID
    q, k, v = arranged(chosen, 2, grid)
    chosen.dense_kernel(q, k, v)
    if chosen.dense_kernel.can_return_lse:
        chosen.dense_kernel.with_lse(q, k, v)
    for method in chosen.backends:
        attend(method, q, k, v, replace(step_info(kind, grid), layer=0))


def call_all(names: list[str], both: Both) -> None:
    """Call the small operations, each alone and all together."""
    x, (shift, scale) = made(1, 60, 3, 64), (made(1, 1, 192, seed=i) for i in (1, 2))
    flat, weight = x.flatten(2), shift[0, 0]
    for some in (*([name] for name in names), names):
        ops = make_vendor_ops(some, both)
        if ops.rope:
            ops.rope(x.float(), make_rope_table((3, 4, 5), 64))
        if ops.rms_norm:
            ops.rms_norm(flat, weight, 1e-6)
        if ops.layer_norm:
            ops.layer_norm(flat, weight, weight, 1e-6)
        if ops.modulated_norm:
            ops.modulated_norm(flat, shift.float(), scale.float(), 1e-6)


def test_a_plan_makes_what_the_vendor_makes(chip: Callable[[str], None]) -> None:
    both = Both()
    for kind in KINDS.values():
        chip(kind.chip)
        attend_all(kind, both)
    for name in ("A2", "A5"):
        chip(name)
        rows = SMALL_OPS.items()
        call_all([op for op, row in rows if "npu" in row.factories and name in row.chips], both)
    assert not both.wrong
    assert len(both.called) == 10
