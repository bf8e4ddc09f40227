"""Compares two videos frame by frame, and lists suspicious properties of each.

    python tools/compare_videos.py A.mp4 B.mp4 [--joins 77,153] [--json FILE]
    python tools/compare_videos.py FOLDER_A FOLDER_B --json FILE

B is compared with A, the reference; of two folders, the videos with equal names. VMAF, SSIM, PSNR
and XPSNR are those of the ffmpeg in imageio-ffmpeg. Measures without a reference are each video's
detail and motion (SI and TI of ITU-T P.910). Suspicious are frames that are black, without detail
or equal to the previous one, blocking artifacts and areas that lost their texture; at the joins of
a long video, the motion is compared with that of other frames. mp4 is lossy: the same frames
encoded twice differ by about 40 dB. contact_sheet.py draws the videos.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.contact_sheet import read_frames
from wan.app.flag_parser import Parser
from wan.app.programs import make_output_path_type, run_program
from wan.media.ffmpeg import build_input_args, describe_failure, run_ffmpeg
from wan.media.video_reader import read_video
from wan.settings.errors import InputError, escape_controls
from wan.settings.values import integer
from wan.utils.files import OutputKind, write_output

FULL_REFERENCE_MEASURES = ("vmaf", "ssim", "psnr", "xpsnr")
NO_REFERENCE_MEASURES = ("detail", "motion", "blocks", "untextured")
VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov")
_BLACK, _PLAIN, _STILL, _BLOCKS = 24.0, 1.0, 0.02, 4.0  # luma, SI, luma of a pixel, ratio
_CELL = 16  # pixels of a side: two latents
_RUN = 4  # equal frames in a row from which on a video counts as frozen
_HIGHEST = 100.0  # dB; replaces infinity for equal frames
Frames = dict[str, list[float]]


def _is_figures(path: Path) -> bool:
    """Whether a JSON file has pairs of videos with their figures, as `--json` writes them."""
    content: Any = json.loads(path.read_bytes())
    pairs = content.get("pairs") if isinstance(content, dict) else None
    keys = {"videos", "frames", "suspicious"}
    return isinstance(pairs, list) and all(isinstance(x, dict) and keys <= x.keys() for x in pairs)


FIGURES = OutputKind("figures of compare_videos.py", _is_figures)


def _run_filters(*arguments: str, folder: Path) -> str:
    """Runs ffmpeg in a folder, and returns its standard output."""
    process = run_ffmpeg(arguments, folder)
    if process.returncode:
        why = describe_failure(process.stderr.decode(errors="replace"))
        raise InputError(f"ffmpeg cannot read this: {why}")
    return process.stdout.decode(errors="replace")


def read_video_size(video: Path) -> tuple[int, int, int]:
    """Returns the width, height and number of frames of a video."""
    try:
        reader = read_video(video, "videos")
        return *reader.size, reader.num_frames
    except InputError as error:
        raise InputError(f"{video} is no video that ffmpeg can read.") from error


def measure_against(reference: Path, other: Path) -> Frames:
    """Measures each frame of `other` against the reference; higher is nearer.

    Raises:
        InputError: The videos differ in size or number of frames.
    """
    sizes = [read_video_size(video) for video in (reference, other)]
    if sizes[0] != sizes[1]:
        sizes_text = " and ".join("{}x{} with {} frames".format(*size) for size in sizes)
        raise InputError(f"{reference} and {other} cannot be compared: {sizes_text}.")
    streams = "".join(
        f"[{number}:v]split=4" + "".join(f"[{number}{i}]" for i in range(4)) + ";"
        for number in (0, 1)
    )
    filters = (
        "libvmaf=log_fmt=json:log_path=vmaf",
        "psnr=stats_file=psnr",
        "ssim=stats_file=ssim",
        "xpsnr=stats_file=xpsnr",
    )
    graph = streams + ";".join(f"[1{i}][0{i}]{name}" for i, name in enumerate(filters))
    inputs = [part for video in (reference, other) for part in build_input_args(video)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _run_filters(*inputs, "-lavfi", graph, "-f", "null", "-", folder=folder)
        vmaf = json.loads((folder / "vmaf").read_text())["frames"]
        texts = {name: (folder / name).read_text() for name in FULL_REFERENCE_MEASURES[1:]}
    measures = {"vmaf": [frame["metrics"]["vmaf"] for frame in vmaf]}
    for name, pattern in (
        ("ssim", r"All:(\S+)"),
        ("psnr", r"psnr_avg:(\S+)"),
        ("xpsnr", r"XPSNR y: *(\S+)"),
    ):
        values = [float(value) for value in re.findall(pattern, texts[name])]
        measures[name] = [min(value, _HIGHEST) for value in values] if name != "ssim" else values
    return measures


def measure_single(video: Path) -> Frames:
    """Measures each frame's luma, detail, motion, blocks, and share of cells without texture."""
    filter_chain = "signalstats,siti,blockdetect,metadata=print:file=-"
    arguments = (*build_input_args(video), "-vf", filter_chain, "-f", "null", "-")
    printed = _run_filters(*arguments, folder=Path.cwd())
    names = {"bright": "signalstats.YHIGH", "step": "signalstats.YDIF", "detail": "siti.si",
             "motion": "siti.ti", "blocks": "block"}  # fmt: skip
    measures = {
        name: [float(value) for value in re.findall(rf"lavfi\.{re.escape(key)}=(\S+)", printed)]
        for name, key in names.items()
    }
    measures["untextured"] = [
        _compute_untextured_share(np.asarray(frame)) for frame in read_frames(video)
    ]
    return measures


def _compute_untextured_share(frame_HW3: np.ndarray) -> float:
    """Returns the share of cells with nearly constant luma, a sign of lost content."""
    luma = frame_HW3.astype(np.float32).mean(axis=2)
    rows, columns = (size // _CELL for size in luma.shape)
    if not rows or not columns:
        return 0.0
    cells = luma[: rows * _CELL, : columns * _CELL].reshape(rows, _CELL, columns, _CELL)
    return float((cells.std(axis=(1, 3)) < 0.5).mean())


def find_suspicions(
    measures: Frames, joins: Sequence[int] = (), reference: Frames | None = None
) -> list[str]:
    """Returns sentences about suspicious frames and joins."""
    suspicions = []
    for defect, indices in (
        ("black", [n for n, value in enumerate(measures["bright"]) if value <= _BLACK]),
        ("without detail", [n for n, value in enumerate(measures["detail"]) if value < _PLAIN]),
    ):
        if indices:
            suspicions.append(f"{defect}: {_format_ranges(indices)}")
    still = [n for n, value in enumerate(measures["step"]) if n and value < _STILL]
    runs = [run for run in _group_runs(still) if len(run) >= _RUN]
    if runs:
        suspicions.append(f"frozen: {_format_ranges([n for run in runs for n in run])}")
    blocks, untextured = (statistics.fmean(measures[name]) for name in ("blocks", "untextured"))
    if blocks > _BLOCKS:
        suspicions.append(f"blocky: {blocks:.1f}")
    if reference is not None and untextured > statistics.fmean(reference["untextured"]) + 0.2:
        suspicions.append(f"areas lost their texture: {untextured:.0%} of the cells")
    other_steps = [value for n, value in enumerate(measures["step"]) if n and n not in joins]
    for join in joins:
        if join >= len(measures["step"]):
            raise InputError(f"There is no join at frame {join} of {len(measures['step'])}.")
        ratio = measures["step"][join] / max(statistics.median(other_steps), 1e-6)
        suspicions.append(f"join at {join}: {ratio:.1f} times the step between other frames")
    return suspicions


def _group_runs(indices: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _format_ranges(indices: Sequence[int]) -> str:
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in _group_runs(indices)]
    return "frames " + ", ".join(parts)


def compare_pair(reference: Path, other: Path, joins: Sequence[int] = ()) -> dict[str, Any]:
    """Measures a pair of videos: each frame, the means, and suspicious properties."""
    distance, each = (
        measure_against(reference, other),
        [measure_single(video) for video in (reference, other)],
    )
    means = {name: statistics.fmean(distance[name]) for name in FULL_REFERENCE_MEASURES}
    alone = [{name: statistics.fmean(x[name]) for name in NO_REFERENCE_MEASURES} for x in each]
    frames = {
        f"{name}_{ab}": measures[name]
        for ab, measures in zip("AB", each, strict=True)
        for name in ("detail", "motion", "step")
    }
    return {
        "videos": [str(reference), str(other)],
        "means": means | {"worst_psnr": min(distance["psnr"]), "worst_vmaf": min(distance["vmaf"])},
        "alone": alone,
        "suspicious": [find_suspicions(each[0], joins), find_suspicions(each[1], joins, each[0])],
        "frames": distance | frames,
    }


def pair_videos(reference: Path, other: Path) -> list[tuple[Path, Path]]:
    """Returns the pairs to compare: both videos, or those of equal names in two folders."""
    for path in (reference, other):
        if not path.exists():
            raise InputError(f"{path} does not exist; give two videos or two folders.")
    if reference.is_dir() != other.is_dir():
        raise InputError(f"{reference} and {other} are a folder and a file; give two of a kind.")
    if not reference.is_dir():
        return [(reference, other)]
    names = [
        {p.name for p in folder.iterdir() if p.suffix in VIDEOS} for folder in (reference, other)
    ]
    if not names[0] & names[1]:
        raise InputError(f"{reference} and {other} have no videos of equal names.")
    for name in sorted(names[0] ^ names[1]):
        print(escape_controls(f"Only in one folder: {name}"), file=sys.stderr)
    return [(reference / name, other / name) for name in sorted(names[0] & names[1])]


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """Formats each pair's means and the overall means as a Markdown table."""
    columns = [*FULL_REFERENCE_MEASURES, "worst_psnr", "worst_vmaf"]
    lines = ["| B against A | " + " | ".join(columns) + " | detail A, B | motion A, B |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    rows = [
        (Path(result["videos"][1]).name, result["means"], result["alone"]) for result in results
    ]
    if len(rows) > 1:
        mean = {name: statistics.fmean(row[1][name] for row in rows) for name in columns}
        both = [
            {
                name: statistics.fmean(row[2][ab][name] for row in rows)
                for name in NO_REFERENCE_MEASURES
            }
            for ab in (0, 1)
        ]
        rows.append((f"mean of {len(rows)}", mean, both))
    for name, means, both in ((escape_controls(name), *rest) for name, *rest in rows):
        cells = [f"{means[column]:.4f}" if column == "ssim" else f"{means[column]:.2f}"
                 for column in columns]  # fmt: skip
        cells += [f"{both[0][kind]:.1f}, {both[1][kind]:.1f}" for kind in ("detail", "motion")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reference", type=Path, metavar="A", help="a video or a folder")
    parser.add_argument("other", type=Path, metavar="B", help="the video or folder compared with A")
    parser.add_argument("--joins", default="", help="first frames after joins: 77,153")
    parser.add_argument(
        "--json", type=make_output_path_type(FIGURES), help="all figures, also of each frame"
    )
    options = parser.parse_args(argv)
    if not re.fullmatch(r"(\d+(,\d+)*)?", options.joins):
        raise InputError("--joins", options.joins, "must be numbers of frames: 77,153")
    frame = integer(0, 10**9)
    joins = [frame("--joins", number) for number in options.joins.split(",") if number]
    results = [compare_pair(*pair, joins) for pair in pair_videos(options.reference, options.other)]
    if options.json is not None:
        with write_output(options.json, FIGURES) as temporary:
            temporary.write_text(json.dumps({"pairs": results}, indent=1) + "\n")
    print(format_table(results))
    for result in results:
        for video, suspicions in zip(result["videos"], result["suspicious"], strict=True):
            for text in suspicions:
                print(escape_controls(f"{video}: {text}"))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
