"""Compares decoding with diffusers' on one rank, and one rank with several that share the rows.

    python -m benchmarks.vae --version 2.1 --latent 3,16,26 --ranks 2 --rounds 10 --json FILE

Weights are random, widths are the published ones. Each rank has one thread, so ranks on one machine
need as many cores. The program prints median seconds, the ratio inside a round, the distance of the
results and the peak memory of each; the JSON file has the same figures.

    python -m benchmarks.vae --seams examples/demo/t2v-A14B/Wan2.1_VAE.safetensors docs/demo.png

With --seams the program decodes an image with a trained VAE as a full frame and in tiles. It
prints how much the difference between both changes from one row or column to the next: where a
tile or its blending begins, and elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import Tensor

from benchmarks import common
from benchmarks.common import CPU, Times, run_on_ranks, take_slowest_rank, time_interleaved
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.media.images import convert_image_to_tensor
from wan.modules.vae import tiles, video_vae
from wan.modules.vae.network import Autoencoder
from wan.modules.vae.rows import ALL_ROWS, Rows
from wan.modules.vae.sharded import ShardedRows, split_rows_evenly
from wan.modules.vae.video_vae import build_published_vae
from wan.settings.values import integer

WIDTHS = {"2.1": {"base_dim": 96}, "2.2": {"base_dim": 160, "decoder_base_dim": 256}}
RESIDUAL = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
WITH_2_2 = {"z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, **RESIDUAL}


def make_autoencoder(version: str) -> Autoencoder:
    torch.manual_seed(0)
    return build_published_vae(version).eval().requires_grad_(False)


def make_latents(version: str, size: tuple[int, ...]) -> Tensor:
    channels = {"2.1": 16, "2.2": 48}[version]
    return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(1))


def decode_latents(network: Autoencoder, z_BZfhw: Tensor, rows: Rows = ALL_ROWS) -> Tensor:
    return torch.cat(list(network.decode(z_BZfhw, rows)), dim=2).clamp_(-1, 1)


def measure_against_diffusers(version: str, size: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Times our decoder and diffusers' on one rank in turn; also their distance and memory."""
    network, z = make_autoencoder(version), make_latents(version, size)
    sizes: dict[str, Any] = WIDTHS[version] | (WITH_2_2 if version == "2.2" else {})
    theirs: Any = AutoencoderKLWan(**sizes).eval()
    theirs.load_state_dict(network.state_dict())
    runs: dict[str, common.Run] = {
        "diffusers": lambda: theirs.decode(z, return_dict=False)[0],
        "ours": partial(decode_latents, network, z),
    }
    distance = (runs["ours"]() - runs["diffusers"]()).abs().max().item()
    times = time_interleaved(runs, rounds)
    peaks = {name: common.measure_peak_bytes(run, CPU) for name, run in runs.items()}
    return {"times": times, "peak_bytes": peaks, "distance": distance}


def measure_shared_rows(version: str, size: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Times decoding on rank 0 while the others wait, and on all ranks."""
    network, z = make_autoencoder(version), make_latents(version, size)
    rows = ShardedRows(None, split_rows_evenly(size[1], dist.get_world_size()), CPU)
    is_main = dist.get_rank() == 0
    runs: dict[str, common.Run] = {
        "one rank": partial(decode_latents, network, z) if is_main else lambda: None,
        "all ranks": partial(decode_latents, network, z, rows),
    }
    expected, decoded = runs["one rank"](), runs["all ranks"]()
    distance = (decoded - expected).abs().max().item() if is_main else 0.0
    times = time_interleaved(runs, rounds)
    peaks = {}
    for name, run in runs.items():
        dist.barrier()
        peaks[name] = common.measure_peak_bytes(run, CPU)
    return {"times": times, "peak_bytes": peaks, "distance": distance}


def measure_seams(weights: Path, image: Path) -> dict[str, Any]:
    """Measures the seams in five frames, each the image shifted by some pixels."""
    blueprint = video_vae.read_vae_spec(weights)
    loaded = blueprint.load(device=CPU, dtype_of=lambda *_: torch.float32)
    network = video_vae.VideoVAE(loaded)
    still = convert_image_to_tensor(Image.open(image))
    still = still[:, : still.shape[1] // 64 * 64, : still.shape[2] // 64 * 64]
    z = network.encode(torch.stack([still.roll(3 * frame, 2) for frame in range(5)], dim=1))
    error = network.decode_in_tiles(z) - network.decode(z)
    figures: dict[str, Any] = {"frames": [*error.shape[1:]]}
    for name, other_axes, axis in (("rows", (0, 1, 3), 2), ("columns", (0, 1, 2), 3)):
        steps = error.diff(dim=axis).abs().mean(dim=other_axes)
        begins = range(tiles.STEP, error.shape[axis], tiles.STEP)
        borders = [index - 1 for begin in begins for index in (begin, begin + 64)]
        at = [steps[index].item() for index in borders if index < len(steps)]
        figures[name] = {
            "at borders": [round(step, 4) for step in at],
            "elsewhere, median": round(steps.median().item(), 4),
            "elsewhere, greatest": round(steps.max().item(), 4),
            "larger elsewhere": [round((steps > step).float().mean().item(), 3) for step in at],
        }
    return figures


def print_report(
    title: str, times: Times, numerator: str, denominator: str, details: str
) -> dict[str, Any]:
    spreads = {name: common.compute_spread(seconds) for name, seconds in times.items()}
    ratio = common.compute_ratios(times[numerator], times[denominator])
    each = ", ".join(f"{name} {s['median']:.2f} s" for name, s in spreads.items())
    print(
        f"{title}: {each}; {numerator} / {denominator} {ratio['median']:.3f} ({details})",
        flush=True,
    )
    return {
        "title": title,
        "seconds": spreads,
        f"{numerator} / {denominator}": ratio,
        "facts": details,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--version", choices=tuple(WIDTHS), default="2.1")
    parser.add_argument(
        "--latent", type=common.parse_token_grid, default=(3, 16, 26), metavar="F,H,W"
    )
    parser.add_argument("--ranks", type=make_argument_type(integer(1, 64)), default=2)
    parser.add_argument("--rounds", type=make_argument_type(integer(1, 10_000)), default=10)
    parser.add_argument("--json", type=common.results_file)
    parser.add_argument("--seams", type=Path, nargs=2, metavar=("WEIGHTS", "IMAGE"))
    options = parser.parse_args(argv)
    if options.seams is not None:
        steps = measure_seams(*options.seams)
        print(json.dumps(steps, indent=1))
        common.write_json(options.json, CPU, [steps])
        return
    arguments = options.version, options.latent, options.rounds
    results = []
    (result,) = run_on_ranks(1, measure_against_diffusers, *arguments)
    peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["peak_bytes"].items())
    details = f"{result['distance']:.1e} apart; memory {peaks}"
    title = f"VAE {options.version}, latents {options.latent}"
    results.append(print_report(title, result["times"], "ours", "diffusers", details))
    if options.ranks > 1:
        results_by_rank = run_on_ranks(options.ranks, measure_shared_rows, *arguments)
        times = take_slowest_rank([rank["times"] for rank in results_by_rank])
        most = [f"{rank['peak_bytes']['all ranks'] / 1e9:.2f}" for rank in results_by_rank]
        alone = f"alone {results_by_rank[0]['peak_bytes']['one rank'] / 1e9:.2f}"
        details = (
            f"{results_by_rank[0]['distance']:.1e} apart; GB per rank {', '.join(most)}, {alone}"
        )
        results.append(
            print_report(f"{options.ranks} ranks", times, "one rank", "all ranks", details)
        )
    common.write_json(options.json, CPU, results)


if __name__ == "__main__":
    sys.exit(run_program(main))
