"""Prints the plan of `generate.py --plan`: communication, memory, and whether the run fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from wan import env, host
from wan.checkpoint.files import TensorInfo
from wan.checkpoint.layout import Checkpoint
from wan.pipeline import clip, text, vae
from wan.pipeline.memory import Usage, gpu_memory
from wan.planner import placement
from wan.planner.measure import Planner
from wan.planner.placement import layouts
from wan.planner.topology import decodings, nearest
from wan.run import Run
from wan.settings.errors import InputError
from wan.settings.request import Request


def show(run: Run) -> None:
    """Prints the plan of a run; raises InputError if the run does not fit on its device."""
    planning = run.planning
    if planning.link_gbs is not None and planning.nodes is None:
        raise InputError("`link_gbs`", None, "has no effect without `nodes`", "add `nodes`")
    if planning.host_gbs is not None and run.setup.execution.offload_model != "block":
        remedy = "add `offload_model=block`"
        raise InputError("`host_gbs`", None, "has no effect where no blocks are copied", remedy)
    planner = Planner(run.setup, run.request)
    words = env.words()
    said = [*map(words.render, run.notices)]
    said += lines(planner, run.settings["task"], planning.host_gbs)
    if planning.nodes is not None:
        said += map(words.render, _placed(planner, planning.nodes, planning.link_gbs))
    print(*said, sep="\n", flush=True)
    memory = run.device_memory or planner.device.can.memory
    if memory is None and planner.device.type == "cuda":
        memory = min(gpu_memory("total"), default=None)
    print(words.render(check(planner, memory)))
    free = host.available_memory() if run.device_memory is None else memory
    for line in read_again(planner, free or 0):
        print(line)


def lines(planner: Planner, task: str, host_gbs: float | None = None) -> list[str]:
    """Describes a run line by line.

    Args:
        task: The task's name as the user typed it.
        host_gbs: GB/s of copies from host memory; None if unknown.
    """
    setup, request, parallel = planner.setup, planner.request, planner.setup.parallel
    folder, (width, height) = setup.checkpoint.folder, request.video_size
    tokens, need = planner.tokens(parallel), planner.need()
    found = [
        f"Plan: {task}, {width}*{height}, {_frames(request)}, {planner.precision}, "
        f"{_count(parallel.world_size, 'rank')} ({planner.device.can.name}); sizes "
        + (f"of {folder}" if folder else "as published (no checkpoint folder)"),
        *files(planner),
        f"Tokens: {tokens.tokens} + {tokens.padded - tokens.tokens} padding, "
        f"{tokens.shard_len} per rank",
        planner.forwards(parallel)[0].attention,
    ]
    if setup.policy is not None:
        found.append(setup.policy.describe(request, sync_branches=parallel.cfg_size == 2))
    found += [*_traffic(planner), f"Memory of the fullest rank: {_size(need)}"]
    mapped = planner.mapped()
    for name, usage in planner.stages().items():
        words = [f"{what} {_size(size)}" for what, size in usage.most_common() if size >= 1e6]
        apart = mapped.get(name, Usage()).total()
        words += [f"and mapped from files {_size(apart)}"] if apart >= 1e6 else []
        found.append(f"  {name} {_size(usage.total())}: {', '.join(words)}")
    host = planner.host()
    if host:
        found.append(f"Page-locked host memory of a rank: {_size(host)}")
    moving, forwards, total = planner.streamed()
    if moving:
        fits = setup.execution.resident_blocks is None and planner.device.type != "cpu"
        at_most = "at most " if fits else ""  # the run keeps as many blocks resident as fit
        seconds = (
            "" if host_gbs is None else f", {total / host_gbs / 1e9:.2f} s at {host_gbs:g} GB/s"
        )
        found.append(
            f"Copied per step: {at_most}{_size(total)}, {_count(moving, 'block')} in "
            f"{_count(forwards, 'forward')}{seconds}"
        )
    return [*found, "  not counted: driver, communication buffers, kernels' scratch, fragments"]


def _frames(request: Request) -> str:
    """Describes the number of frames, or the clips and the frames of a clip."""
    if not request.clips:
        return f"{request.frame_num} frames"
    frames = request.infer_frames or request.frame_num
    return f"{_count(request.num_clip or 0, 'clip')} of {frames} frames"


def files(planner: Planner) -> Iterator[str]:
    """Describes the files of each network of a checkpoint folder and its dtype after loading."""
    setup, checkpoint = planner.setup, planner.setup.checkpoint
    device, encoders = (
        planner.device.type,
        planner.setup.execution.precision_on(planner.device.type),
    )
    if checkpoint.boundary is not None:
        standard = f"the task's is {setup.preset.boundary:g}"
        yield f"  boundary_ratio of model_index.json: {checkpoint.boundary:g} ({standard})"
    for expert, dit in checkpoint.experts.items():
        infos, becomes = list(dit.tensors.values()), f"becomes {planner.precision}"
        stay = sorted(setup.kept(device) & {info.dtype for info in infos})
        if setup.quantised is not None:
            export = setup.quantised.experts[expert]
            becomes += f", its {len(export.linears)} quantised layers are those of {export.weights}"
        elif stay:
            used = "is multiplied in FP8" if setup.multiplies_fp8 else "stays until it is used"
            becomes = f"{', '.join(stay)} {used}, the rest {becomes}"
        if infos:
            yield _read_from(checkpoint, f"DiT {expert}", infos, becomes)
    if (path := checkpoint.text_encoder) is not None:
        infos = list(text.blueprint(path).tensors.values())
        yield _read_from(checkpoint, "text encoder", infos, f"becomes {encoders}")
    if (path := checkpoint.tokenizer) is not None:
        yield f"  tokenizer: {_name(checkpoint, {path})}"
    if (path := checkpoint.image_encoder) is not None:
        infos = list(clip.make_clip_spec(path).tensors.values())
        yield _read_from(checkpoint, "image encoder", infos, f"becomes {encoders}")
    if (path := checkpoint.sound_encoder) is not None:
        yield f"  sound encoder: {_name(checkpoint, {path})}; runs in fp32 on the CPU"
    if (path := checkpoint.vae) is not None:
        infos = list(vae.blueprint(path).tensors.values())
        yield _read_from(checkpoint, "VAE", infos, f"becomes {setup.execution.vae_precision}")


def _read_from(checkpoint: Checkpoint, part: str, infos: Iterable[TensorInfo], becomes: str) -> str:
    sizes = Counter[str]()
    for info in infos:
        sizes[info.dtype] += info.nbytes
    held = ", ".join(f"{dtype} {_size(size)}" for dtype, size in sizes.most_common())
    return f"  {part}: {_name(checkpoint, {info.file for info in infos})} ({held}); {becomes}"


def _name(checkpoint: Checkpoint, paths: Iterable[Path]) -> str:
    first, *others = sorted(paths)
    folder = checkpoint.folder
    name = first.relative_to(folder) if folder and first.is_relative_to(folder) else first
    return f"{name} and {len(others)} more" if others else f"{name}"


def read_again(planner: Planner, memory: int) -> Iterator[str]:
    """Describes the stages that read memory-mapped weights again because memory is short.

    Args:
        memory: Available bytes; 0 if unknown.
    """
    stages, forwards = planner.stages(), len(planner.branches(planner.setup.parallel))
    for name, usage in planner.mapped().items():
        size, need = usage.total(), stages[name].total()
        least = min(size, size + need - memory)
        if memory and least > 0:
            times = forwards if name == "denoising" else 1
            each = "each step" if name == "denoising" else "each call"
            yield (
                f"Of {_size(size)} mapped weights, {name} reads at least {_size(least * times)} "
                f"from the files again in {each}: {_size(memory)} are available."
            )


def _placed(planner: Planner, nodes: int, rates: tuple[float, float] | None) -> Iterator[str]:
    """Describes the bytes that each layout sends inside and between `nodes` machines."""
    parallel, checkpoint = planner.setup.parallel, planner.setup.checkpoint
    sequence = planner.tokens(parallel).padded * checkpoint.config["dim"] * planner.dtype.itemsize
    placed = layouts(parallel.world_size, checkpoint.heads, nodes, sequence, rates)
    return placement.lines(placed, parallel.sizes, rates)


def check(planner: Planner, memory: int | None) -> str:
    """Returns a line that the run fits, or that the memory of the device is unknown.

    Args:
        memory: Bytes of a device; None if unknown.

    Raises:
        InputError: The run does not fit; the remedy is the nearest run that fits.
    """
    if memory is None:
        return "Not compared with a device's memory; give `device_memory` in GB."
    sizes = {name: usage.total() for name, usage in planner.stages().items()}
    stage, need = max(sizes.items(), key=lambda item: item[1])
    for setup, words in decodings(planner.setup):
        least = planner.need(setup)
        if least <= memory:
            return f"Fits{words}: {_size(least)} of {_size(memory)} per rank."
    found = nearest(planner, memory)
    remedy = "no topology and no flag would help: choose a smaller `size` or `frame_num`"
    if found is not None:
        settings, ranks, least = found
        remedy = f"it fits with {settings} on {_count(ranks, 'rank')} ({_size(least)})"
    why = f"needs {_size(need)} on its fullest rank ({stage}), and a device has {_size(memory)}"
    raise InputError("The run", why=why, remedy=remedy)


def _traffic(planner: Planner) -> list[str]:
    """Describes the bytes that a layer sends to other ranks, in dense and in sparse steps."""
    forward, *_ = planner.forwards(planner.setup.parallel)
    kinds = ("",) if len(forward.sent) == 1 else (" in dense steps", " in sparse steps")
    checkpoint = planner.setup.checkpoint
    calls = checkpoint.config["num_layers"] + checkpoint.control_blocks
    calls *= len(planner.branches(planner.setup.parallel))
    verbs = {
        "alltoall_base_": "All-to-all (ranks exchange heads for tokens, and back)",
        "send": "Ring (keys and values are passed on)",
        "_allgather_base_": "Ring (keys and values are gathered)",
    }
    found = []
    for kind, sent in zip(kinds, forward.sent, strict=True):
        for operation, words in verbs.items():
            sizes = [size for name, size in sent if name == operation]
            each = " or ".join(_size(size) for size in sorted(set(sizes), reverse=True))
            if sizes:
                tensors, total = _count(len(sizes), "tensor"), sum(sizes)
                found.append(
                    f"{words}{kind}: {tensors} of {each} per layer, together {_size(total)}; "
                    f"{_size(total * calls)} per step and rank"
                )
    return found or ["All-to-all: none. Ring: none."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.2f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
