"""Attention to reference frames, merged by log-sum-exp, against a dense masked softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.animate2_network import CASES, Case, compute_velocity, make_inputs, make_network
from tests.refusals import check_refusals, get_refusal
from wan.kernels.sdpa import SdpaKernel
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.host_kv import ChunkKV
from wan.modules.reference_kv import ReferenceKV, ReferenceLayout, ReferencePass

HEADS, HEAD_DIM = 3, 8


def attend_by_mask(
    case: Case, qkv: list[Tensor], reference_kv: list[Tensor], log_scale: float
) -> Tensor:
    """The official layout: slots of both videos, with zeros where a slot has no token; float64."""
    frames, slots = case.generated[0], max(math.prod(case.frame), math.prod(case.reference[1:]))

    def place(x: Tensor, frame_size: int, num_frames: int) -> Tensor:
        x_NTAD = x[0].double().transpose(0, 1).unflatten(1, (-1, frame_size))
        padded = x.new_zeros(HEADS, num_frames, slots, HEAD_DIM, dtype=torch.float64)
        padded[:, : x_NTAD.shape[1], :frame_size] = x_NTAD
        return padded.flatten(1, 2)

    full, size = case.full_frames, math.prod(case.frame)
    reference_size = math.prod(case.reference[1:])
    keys, values = (
        torch.cat((place(x, size, full), place(r, reference_size, full - 1)), dim=1)
        for x, r in zip(qkv[1:], reference_kv, strict=True)
    )
    query_frame = torch.arange(frames).repeat_interleave(size)[:, None]
    slot_frame = torch.arange(full).repeat_interleave(slots)
    sees_reference = query_frame == slot_frame[slots:]
    bias = torch.zeros(len(query_frame), keys.shape[1], dtype=torch.float64)
    bias[:, : full * slots][:, slot_frame == 1] = log_scale
    bias[:, full * slots :][~sees_reference] = -math.inf
    q_NSD = qkv[0][0].double().transpose(0, 1)
    weights = (q_NSD @ keys.mT / HEAD_DIM**0.5 + bias).softmax(-1)
    return (weights @ values).transpose(0, 1)[None]


@pytest.mark.parametrize("log_scale", [0.0, -1.3])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_masked_softmax(name: str, log_scale: float) -> None:
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def noise(tokens: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator)

    tokens = math.prod(case.generated)
    qkv = [noise(tokens) for _ in range(3)]
    reference_kv = [noise(math.prod(case.reference)) for _ in range(2)]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        q, k, v, *reference = (x.to(dtype) for x in (*qkv, *reference_kv))
        expected = attend_by_mask(case, [q, k, v], reference, log_scale)
        layout = ReferenceLayout(case.reference, case.generated, tokens, case.full_frames, 0)
        kv = ReferenceKV(layout, torch.device("cpu"))
        kv.record(0, 0, *reference, (0, 1))
        kv.is_complete = True
        layer = ReferencePass(kv, log_scale, [0]).get_layer(0)
        blocks = [(0, 2), (2, 7), (7, tokens - 1), (tokens - 1, tokens)]  # cut inside frames
        queries = [(start, q[:, start:stop]) for start, stop in blocks]
        # The keys of two ring ranks.
        kv_blocks = [(1, k[:, 17:], v[:, 17:]), (0, k[:, :17], v[:, :17])]
        actual = layer.attend(SdpaKernel(), queries, kv_blocks, [17, tokens - 17])
        assert (torch.cat(actual, dim=1) - expected).abs().max() <= tolerance, dtype


@pytest.mark.parametrize("ring_size", [1, 2, 3, 5])
def test_a_ring_rank_keeps_the_frames_of_its_queries(ring_size: int) -> None:
    """By definition: the frame of each of its tokens, minus one."""
    for name, case in CASES.items():
        tokens = math.prod(case.generated)
        padded = -(-tokens // (2 * ring_size)) * 2 * ring_size
        layout = ReferenceLayout(case.reference, case.generated, padded, case.full_frames, 0)
        for rank in range(ring_size):
            rows = range(rank * padded // ring_size, (rank + 1) * padded // ring_size)
            frames = {row // math.prod(case.frame) - 1 for row in rows if row < tokens} - {-1}
            assert {*layout.find_frames(rank, ring_size)} == frames, name


def test_the_next_layer_is_the_next_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are copied meanwhile; after the last one those of the next step's."""
    fetched = list[tuple[int, int]]()

    def fetch_layer(_: ReferenceKV, layer: int, next_layer: int) -> dict[int, ChunkKV]:
        fetched.append((layer, next_layer))
        return {}

    monkeypatch.setattr(ReferenceKV, "fetch_layer", fetch_layer)
    layout = ReferenceLayout((1, 2, 2), (2, 2, 2), 8, 2, 0)
    kv = ReferenceKV(layout, torch.device("cpu"), is_complete=True)
    layers = [0, 2, 3]
    for layer in layers:
        ReferencePass(kv, 0.0, layers).get_layer(layer)
    assert fetched == [(0, 2), (2, 3), (3, 0)]


class OnHost(TorchFunctionMode):
    """Allocates the memory of an accelerator, and page-locked memory, as memory of the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        changed = {name: x for name, x in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **(changed | {"device": "cpu"} if "device" in changed else changed))


class LateStream:
    """Replaces `CopyStream`: its copies run when the compute stream waits for their event.

    They wait for an event of the compute stream, which is recorded after the allocation. Copies to
    host memory, which is not of the stream, run in the same order.
    """

    def __init__(self, _: object) -> None:
        self.queued: list[Callable[[], object]] = []
        self.kept, self.computed = list[Tensor](), False

    def make_event(self) -> list[Callable[[], object]]:
        return []

    def record_computed(self, event: object) -> None:
        self.computed = True

    def record_stream(self, memory: Tensor) -> None:
        self.kept.append(memory)

    def copy(self, target: Tensor, slices: Any, event: object) -> None:
        slices, of_stream = [*slices], {x.untyped_storage().data_ptr() for x in self.kept}
        on_device = [x.untyped_storage().data_ptr() in of_stream for x in (target, slices[0][1])]
        assert self.computed and sum(on_device) == 1
        self.queued += [partial(target[rows].copy_, source) for rows, source in slices]

    def record_copied(self, event: list[Callable[[], object]]) -> None:
        event[:], self.queued, self.computed = self.queued, [], False

    def make_compute_wait(self, event: list[Callable[[], object]]) -> None:
        for copy in event:
            copy()


def test_attention_waits_for_the_copies_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the layer before is skipped, and in two head chunks."""
    monkeypatch.setattr("wan.modules.host_kv.CopyStream", LateStream)
    layout = ReferenceLayout((1, 2, 2), (2, 2, 2), 8, 2, 0)
    kv = ReferenceKV(layout, torch.device("cuda"), in_host_memory=True)
    with OnHost():
        for layer, chunk in product(range(1, 4), range(2)):
            key = torch.full((1, 4, 1, HEAD_DIM), 10.0 * layer + chunk)
            kv.record(layer, chunk, key, -key, (0, 1))
        kv.is_complete = True
        for layers in ([1, 2, 3], [1, 3], [2, 3], [1, 2, 3]):
            for layer in layers:
                chunks = ReferencePass(kv, 0.0, layers).get_layer(layer).chunks
                values = {
                    i: [x.unique().tolist() for x in kv_of_i] for i, kv_of_i in chunks.items()
                }
                expected = {i: [[10.0 * layer + i], [-10.0 * layer - i]] for i in range(2)}
                assert values == expected, (layers, layer)


def test_refusals() -> None:
    case, inputs = CASES["equal grids"], make_inputs(CASES["equal grids"])
    reference = inputs.reference, inputs.reference_text, inputs.reference_clip
    size = inputs.x.shape[1:]
    model = make_network()

    def attend_without_lse() -> None:
        layer = FAPowerCapAttention(comm_type=0, kernel=KernelWithoutLse())
        compute_velocity(make_network(attention=lambda _: layer), case)

    def step_of_another_grid() -> None:
        reference_kv = model.compute_reference_kv(*reference, size)
        model(
            [inputs.x[..., :-2]],
            inputs.t,
            [inputs.text],
            99,
            [inputs.y[..., :-2]],
            clip_fea=inputs.clip,
            reference_kv=reference_kv,
        )

    calls = {
        "as many frames": lambda: model.compute_reference_kv(*reference, (2, *size[1:])),
        "a full clip that is shorter": lambda: model.compute_reference_kv(
            *reference, size, full_frames=2
        ),
        "another grid": step_of_another_grid,
        "a kernel without log-sum-exp": attend_without_lse,
    }
    check_refusals(
        "Animate-2's network",
        {name: get_refusal(call, kind=ValueError) for name, call in calls.items()},
    )


class KernelWithoutLse(SdpaKernel):
    can_return_lse = False
