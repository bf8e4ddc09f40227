"""The row-parallel VAE against one process; each rank computes with one thread."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.conftest import slow
from tests.dist import Ranks, make_rank_envs, run_on_ranks
from tests.pipelines import build_cpu_pipeline
from wan.app.resolve import make_setup
from wan.checkpoint.layout import inspect_checkpoint
from wan.cli import main as generate
from wan.device import select_device
from wan.distributed.ulysses import SINGLE_RANK
from wan.modules.vae import winograd
from wan.modules.vae.network import Autoencoder, ResidualBlock
from wan.modules.vae.rows import ALL_ROWS, Rows
from wan.modules.vae.sharded import ShardedRows, split_rows_evenly
from wan.modules.vae.video_vae import FrameCollector, LatentBlocks, read_vae_spec
from wan.pipeline import memory_estimate
from wan.pipeline.vae_runner import VaeRunner
from wan.settings.presets import PRESETS
from wan.settings.run_options import read_run_options

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


@cache
def network(path: Path) -> Autoencoder:
    return read_vae_spec(path).load(device=CPU, dtype_of=lambda *_: torch.float32)


def make_sharded_rows(height: int) -> ShardedRows:
    return ShardedRows(None, split_rows_evenly(height, torch.distributed.get_world_size()), CPU)


def make_random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def compute_distances(
    path: Path, cases: list[tuple[int, ...]], dtype: torch.dtype
) -> list[tuple[float, float]]:
    """On the main rank: return the errors of decoding and encoding against one process.

    cases: frames, rows and columns of the latents, and extra rows of pixels.
    """
    results, autoencoder = [], network(path).to(dtype)
    for frames, height, width, extra_rows in cases:
        z = make_random(1, autoencoder.version.z_dim, frames, height, width).to(dtype)
        tall, wide = (autoencoder.version.scale * side for side in (height, width))
        video = make_random(1, 3, 4 * frames - 3, tall + extra_rows, wide).to(dtype).tanh()
        rows = make_sharded_rows(height)
        if rows.is_idle:
            join_agreements(rows, frames)
            continue
        shards = decode_and_encode(autoencoder, z, video, rows)
        if rows.rank == 0:
            unsharded = decode_and_encode(autoencoder, z, video, ALL_ROWS)
            results.append(tuple(map(distance, shards, unsharded)))
    return results


def join_agreements(rows: ShardedRows, frames: int) -> None:
    """Takes part in those of decoding and encoding, without rows."""
    for _ in range(2):
        rows.agree(True)
        rows.join_memory_agreements(frames + 1)


def decode_and_encode(
    autoencoder: Autoencoder, z: Tensor, video: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    frames = torch.cat(list(autoencoder.decode(z, rows)), dim=2).clamp(-1, 1)
    return frames, autoencoder.encode(video, rows)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


FILES = {"2.1": ("t2v-A14B", "Wan2.1_VAE.pth"), "2.2": ("ti2v-5B", "Wan2.2_VAE.pth")}
# frames, rows, columns, more rows of pixels: few and odd rows, fewer than ranks, more than a frame
SHAPES = [(1, 1, 3, 0), (2, 3, 2, 0), (1, 5, 3, 0), (3, 7, 2, 0)]
LONG = (21, 5, 3, 0)
WIDE = (3, 3, 256, 0)  # wide enough that the largest layers process single frames; slow in float64


@pytest.mark.parametrize(
    ("world", "version", "dtype", "limit"),
    [
        (w, v, t, limit) if (w, v, t) == (3, "2.1", torch.float64) else slow(w, v, t, limit)
        for w, v in product((2, 3, 4), FILES)
        for t, limit in ((torch.float32, 5e-6), (torch.float64, 1e-12))
    ],
    ids=str,
)
def test_any_height_and_number_of_ranks(
    tiny, world: int, version: str, dtype: torch.dtype, limit: float
) -> None:
    """Decoding and encoding. float64 shows that no row is missing or wrong; in float32 PyTorch
    takes other kernels for small convolutions than for large ones.
    """
    shapes = [*SHAPES, (2, 3, 2, 7)] if version == "2.1" else SHAPES
    shapes = [*shapes, WIDE] if dtype == torch.float32 else shapes
    shapes = [*shapes, LONG] if world == 4 and dtype == torch.float64 else shapes
    task, file = FILES[version]
    main, *idle_results = run_on_ranks(world, compute_distances, tiny(task) / file, shapes, dtype)
    assert len(main) == len(shapes) and not any(idle_results)
    assert all(max(pair) <= limit for pair in main), main


def check_winograd(path: Path) -> None:
    """Rows of several ranks, and a rank that runs out of memory in its second latent frame."""
    autoencoder = network(path).float()
    winograd.is_faster = lambda *_: True  # type: ignore[assignment]
    for height in (3, 8):
        z = make_random(1, autoencoder.version.z_dim, 2, height, 5)
        scale = autoencoder.version.scale
        video = make_random(1, 3, 5, height * scale, 3 * scale).tanh()
        rows = make_sharded_rows(height)
        if rows.is_idle:
            join_agreements(rows, 2)
            continue
        shards = decode_and_encode(autoencoder, z, video, rows)
        if rows.rank == 0:
            assert all(map(torch.equal, shards, decode_and_encode(autoencoder, z, video, ALL_ROWS)))
    winograd.is_faster = lambda *_: rows.rank != 1  # type: ignore[assignment]
    shards = decode_and_encode(autoencoder, z, video, rows)  # on different CPUs: direct on all
    if rows.rank == 0:
        winograd.is_faster = lambda *_: False  # type: ignore[assignment]
        alone = decode_and_encode(autoencoder, z, video, ALL_ROWS)
        assert max(map(distance, shards, alone)) <= 5e-6
    winograd.is_faster = lambda *_: True  # type: ignore[assignment]
    fail_in_second_frame = 20  # residual blocks

    def fail(*_: object) -> None:
        nonlocal fail_in_second_frame
        fail_in_second_frame -= 1
        if rows.rank == 1 and not fail_in_second_frame:
            raise MemoryError

    hook = register_module_forward_pre_hook(
        lambda module, _: fail() if isinstance(module, ResidualBlock) else None
    )
    with pytest.raises(MemoryError, match="A rank has run out of memory in the VAE"):
        for _ in autoencoder.decode(z, rows):
            pass
    hook.remove()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512"
)
@pytest.mark.parametrize("world", [2, slow(3)])
def test_winograd_on_ranks_is_bit_equal_to_one(tiny, world: int) -> None:
    for task, file in FILES.values():
        run_on_ranks(world, check_winograd, tiny(task) / file)


def fail_on_one_rank() -> None:
    rank, rows = torch.distributed.get_rank(), make_sharded_rows(4)

    def allocate() -> int:
        if rank == 1:
            raise MemoryError("no room")
        return rank

    with pytest.raises(MemoryError, match="A rank has run out of memory in the VAE"):
        rows.run_with_memory_agreement(allocate)
    assert rows.run_with_memory_agreement(lambda: rank) == rank


def test_all_ranks_give_up_with_one_that_has_no_memory() -> None:
    run_on_ranks(3, fail_on_one_rank)


QUICK = ["--size", "64*96", "--frame_num", "9", "--sample_steps", "1", "--base_seed", "7"]


@pytest.fixture(scope="module")
def alone(tiny, image_path, tmp_path_factory: pytest.TempPathFactory):
    """Arguments of an image run, its frames, and its file of latents, made by one process."""
    arguments = ["--task", "ti2v-5B", "--ckpt_dir", str(tiny("ti2v-5B")), *QUICK, "--save_latents"]
    out = tmp_path_factory.mktemp("alone") / "v.mp4"
    arguments += ["--image", str(image_path)]
    with Ranks([{}], generate.main, [*arguments, "--save_file", str(out)]) as process:
        assert process.wait_for_exit(120) == [0], process.format_outputs()
    return arguments, frames(out), out.with_suffix(".latents.safetensors")


def frames(path: Path) -> Any:
    import imageio.v3 as iio

    return np.asarray(iio.imread(path)).astype(int)


def check_run(ranks: Ranks, out: Path, expected: Any, used: str) -> None:
    codes = ranks.wait_for_exit(120)
    assert not any(codes), ranks.format_outputs()
    difference = np.abs(frames(out) - expected).mean()
    assert difference <= 0.5, f"{difference}: more than an encoder makes of single levels"
    assert json.loads(out.with_suffix(".json").read_text())["used"]["vae"] == used


SECOND_FRAME = ResidualBlock, 20


def run_out_of_memory(
    rank: int, kind: type[nn.Module], failing_call: int, arguments: list[str]
) -> int:
    """Run generate.py; one rank runs out of memory in the n-th call of a layer in decoding."""
    count = 0

    def fail_in_call(module: nn.Module, _: object) -> None:
        nonlocal count
        if isinstance(module, kind) and "decoding" in stages:
            count += 1
            if count == failing_call:
                torch.empty(1 << 60, dtype=torch.uint8)

    stages: set[str] = set()
    decode = Autoencoder.decode_blocks

    def record_decode(*args: Any) -> Any:
        stages.add("decoding")
        return decode(*args)

    if int(os.environ.get("RANK", "0")) == rank:
        Autoencoder.decode_blocks = record_decode  # type: ignore[method-assign]
        register_module_forward_pre_hook(fail_in_call)
    return generate.main(arguments)


@pytest.mark.slow
def test_a_run_and_its_latents_again(alone, tmp_path: Path) -> None:
    """Three ranks encode the image and decode the video; two decode its saved latents."""
    arguments, expected, latents = alone
    out = tmp_path / "v.mp4"
    for world, argv in ((3, arguments), (2, ["--decode_latents", str(latents)])):
        flags = ["--vae_parallel", "--save_file", str(out)]
        with Ranks(make_rank_envs(world), generate.main, [*argv, *flags]) as ranks:
            check_run(ranks, out, expected, "rows shared by all ranks")


@pytest.mark.parametrize(
    ("ranks", "rank", "flags", "used", "failing_layer"),
    [
        (1, 0, [], "tiles", SECOND_FRAME),
        slow(2, 0, [], "rows shared by all ranks", SECOND_FRAME),
        slow(3, 1, ["--vae_parallel"], "tiles", SECOND_FRAME),
        slow(3, 1, ["--vae_parallel"], "tiles", (nn.Conv3d, 1)),
    ],
)
def test_less_memory_than_it_takes(
    ranks: int,
    rank: int,
    flags: list[str],
    used: str,
    failing_layer: tuple[Any, int],
    alone,
    tmp_path,
) -> None:
    """Memory runs out before or in the decoder; all ranks try the next VAE strategy together."""
    arguments, expected, latents = alone
    out = tmp_path / "v.mp4"
    argv = ["--save_file", str(out), *flags]
    argv += arguments if ranks > 1 else ["--decode_latents", str(latents)]
    variables = make_rank_envs(ranks) if ranks > 1 else [{}]
    with Ranks(variables, run_out_of_memory, rank, *failing_layer, argv) as processes:
        check_run(processes, out, expected, used)
    output = processes.format_outputs()
    assert output.count("The VAE has too little memory for") == 1
    assert ("not exact" in output) == (used == "tiles")
    assert sorted(path.name for path in tmp_path.glob("*latents*")) == (
        ["v.latents.safetensors"] if ranks > 1 else []
    )


def test_an_idle_rank_waits_as_often_as_the_others_agree(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agreements are counted in one process, since ranks that miss one wait for a minute.

    The second rank has no rows, because there is only one or the main rank has them all.
    """
    agreements: list[object] = []
    monkeypatch.setattr(
        "wan.modules.vae.sharded.dist.all_reduce", lambda *_, **__: agreements.append(None)
    )
    vae = build_cpu_pipeline("t2v-1.3B", tiny("t2v-1.3B")).vae
    preset, checkpoint = PRESETS["t2v-1.3B"], inspect_checkpoint(tiny("t2v-1.3B"))

    def count_agreements(codec: VaeRunner, frames: int) -> tuple[int, int]:
        """Count the agreements of encoding and of decoding."""
        agreements.clear()
        codec.encode(make_random(3, 4 * frames - 3, 8, 16).tanh())
        encoding = len(agreements)
        blocks = make_random(16, frames, 1, 2).split(2, dim=1)
        latents = LatentBlocks((16, frames, 1, 2), blocks)
        codec.decode(latents, FrameCollector(CPU), lambda: None)
        return encoding, len(agreements) - encoding

    for is_shared, frames in product((True, False), (1, 2, 3)):
        setup = make_setup(
            read_run_options({"vae_parallel": is_shared}), preset, checkpoint, world_size=2
        )[0]
        counts = []
        for rank in (0, 1):

            def rows(height: int, _: bool, rank: int = rank) -> ShardedRows:
                sharded_rows = ShardedRows(SINGLE_RANK, (height, 0), CPU)
                sharded_rows.rank = rank
                return sharded_rows

            counts.append(
                count_agreements(VaeRunner(setup, select_device("cpu"), vae.get, rows), frames)
            )
        main, idle = counts
        assert main == idle and min(main) > frames, (is_shared, frames)


def decode_computed_blocks(path: Path, is_shared: bool) -> tuple[bool, bool]:
    """Returns whether the frames of blocks, which all ranks compute together, are right.

    Also whether an error of the computation ends decoding on this rank.
    """
    world = torch.distributed.get_world_size()
    setup = make_setup(
        read_run_options({"vae_parallel": is_shared}),
        PRESETS["t2v-1.3B"],
        inspect_checkpoint(path),
        world_size=world,
    )[0]
    vae = build_cpu_pipeline("t2v-1.3B", path).vae

    def rows(height: int, is_split: bool) -> ShardedRows:
        return ShardedRows(None, split_rows_evenly(height, world) if is_split else (height, 0), CPU)

    codec = VaeRunner(setup, select_device("cpu"), vae.get, rows)
    latents = make_random(16, 5, 4, 2)

    def denoise(num_blocks: int) -> Iterator[Tensor]:
        for block in latents.split(2, dim=1)[:num_blocks]:
            shared = block / world
            torch.distributed.all_reduce(shared)
            yield shared
        if num_blocks < 3:
            raise ArithmeticError

    collector = FrameCollector(CPU)
    is_main = codec.decode(LatentBlocks(latents.shape, denoise(3)), collector, lambda: None)
    with pytest.raises(ArithmeticError):
        codec.decode(LatentBlocks(latents.shape, denoise(2)), FrameCollector(CPU), lambda: None)
    if not is_main:
        return collector.video.numel() == 0, True
    return distance(collector.video, vae.get().decode(latents)) <= 5e-6 * is_shared, True


@pytest.mark.parametrize("is_shared", [False, True])
def test_blocks_that_all_ranks_compute(tiny, is_shared: bool) -> None:
    """Each is computed between two blocks that are decoded, also on a rank without rows."""
    assert (
        run_on_ranks(2, decode_computed_blocks, tiny("t2v-1.3B"), is_shared) == [(True, True)] * 2
    )


class DamagedError(Exception):
    """A file of weights is damaged; no other VAE strategy is tried."""


@pytest.mark.parametrize(
    ("free", "method"),
    [(1.1, "whole frames"), (0.6, "rows shared by all ranks"), (0.4, "tiles")],
)
def test_a_rank_needs_memory_for_its_own_rows(
    free: float, method: str, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks needs memory for half of the rows; other errors end the run."""
    monkeypatch.setattr("wan.modules.vae.sharded.dist.all_reduce", lambda *_, **__: None)
    setup = make_setup(
        read_run_options({}),
        PRESETS["t2v-1.3B"],
        inspect_checkpoint(tiny("t2v-1.3B")),
        world_size=2,
    )[0]
    needed_bytes = memory_estimate.estimate_vae_activations(setup, "decode", (3, 32, 16))
    device: Any = SimpleNamespace(free_memory=lambda: free * needed_bytes, empty_cache=lambda: None)

    def load() -> NoReturn:
        raise DamagedError

    def rows(height: int, is_shared: bool) -> ShardedRows:
        return ShardedRows(
            SINGLE_RANK, split_rows_evenly(height, 2) if is_shared else (height, 0), CPU
        )

    codec = VaeRunner(setup, device, load, rows)
    with pytest.raises(DamagedError):
        latents = make_random(16, 3, 4, 2)
        codec.decode(LatentBlocks(latents.shape, [latents]), FrameCollector(CPU), lambda: None)
    assert codec.last_method == method
