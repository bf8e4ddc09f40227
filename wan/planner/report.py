"""Prints the plan of `generate.py --plan`: communication, memory, and whether the run fits."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from wan.app.run import Run
from wan.checkpoint.formats.tensor_info import E4M3, TensorInfo
from wan.checkpoint.layout import Checkpoint
from wan.modules import clip, t5
from wan.modules.vae import video_vae
from wan.pipeline.memory_estimate import Usage, place_kept_kv, query_gpu_memory
from wan.planner import placement
from wan.planner.measure import Planner
from wan.planner.placement import list_layouts
from wan.planner.topology import find_nearest_run, iter_decodings
from wan.settings.errors import InputError, escape_controls
from wan.settings.values import format_value
from wan.tasks.base import VideoParams
from wan.utils import env, system


def print_plan_report(run: Run) -> None:
    """Prints the plan of a run; raises InputError if the run does not fit on its device."""
    planning = run.plan_options
    if planning.link_gbs is not None and planning.nodes is None:
        raise InputError("`link_gbs`", None, "has no effect without `nodes`", "add `nodes`")
    planner = Planner(run.setup, run.params)
    memory = run.device_memory or planner.device.capabilities.memory
    if memory is None and planner.device.type == "cuda":
        memory = min(query_gpu_memory("total"), default=None)
    if memory is not None:
        host_memory = system.read_available_memory() if run.device_memory is None else None
        setup = place_kept_kv(run.setup, run.params, planner.device.type, memory, host_memory)
        planner = planner if setup is run.setup else Planner(setup, run.params)
    flag_naming = env.make_flag_naming()
    plan_lines = [*map(flag_naming.render, run.notices), *describe_sources(run)]
    plan_lines += describe_plan(planner, run.settings["task"])
    if planning.nodes is not None:
        plan_lines += map(
            flag_naming.render, _describe_placement(planner, planning.nodes, planning.link_gbs)
        )
    for line in plan_lines:
        _print_wrapped(escape_controls(line))
    sys.stdout.flush()
    _print_wrapped(escape_controls(flag_naming.render(check_plan_memory(planner, memory))))
    free = system.read_available_memory() if run.device_memory is None else memory
    for line in describe_rereads(planner, free or 0):
        _print_wrapped(line)


def _print_wrapped(line: str) -> None:
    """Prints a line in at most 100 columns; the rest is indented to its last column."""
    indent = " " * max(4, line.rfind("  ") + 2)
    wrapper = textwrap.TextWrapper(100, subsequent_indent=indent, break_on_hyphens=False)
    wrapper.break_long_words = False  # paths
    print(wrapper.fill(line))


def describe_sources(run: Run) -> list[str]:
    """Describes where settings come from, a line for each source; the others are defaults."""
    settings_by_source: dict[str, list[str]] = {}
    for name, source in reversed(run.sources.items()):
        if name in run.settings:
            value = run.settings[name]
            text = f"{name} {format_value('*'.join(map(str, value)) if name == 'size' else value)}"
            settings_by_source.setdefault(source, []).append(text)
    return [f"From {source}: {', '.join(texts)}" for source, texts in settings_by_source.items()]


def describe_plan(planner: Planner, task: str) -> list[str]:
    """Describes a run line by line.

    Args:
        task: The task's name as the user typed it.
    """
    setup, params, parallel = planner.setup, planner.params, planner.setup.parallel
    folder, (width, height) = setup.checkpoint.folder, params.video_size
    tokens, need = planner.make_token_plan(parallel), planner.compute_peak_bytes()
    lines = [
        f"Plan: {task}, {width}*{height}, {_describe_frames(params)}, {planner.precision}, "
        f"{_format_count(parallel.world_size, 'rank')} ({planner.device.capabilities.name}); sizes "
        + (f"of {folder}" if folder else "as published (no checkpoint folder)"),
        *describe_checkpoint_files(planner),
        f"Tokens: {tokens.tokens} + {tokens.padded_len - tokens.tokens} padding, "
        f"{tokens.shard_len} per rank",
        planner.measure_forwards(parallel)[0].attention,
    ]
    if setup.policy is not None:
        lines.append(setup.policy.describe(params, sync_branches=parallel.cfg_size == 2))
    lines += [
        *_describe_traffic(planner),
        f"Memory of the fullest rank: {_format_bytes(need)}",
    ]
    mapped_by_stage = planner.sum_mapped_weights()
    for name, usage in planner.compute_stage_memory().items():
        items = [
            f"{label} {_format_bytes(size)}" for label, size in usage.most_common() if size >= 1e6
        ]
        mapped = mapped_by_stage.get(name, Usage()).total()
        items += [f"and mapped from files {_format_bytes(mapped)}"] if mapped >= 1e6 else []
        lines.append(f"  {name:<14}{_format_bytes(usage.total()):>10}  {', '.join(items)}")
    host_bytes = planner.compute_host_bytes()
    if host_bytes:
        lines.append(f"Page-locked host memory of a rank: {_format_bytes(host_bytes)}")
    if setup.keeps_kv_in_host_memory:
        size = _format_bytes(planner.sum_streamed_kv())
        lines.append(f"Kept K/V do not fit on the device: {size} copied from the host per forward")
    num_streamed, forwards, total = planner.count_streamed_blocks()
    if num_streamed:
        is_bound = setup.execution.resident_blocks is None and planner.device.type != "cpu"
        at_most = "at most " if is_bound else ""  # the run keeps as many blocks resident as fit
        blocks, size = _format_count(num_streamed, "block"), _format_bytes(total)
        calls = f" in {_format_count(forwards, 'forward')}"
        if forwards < len(planner.list_branches(parallel)):
            calls = ", once for both guidance branches"
        lines.append(f"Copied per step: {at_most}{size}, {blocks}{calls}")
    if upcast_seconds := planner.estimate_upcast_seconds():
        lines.append(f"Dequantized per step: in {upcast_seconds:.2g} s, by the rate of this CPU")
    return [
        *lines,
        "  not counted: driver, communication buffers, kernels' scratch, fragments",
    ]


def _describe_frames(params: VideoParams) -> str:
    """Describes the number of frames, or the clips and the frames of a clip."""
    if not params.has_clips:
        return f"{params.frame_num} frames"
    frames = params.infer_frames or params.frame_num
    return f"{_format_count(params.num_clip or 0, 'clip')} of {frames} frames"


def describe_checkpoint_files(planner: Planner) -> Iterator[str]:
    """Describes the files of each network of a checkpoint folder and its dtype after loading."""
    setup, ckpt = planner.setup, planner.setup.checkpoint
    device = planner.device.type
    encoders = planner.setup.execution.get_precision(planner.device.type)
    if ckpt.boundary is not None:
        standard = f"the task's is {setup.preset.boundary:g}"
        yield f"  boundary_ratio of model_index.json: {ckpt.boundary:g} ({standard})"
    for expert, dit in ckpt.experts.items():
        infos, note = list(dit.tensors.values()), f"becomes {planner.precision}"
        dtypes = sorted(setup.unconverted_dtypes(device) & {info.dtype for info in infos})
        if setup.quantized_dit is not None:
            export = setup.quantized_dit.experts[expert]
            note += f", its {len(export.linears)} quantised layers are those of {export.weights}"
        elif dtypes:
            in_fp8 = setup.multiplies_fp8 and E4M3 in dtypes
            use = "is multiplied in FP8" if in_fp8 else "stays until it is used"
            note = f"{', '.join(dtypes)} {use}, the rest {note}"
        if infos:
            yield _describe_component(ckpt, f"DiT {expert}", infos, note)
    if (path := ckpt.text_encoder) is not None:
        infos = list(t5.read_text_encoder_spec(path).tensors.values())
        yield _describe_component(ckpt, "text encoder", infos, f"becomes {encoders}")
    if (path := ckpt.tokenizer) is not None:
        yield f"  tokenizer: {_format_paths(ckpt, {path})}"
    if (path := ckpt.image_encoder) is not None:
        infos = list(clip.make_clip_spec(path).tensors.values())
        yield _describe_component(ckpt, "image encoder", infos, f"becomes {encoders}")
    if (path := ckpt.audio_encoder) is not None:
        yield f"  sound encoder: {_format_paths(ckpt, {path})}; runs in fp32 on the CPU"
    if (path := ckpt.vae) is not None:
        infos = list(video_vae.read_vae_spec(path).tensors.values())
        yield _describe_component(ckpt, "VAE", infos, f"becomes {setup.execution.vae_precision}")


def _describe_component(
    checkpoint: Checkpoint, component: str, infos: Iterable[TensorInfo], conversion: str
) -> str:
    sizes = Counter[str]()
    for info in infos:
        sizes[info.dtype] += info.nbytes
    dtypes = ", ".join(f"{dtype} {_format_bytes(size)}" for dtype, size in sizes.most_common())
    paths = _format_paths(checkpoint, {info.file for info in infos})
    return f"  {component}: {paths} ({dtypes}); {conversion}"


def _format_paths(checkpoint: Checkpoint, paths: Iterable[Path]) -> str:
    first, *other_paths = sorted(paths)
    folder = checkpoint.folder
    name = first.relative_to(folder) if folder and first.is_relative_to(folder) else first
    return f"{name} and {len(other_paths)} more" if other_paths else f"{name}"


def describe_rereads(planner: Planner, memory: int) -> Iterator[str]:
    """Describes the stages that read memory-mapped weights again because memory is short.

    Args:
        memory: Available bytes; 0 if unknown.
    """
    stages = planner.compute_stage_memory()
    forwards = planner.count_weight_uses()
    for name, usage in planner.sum_mapped_weights().items():
        size, need = usage.total(), stages[name].total()
        reread_bytes = min(size, size + need - memory)
        if memory and reread_bytes > 0:
            times = forwards if name == "denoising" else 1
            period = "each step" if name == "denoising" else "each call"
            yield (
                f"Of {_format_bytes(size)} mapped weights, {name} reads at least "
                f"{_format_bytes(reread_bytes * times)} from the files again in {period}: "
                f"{_format_bytes(memory)} are available."
            )


def _describe_placement(
    planner: Planner, nodes: int, rates: tuple[float, float] | None
) -> Iterator[str]:
    """Describes the bytes that each layout sends inside and between `nodes` machines."""
    parallel, checkpoint = planner.setup.parallel, planner.setup.checkpoint
    num_bytes = (
        planner.make_token_plan(parallel).padded_len
        * checkpoint.config["dim"]
        * planner.dtype.itemsize
    )
    rank_layouts = list_layouts(parallel.world_size, checkpoint.num_heads, nodes, num_bytes, rates)
    return placement.describe_layouts(rank_layouts, parallel.mesh_shape, rates)


def check_plan_memory(planner: Planner, memory: int | None) -> str:
    """Returns a line that the run fits, or that the memory of the device is unknown.

    Args:
        memory: Bytes of a device; None if unknown.

    Raises:
        InputError: The run does not fit; the remedy is the nearest run that fits.
    """
    if memory is None:
        return "Not compared with a device's memory; give `device_memory` in GB."
    sizes = {name: usage.total() for name, usage in planner.compute_stage_memory().items()}
    stage, need = max(sizes.items(), key=lambda item: item[1])
    for setup, condition in iter_decodings(planner.setup):
        min_bytes = planner.compute_peak_bytes(setup)
        if min_bytes <= memory:
            return (
                f"Fits{condition}: {_format_bytes(min_bytes)} of {_format_bytes(memory)} per rank."
            )
    nearest_run = find_nearest_run(planner, memory)
    remedy = "no topology and no flag would help: choose a smaller `size` or `frame_num`"
    if nearest_run is not None:
        settings, ranks, min_bytes = nearest_run
        size = _format_bytes(min_bytes)
        remedy = f"it fits with {settings} on {_format_count(ranks, 'rank')} ({size})"
    why = f"needs {_format_bytes(need)} on its fullest rank ({stage})"
    why += f", and a device has {_format_bytes(memory)}"
    raise InputError("The run", why=why, remedy=remedy)


def _describe_traffic(planner: Planner) -> list[str]:
    """Describes the bytes that a layer sends to other ranks, in dense and in sparse steps."""
    forward, *_ = planner.measure_forwards(planner.setup.parallel)
    step_kinds = ("",) if len(forward.collectives) == 1 else (" in dense steps", " in sparse steps")
    checkpoint = planner.setup.checkpoint
    calls = checkpoint.config["num_layers"] + checkpoint.num_control_blocks
    calls *= len(planner.list_branches(planner.setup.parallel))
    exchanges = {
        "alltoall_base_": "All-to-all (ranks exchange heads for tokens, and back)",
        "send": "Ring (keys and values are passed on)",
        "_allgather_base_": "Ring (keys and values are gathered)",
    }
    traffic_lines = []
    for step_kind, sends in zip(step_kinds, forward.collectives, strict=True):
        for operation, exchange in exchanges.items():
            sizes = [size for name, size in sends if name == operation]
            tensor_sizes = " or ".join(
                _format_bytes(size) for size in sorted(set(sizes), reverse=True)
            )
            if sizes:
                tensors, total = _format_count(len(sizes), "tensor"), sum(sizes)
                traffic_lines.append(
                    f"{exchange}{step_kind}: {tensors} of {tensor_sizes} per layer, together "
                    f"{_format_bytes(total)}; {_format_bytes(total * calls)} per step and rank"
                )
    return traffic_lines or ["All-to-all: none. Ring: none."]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _format_bytes(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.2f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
