"""`generate.py --plan` in words: what a run exchanges, what it holds, whether that fits."""

from __future__ import annotations

from wan.planner.measure import Parts, Planner, Sent
from wan.planner.topology import nearest
from wan.settings.errors import InputError


def lines(planner: Planner, task: str) -> list[str]:
    """The plan, a fact a line. task: as it was asked for."""
    setup, request, parallel = planner.setup, planner.request, planner.setup.parallel
    folder, (width, height) = setup.checkpoint.folder, request.video_size
    tokens = planner.tokens(parallel)
    stages = planner.stages()
    return [
        f"Plan: {task}, {width}*{height}, {request.frame_num} frames, {planner.precision}, on "
        f"{planner.device.can.name}, {_count(parallel.world_size, 'rank')}; "
        + (f"sizes of {folder}" if folder else "sizes as published (no checkpoint folder)"),
        f"Tokens: {tokens.tokens} + {tokens.padded - tokens.tokens} padding, "
        f"{tokens.shard_len} per rank",
        planner.attention_line,
        *_traffic(planner),
        f"Memory of the fullest rank: {_size(planner.need())}",
        *(f"  {name} {_size(parts.total())}: {_parts(parts)}" for name, parts in stages.items()),
        "  not counted: the driver's context, buffers of the communication library, what kernels "
        "take for themselves, fragments",
    ]


def check(planner: Planner, memory: int | None) -> str:
    """One line: it fits, or nothing is known to compare with.

    memory: bytes of a device. Raises InputError where the run does not fit; it names what would.
    """
    if memory is None:
        return "Not compared with a device's memory; give --device_memory GB."
    sizes = {name: parts.total() for name, parts in planner.stages().items()}
    stage, need = max(sizes.items(), key=lambda item: item[1])
    if need <= memory:
        return f"Fits: {_size(need)} of {_size(memory)} per rank."
    found = nearest(planner, memory)
    remedy = "no topology and no flag would help: choose a smaller --size or --frame_num"
    if found is not None:
        ranks = _count(found.ranks, "rank")
        remedy = f"it fits with {found.flags} on {ranks} ({_size(found.need)})"
    raise InputError(
        f"The run needs {_size(need)} on its fullest rank ({stage}), and a device has "
        f"{_size(memory)}; {remedy}."
    )


def _traffic(planner: Planner) -> list[str]:
    """What each layer sends, in dense and in sparse steps."""
    parallel = planner.setup.parallel
    forward, *_ = planner.forwards(parallel)
    kinds = ("",) if len(forward.sent) == 1 else (" in dense steps", " in sparse steps")
    calls = planner.config["num_layers"] * len(planner.branches(parallel))
    found = []
    for kind, sent in zip(kinds, forward.sent, strict=True):
        exchanged = [size for name, size in sent if name.startswith("alltoall")]
        if exchanged:
            found.append(
                f"All-to-all (ranks exchange heads for tokens and back){kind}: "
                f"{_count(len(exchanged), 'exchange')} of {_sizes(exchanged)} per layer, together "
                f"{_size(sum(exchanged))}; {_size(sum(exchanged) * calls)} per step and rank, of "
                f"which {parallel.ulysses_size - 1}/{parallel.ulysses_size} leave the rank"
            )
        passed = [size for name, size in sent if name == "send"]
        gathered = [size for name, size in sent if "allgather" in name]
        for verb, sizes in (("passed on", passed), ("gathered", gathered)):
            if sizes:
                found.append(
                    f"Ring (keys and values of other ranks){kind}: {_count(len(sizes), 'tensor')} "
                    f"of {_sizes(sizes)} {verb} per layer, together {_size(sum(sizes))}"
                )
    return found or ["Nothing is exchanged in attention."]


def _sizes(sent: list[int]) -> str:
    return " or ".join(_size(size) for size in sorted(set(sent), reverse=True))


def _parts(parts: Parts) -> str:
    return ", ".join(f"{part} {_size(size)}" for part, size in parts.most_common() if size >= 1e6)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.2f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
