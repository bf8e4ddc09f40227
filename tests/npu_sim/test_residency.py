"""Block offload through two buffers of an NPU, and offload of complete networks.

On a CPU streams do nothing, so `Streams` replaces them: copies on the copy stream run when the
computing stream waits for them, as late as possible, and all calls of streams are logged:

    wait NAME, mark NAME    the copy stream waits for an event, or records one
    copy BLOCK              a block's weights are copied
    behind NAME, done NAME  the computing stream waits for an event, or records one
    BLOCK                   a block computes
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.dist import run_on_ranks
from tests.npu_sim import checkpoint
from tests.npu_sim.latents import build_run, make_latents
from tests.unit.test_reference_kv import LateStream
from wan.checkpoint.formats.tensor_source import TensorSource
from wan.checkpoint.load import keep_sources
from wan.device import Device
from wan.modules.reference_kv import ReferenceKV, ReferenceLayout, ReferencePass
from wan.pipeline import memory_estimate, offload
from wan.pipeline.memory_estimate import RESERVED_BYTES
from wan.pipeline.offload import stream_blocks
from wan.tasks.base import Inputs

NPU = torch.device("npu", 0)


class Streams(TorchFunctionMode):
    """Replaces torch.npu's streams and events, logs their calls and delays `copy_`."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.pending_copies: list[Any] = []  # work of the copy stream that has not run yet
        self.copying = False
        self.events = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and self.copying:
            target, part = args[:2]
            self.log.append(f"copy {int(part.view(torch.float32)[0])}")
            self.pending_copies.append(lambda: target.copy_(part))
            return target
        return func(*args, **(kwargs or {}))

    @contextmanager
    def installed(self) -> Iterator[None]:
        streams = self

        class Event:
            def __init__(self) -> None:
                self.name, self.after = "ABCDEFGH"[streams.events], 0
                streams.events += 1

            def record(self, stream: Any = None) -> None:
                on_copies = isinstance(stream, Stream)
                streams.log.append(f"{'mark' if on_copies else 'done'} {self.name}")
                if on_copies:
                    self.after = len(streams.pending_copies)

        class Stream:
            def __init__(self, device: Any = None) -> None: ...

            def wait_event(self, event: Event) -> None:
                streams.log.append(f"wait {event.name}")

        class Computing:
            def wait_event(self, event: Event) -> None:
                streams.log.append(f"behind {event.name}")
                while streams.pending_copies[: event.after]:
                    streams.pending_copies.pop(0)()
                    event.after -= 1

        @contextmanager
        def stream(_: Stream) -> Iterator[None]:
            streams.copying = True
            yield
            streams.copying = False

        patches = {"Stream": Stream, "Event": Event, "stream": stream}
        with mock.patch.multiple(torch.npu, current_stream=lambda *_: Computing(), **patches), self:
            yield


class Blocks(nn.Module):
    """A network in which block i adds i + 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 64, bias=False) for _ in range(count))

    def forward(self, x: Tensor, last: int | None = None) -> Tensor:
        for block in self.blocks[:last]:
            x = x + block(torch.ones(1))
        return x


def record_forwards(
    count: int, resident: int, forwards: Sequence[int | None], slab: int = offload._SLAB_BYTES
) -> list[str]:
    """Run forwards of so many blocks each; return the log of each as a string."""
    streams = Streams()
    with torch.device("meta"):
        network = Blocks(count)
    values = {f"blocks.{i}.weight": torch.full((64, 1), i + 1.0) for i in range(count)}
    sources = {name: TensorSource(x.dtype, (64, 1), x.__getitem__) for name, x in values.items()}
    adapt = stream_blocks(
        keep_sources, "blocks", NPU, lambda *_: torch.float32, lambda *_: resident
    )
    logs = []
    with streams.installed(), mock.patch.object(offload, "_SLAB_BYTES", slab):
        adapt(network, sources)
        for index, block in enumerate(network.blocks):
            log_block = lambda *_, index=index: streams.log.append(str(index + 1))  # noqa: E731
            block.register_forward_pre_hook(log_block)
        for last in forwards:
            streams.log.clear()
            result = network(torch.zeros(64), last)
            computed = range(1, (last or count) + 1)
            assert result.tolist() == [float(sum(computed))] * 64
            logs.append(", ".join(streams.log))
    return logs


def test_the_order_of_copies_events_and_blocks() -> None:
    """A block is copied while the block before it computes, after its buffer is free.

    A and B are the events of the first buffer (copy complete, block done), C and D those of the
    second. After the last block the first one of the next forward is copied.
    """
    first, second, third = record_forwards(3, 0, [None] * 3)
    assert first == (
        "wait B, copy 1, mark A, wait D, copy 2, mark C, behind A, 1, done B, "
        "wait B, copy 3, mark A, behind C, 2, done D, "
        "wait D, copy 1, mark C, behind A, 3, done B"
    )
    assert second == (
        "wait B, copy 2, mark A, behind C, 1, done D, "
        "wait D, copy 3, mark C, behind A, 2, done B, "
        "wait B, copy 1, mark A, behind C, 3, done D"
    )
    assert third == first.removeprefix("wait B, copy 1, mark A, ")


def test_skipped_blocks_are_not_copied() -> None:
    """Only the first block computes: it stays in its buffer."""
    _, skipped, skipped_again, full_forward = record_forwards(4, 0, [None, 1, 1, None])
    assert skipped.count("copy") == 1 and skipped_again.count("copy") == 0
    assert full_forward.count("copy") == 3, "of 3, of 4, and of 1 for the next forward"


def test_copies_have_the_time_of_resident_blocks() -> None:
    """Blocks 1, 3 and 5 of six are resident: the copy of 6 is started before 3, not before 4."""
    _, forward_log = record_forwards(6, 3, [None, None])
    assert forward_log == (
        "wait B, copy 4, mark A, 1, behind C, 2, done D, "
        "wait D, copy 6, mark C, 3, behind A, 4, done B, "
        "wait B, copy 2, mark A, 5, behind C, 6, done D"
    )


def test_two_blocks_or_fewer_have_nothing_to_wait_for() -> None:
    for resident in (1, 2, 3, 9):
        assert record_forwards(3, resident, [None, None]) == ["1, 2, 3"] * 2


def test_blocks_may_end_amid_a_slab_of_host_memory() -> None:
    """Blocks of 512 bytes in slabs of 384 are copied in parts."""
    logs = record_forwards(3, 0, [None] * 2, slab=384)
    assert logs[1].count("copy") > 3


def test_reference_keys_are_copied_while_the_block_before_computes() -> None:
    """One branch of guidance skips block 2. A: the memory is free; B to H: a copy is complete.

    The keys of layer i are i, its values i + 10.
    """
    layout = ReferenceLayout((2, 1, 2), (3, 1, 2), padded_len=6, full_frames=3, first_column=0)
    streams = Streams()
    with streams.installed():
        kv = ReferenceKV(layout, NPU, in_host_memory=True)
        for layer in range(3):
            key = torch.full((1, 4, 1, 8), layer + 1.0)
            kv.record(layer, 0, key, key + 10, (0, 1))
        kv.is_complete = True
        for branch, num_layers in (((0, 1, 2), 3), ((0, 2), 2), ((0, 1, 2), 1)):
            for layer in branch[:num_layers]:
                streams.log.append(f"layer {layer + 1}")
                chunks = ReferencePass(kv, 0.0, branch).get_layer(layer).chunks
                assert [x.unique().tolist() for x in chunks[0]] == [[layer + 1.0], [layer + 11.0]]
    assert ", ".join(streams.log) == (
        "layer 1, done A, wait A, copy 1, wait A, copy 11, mark B, "
        "done A, wait A, copy 2, wait A, copy 12, mark C, behind B, "
        "layer 2, done A, wait A, copy 3, wait A, copy 13, mark D, behind C, "
        "layer 3, done A, wait A, copy 1, wait A, copy 11, mark E, behind D, "
        "layer 1, done A, wait A, copy 3, wait A, copy 13, mark F, behind E, "
        "layer 3, done A, wait A, copy 1, wait A, copy 11, mark G, behind F, "
        "layer 1, done A, wait A, copy 2, wait A, copy 12, mark H, behind G"
    )


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A t2v-A14B of four layers with a head size that NPU kernels support."""
    out = tmp_path_factory.mktemp("deep") / "checkpoint"
    return checkpoint.make_rig_checkpoint(out, heads=2, layers=4)


COMMON_FLAGS = (
    "--task t2v-A14B --device npu --size 64*64 --frame_num 1 --sample_steps 3 --base_seed 7"
)


@pytest.mark.dist
def test_latents_are_those_of_whole_networks(deep: Path) -> None:
    """Two experts and both branches of guidance; one expert at a time is on the device."""
    argv = [*COMMON_FLAGS.split(), "--ckpt_dir", str(deep), "--offload_model"]
    (expected,) = run_on_ranks(1, make_latents, [*argv, "false"], "A2")
    for way in ("block", "block --resident_blocks 2"):
        (actual,) = run_on_ranks(1, make_latents, [*argv, *way.split()], "A2")
        assert torch.equal(actual, expected) and actual.isfinite().all(), way
    ((residency_states, actual),) = run_on_ranks(1, record_residency, [*argv, "cpu"])
    assert residency_states == [[True], [False, True], [True, False], [False, True], [False, False]]
    assert torch.equal(actual, expected)


def record_residency(argv: list[str]) -> tuple[list[list[bool]], Tensor]:
    """Record which experts are resident: after loads, after their first calls, after a run."""
    run_settings, pipeline = build_run(argv, "A2")
    networks, residency_states = [], []

    def record_state() -> None:
        residency_states.append([bool(x.head.head.weight.isfinite().all()) for x in networks])

    for name in run_settings.params.preset.experts:
        networks.append(pipeline.experts.get(name))
        record_state()
    for count, network in enumerate(networks, len(residency_states)):
        network.register_forward_hook(
            lambda *_, count=count: record_state() if len(residency_states) == count else None
        )
    embeds = torch.randn(4, run_settings.setup.checkpoint.config["text_dim"])
    embeds_ref = weakref.ref(embeds)
    pipeline.generate_latents(run_settings.params, Inputs(prompt_embeds=embeds))
    del embeds
    assert embeds_ref() is None, "the text is not kept on the device either"
    video_latents = pipeline.generate_latents(run_settings.params)
    record_state()
    return residency_states, video_latents


@pytest.mark.dist
@pytest.mark.slow
def test_each_rank_streams_its_blocks(deep: Path) -> None:
    argv = [*COMMON_FLAGS.split(), "--ckpt_dir", str(deep), *["--ulysses_size", "2"]]
    expected = run_on_ranks(2, make_latents, [*argv, "--offload_model", "true"], "A2")
    for way in ("cpu", "block --resident_blocks 1"):
        actual = run_on_ranks(2, make_latents, [*argv, "--offload_model", *way.split()], "A2")
        assert all(map(torch.equal, actual, expected))


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_kept_keys_without_room_are_in_host_memory(ranks: int, tmp_path: Path) -> None:
    """The latents are those of a device with room; copies run as late as their events allow."""
    sizes = {"heads": 4, "layers": 5}
    folder = checkpoint.make_rig_checkpoint(tmp_path / "causal", "causal-1.3B", **sizes)
    argv = ["--task", "causal-1.3B", "--device", "npu", "--ckpt_dir", str(folder)]
    argv += ["--size", "64*64", "--frame_num", "45", "--local_attn_size", "7", "--base_seed", "7"]
    argv += [
        "--ulysses_size",
        str(ranks),
        "--comm_type",
        str(ranks - 1),
        "--clip_prompts",
        "a",
        "b",
    ]
    expected = run_on_ranks(ranks, make_latents, argv, "A2")
    for latents, num_copies in run_on_ranks(ranks, make_latents_without_room, argv):
        assert torch.equal(latents, expected[0]) and latents.isfinite().all()
        assert num_copies > 0


def make_latents_without_room(argv: list[str]) -> tuple[Tensor, int]:
    """Makes latents on a device with a byte too few; returns the number of copies, too."""
    run, pipeline = build_run(argv, "A2")
    sizes = memory_estimate.estimate_network_sizes(run.setup, run.params)
    usage = memory_estimate.compute_stage_memory(run.setup, run.params, sizes)["denoising"]
    num_bytes, copies = RESERVED_BYTES + usage.total() - 1, list[object]()

    class CountingStream(LateStream):
        def copy(self, *arguments: Any) -> None:
            copies.append(arguments)
            super().copy(*arguments)

    with (
        mock.patch("wan.modules.host_kv.CopyStream", CountingStream),
        mock.patch.object(Device, "process_memory", lambda _: num_bytes),
    ):
        return pipeline.generate_latents(run.params, run.inputs), len(copies)
