"""Cached blocks of a causal network against one forward pass under a block-causal mask."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.causal_network import CASES, Case, History, MaskedNetwork, make_network
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_reference_kv import LateStream, OnHost
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.causal import WanCausalModel
from wan.modules.host_kv import HostKV
from wan.modules.kv_cache import CachedPass, KVCache


def make_inputs(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the clean video, its noisy version, and two texts."""
    generator = torch.Generator().manual_seed(1)
    shape = 16, case.size * case.num_blocks, 4, 6
    video, noisy = (torch.randn(shape, generator=generator) for _ in range(2))
    return video, noisy, [torch.randn(n, 24, generator=generator) for n in (5, 8)]


@torch.inference_mode()
def compute_with_cache(model: WanCausalModel, case: Case) -> Tensor:
    """Returns the velocities of the noisy blocks, each computed after a first noisy pass."""
    video, noisy, texts = make_inputs(case)
    cache, velocities, text = KVCache(case.window, case.sink), [], texts[0]

    def run(x: Tensor, t: float, start: int) -> Tensor:
        kwargs = {"kv_cache": cache, "start_frame": start}
        return model([x], torch.tensor([t]), [text], 10_000, **kwargs)[0]

    for block in range(case.num_blocks):
        start = block * case.size
        stop = start + case.size
        if block == case.change:
            text, first = texts[1], cache.restart(start)
            while first < start:
                last = min((first // case.size + 1) * case.size, start)
                run(video[:, first:last], 0.0, first)
                first = last
        run(noisy[:, start:stop].flip(1), 1000.0, start)
        velocities.append(run(noisy[:, start:stop], 937.5, start))
        run(video[:, start:stop], 0.0, start)
    return torch.cat(velocities, dim=1)


def compute_with_mask(case: Case) -> Tensor:
    video, noisy, texts = make_inputs(case)
    history, text, results = History(case), texts[0], list[int]()
    for block in range(case.num_blocks):
        frames = range(block * case.size, (block + 1) * case.size)
        latents = slice(frames.start, frames.stop)
        if block == case.change:
            text = texts[1]
            history.renew(frames.start, video, text)
        results += history.add(frames, noisy[:, latents], [937.5] * case.size, text)
        history.keep(frames, video[:, latents], text)
    return MaskedNetwork().compute_velocities(history.entries)[:, results]


@pytest.mark.parametrize("name", CASES)
def test_blocks_equal_one_pass_under_a_block_causal_mask(name: str) -> None:
    expected = compute_with_mask(CASES[name])
    actual = compute_with_cache(make_network(), CASES[name])
    assert (actual - expected).abs().max() <= 1e-5


class PlainKernel:
    """Dense attention without log-sum-exp."""

    name, can_return_lse = "plain", False

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)

    def with_lse(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("there is no log-sum-exp")


@pytest.mark.parametrize("comm_type", [0, 1, 2])
def test_any_dense_kernel_attends_to_kept_keys(comm_type: int) -> None:
    case = CASES["window and sink"]
    layer = FAPowerCapAttention(comm_type=comm_type, kernel=PlainKernel())
    actual = compute_with_cache(make_network(attention=lambda _: layer), case)
    assert (actual - compute_with_mask(case)).abs().max() <= 1e-5


def test_refusals_of_the_network() -> None:
    model, text, x = make_network(), torch.zeros(2, 24), torch.zeros(16, 3, 4, 6)

    def call(videos: list[Tensor], start_frame: int, cache: KVCache) -> str:
        kwargs = {"kv_cache": cache, "start_frame": start_frame, "kind": ValueError}
        return get_refusal(model, videos, torch.zeros(1), [text] * len(videos), 99, **kwargs)

    cases = {
        "two samples": call([x, x], 0, KVCache(3)),
        "a frame below zero": call([x], -1, KVCache(3)),
        "frames after the positions": call([x], 1022, KVCache(3)),
        "a block larger than the window": call([x], 0, KVCache(6, 4)),
    }
    check_refusals("causal network", cases)


@pytest.mark.parametrize("name", CASES)
def test_host_memory_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run as late as events allow."""
    expected = compute_with_cache(make_network(), CASES[name])
    monkeypatch.setattr("wan.modules.host_kv.CopyStream", LateStream)
    with OnHost():
        network = make_network(keeps_kv_in_host_memory=lambda: True)
        assert torch.equal(compute_with_cache(network, CASES[name]), expected)


class LoggingStream(LateStream):
    """Logs each copy: to the device ("in"), or back to host memory ("out")."""

    log: ClassVar[list[str]] = []

    def copy(self, target: Tensor, slices: Any, event: object) -> None:
        self.log.append("out" if target.dim() == 4 else "in")  # a layer is copied flat
        super().copy(target, slices, event)


def test_the_next_layer_is_copied_while_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is started before the layer's new keys are written back, and waits for its own."""
    monkeypatch.setattr("wan.modules.host_kv.CopyStream", LoggingStream)
    LoggingStream.log.clear()
    cache = KVCache(4)
    with OnHost():
        cache.host = HostKV(torch.device("cuda"), cache.layers)
        for start, layer in product((0, 2, 4), range(5)):
            frames = range(start, start + 2)
            CachedPass(cache, frames, range(5)).get_layer(layer)
            new = torch.full((1, 6, 1, 2), 10.0 * start + layer)
            kv = cache.write(layer, 0, frames, (new, -new))
            kept = [10.0 * x + layer for x in (0, 2, 4) if start - 4 < x <= start]
            for x, sign in zip(kv, (1, -1), strict=True):
                assert (sign * x).unique().tolist() == kept, (start, layer)
    both, first_pass = ["in"] * 2 + ["out"] * 2, ["out"] * 2 * 4  # nothing is kept before it
    assert LoggingStream.log == first_pass + both * 11
    assert cache.nbytes == 5 * 2 * 4 * 3 * 2 * 4
