"""`generate.py --plan`: a run's plan in words, whether it fits, the nearest topology that does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from wan.cli.planned import MAX_RANKS
from wan.planner.forward import Forward
from wan.planner.planner import Card, Planner
from wan.planner.ways import ways
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel, legal


def lines(planner: Planner) -> list[str]:
    """The plan, a fact a line."""
    planned, request, parallel = planner.planned, planner.request, planner.planned.parallel
    source = "sizes as published (no checkpoint folder)"
    if planned.checkpoint is not None:
        source = f"sizes of {planned.checkpoint.folder}"
    width, height = request.video_size
    forward = planner.forward(parallel)
    tokens = forward.plan
    heads = "/".join(str(n) for n in sorted(set(forward.chunks), reverse=True))
    return [
        f"Plan: {request.preset.task} {width}*{height} x {request.frame_num} frames in "
        f"{'bf16' if planner.e == 2 else 'fp32'} on {parallel.world_size} "
        f"{'rank' if parallel.world_size == 1 else 'ranks'}: cfg {parallel.cfg_size} x ring "
        f"{parallel.ring_size} x ulysses {parallel.ulysses_size}, {parallel.mode.name}; {source}",
        f"Tokens: {tokens.tokens} + {tokens.padded - tokens.tokens} padding, "
        f"{tokens.shard_len} per rank",
        f"Attention: {len(forward.chunks)} x {heads} heads per rank{_method(planner)}",
        *_traffic(planner, forward),
        *_memory(planner, planner.rank(parallel)),
    ]


def _method(planner: Planner) -> str:
    """What differs from dense attention, in words."""
    attention, chip = planner.planned.attention, planner.planned.chip
    rain = attention.rainfusion
    found = [f"on {chip.name}"] if chip else []
    found += ["laser"] if attention.algorithm == "laser" else []
    found += ["FP8"] if attention.fa_quant else []
    found += ["exchanged as FP8"] if attention.quant_alltoall else []
    if rain:
        found.append(
            f"RainFusion {rain.type} from step {rain.start_step} on, sparsity {rain.sparsity:g}, "
            f"masks for {rain.refresh} {'step' if rain.refresh == 1 else 'steps'}"
        )
    return "".join(f", {words}" for words in found)


def _traffic(planner: Planner, forward: Forward) -> list[str]:
    parallel, layers = forward.parallel, forward.net.layers
    largest, chunks = forward.chunk(max(forward.chunks)), len(forward.chunks)
    layer, ulysses, ring = forward.exchanged(), parallel.ulysses_size, parallel.ring_size
    step = layer * layers * planner.forwards_per_step(parallel)
    found = ["A2A: none", "Ring: none"]
    if ulysses > 1:
        exchanges = 7 if largest.scales else 4  # q, k, v, their scales, the result
        each = f"{_size(largest.tensor)} each"
        if largest.scales:
            each = (
                f"q, k, v {_size(largest.travels)} each and {_size(largest.scales)} of scales, "
                f"result {_size(largest.tensor)}"
            )
        found[0] = (
            f"A2A: {each}, {exchanges * chunks} per layer with "
            f"{_size(layer)}, {_size(step)} per step and rank "
            f"({ulysses - 1}/{ulysses} of it leaves the rank)"
        )
    if ring > 1:
        kinds = {largest.gathers(way): way for way in ways(forward.attention)}
        passed = f"{_size(largest.hop)} (K and V) per hop and block, {(ring - 1) * chunks} hops"
        gathered = f"{_size(ring * largest.hop)} (K and V of {ring} ranks) gathered, {chunks} times"
        words = [text for is_it, text in ((False, passed), (True, gathered)) if is_it in kinds]
        found[1] = f"Ring: {' per layer in dense steps; '.join(words)} per layer"
    return found


def _memory(planner: Planner, rank: Card) -> list[str]:
    experts = f"{rank.resident} of {len(planner.request.preset.experts)} networks"
    cut = f", {_size(rank.network.gathered)} whole while it runs" if rank.sharded else ""
    return [
        f"Memory of the fullest rank: {_size(rank.total)}",
        f"  text encoder {_size(rank.text_encoder)}"
        f"{' (released before denoising)' if rank.offload else ' (stays)'}",
        f"  DiT weights {_size(rank.dit)} ({experts} resident{cut})",
        f"  text embeddings and K/V {_size(rank.prompts)}; latents of the solver "
        f"{_size(rank.solver)}{f'; masks {_size(rank.masks)}' if rank.masks else ''}",
        f"  activations {_size(rank.forward.total)}, at their peak ({rank.forward.name}): "
        + ", ".join(f"{name} {_size(size)}" for name, size in rank.forward.parts if size),
        "  other moments: "
        + ", ".join(f"{m.name} {_size(m.total)}" for m in rank.moments if m != rank.forward),
        "  not counted: the VAE (main rank, before and after denoising), the driver's context, "
        "buffers of the communication library, fragments",
    ]


def check(planner: Planner) -> str:
    """One line: it fits, or nothing is known to compare with. InputError where it does not fit."""
    memory, present = planner.planned.device_memory, planner.planned.parallel
    need = planner.rank(present).total
    if memory is None:
        return "Not compared with a device's memory; give --device_memory GB."
    if need <= memory:
        return f"Fits: {_size(need)} of {_size(memory)} per rank."
    raise InputError(
        f"The run needs {_size(need)} on its fullest rank, and a rank has {_size(memory)}; "
        + "; ".join(_remedies(planner, memory))
        + "."
    )


def _remedies(planner: Planner, memory: int) -> list[str]:
    """The nearest topology that fits, and the least change on the same ranks; else both at once."""
    found = _first(planner, memory, topologies(planner, planner.planned.parallel), None)
    first = f"no topology of up to {_most(planner)} ranks fits by itself"
    if found:
        first = f"the nearest topology that fits is {found[0]} {found[1]}"
    same = _flag_words(planner, memory)
    if found or same:
        return [first, *same]
    cut, fsdp = _cut(planner)
    both = _first(planner, memory, topologies(planner, cut), True)
    if both:
        return [first, f"{both[0]} {fsdp}{_release(planner)} {both[1]} would"]
    return [first, "choose a smaller --size or --frame_num"]


def _first(
    planner: Planner, memory: int, candidates: Iterator[Parallel], offload: bool | None
) -> tuple[str, str] | None:
    """The flags of the first topology that fits, and what it takes."""
    for p in candidates:
        need = planner.rank(p, offload=offload).total
        if need <= memory:
            sizes = f"--ring_size {p.ring_size} --ulysses_size {p.ulysses_size}"
            cfg = f"--cfg_size {p.cfg_size} " if p.cfg_size > 1 else ""
            return cfg + sizes, f"on {p.world_size} ranks ({_size(need)})"
    return None


def _most(planner: Planner) -> int:
    world = planner.planned.parallel.world_size
    return max(world, min(8 * world, 512, MAX_RANKS))


def topologies(planner: Planner, present: Parallel) -> Iterator[Parallel]:
    """Every other topology than the present one, nearest first: same ranks, then more."""
    for world in range(present.world_size, _most(planner) + 1):
        found = sorted(legal(world, planner.net.heads), key=lambda s: s[0] != present.cfg_size)
        for cfg, ring, ulysses in found:
            candidate = replace(
                present, world_size=world, cfg_size=cfg, ring_size=ring, ulysses_size=ulysses
            )
            if candidate != present and _possible(planner, candidate):
                yield candidate


def _possible(planner: Planner, parallel: Parallel) -> bool:
    """As `settings.parallel` would accept it with the flags that were given."""
    modes = parallel.comm_type or parallel.fa_alltoall_overlap
    return not (
        (modes and parallel.ulysses_size == 1)
        or (parallel.cfg_size == 2 and not planner.guided)
        or (planner.execution.compile and parallel.ring_size > 1)
        or (parallel.ring_type != "ring" and parallel.ring_size == 1)
        or (planner.planned.attention.quant_alltoall and parallel.ulysses_size == 1)
    )


def _cut(planner: Planner) -> tuple[Parallel, str]:
    """The topology with weights sharded over its ranks, and the flags for that."""
    whole_text = planner.execution.t5_cpu
    cut = replace(planner.planned.parallel, dit_fsdp=True, t5_fsdp=not whole_text)
    return cut, "--dit_fsdp" if whole_text else "--dit_fsdp --t5_fsdp"


def _release(planner: Planner) -> str:
    return "" if planner.execution.offload_model else " --offload_model true"


def _flag_words(planner: Planner, memory: int) -> list[str]:
    """The least that can be changed in how weights are kept, on the same ranks."""
    present = planner.planned.parallel
    cut, fsdp = _cut(planner)
    release = _release(planner)
    changes: list[tuple[str, Parallel, bool | None]] = []
    if release:
        changes.append((release.strip(), present, True))
    if present.world_size > 1:
        changes += [(fsdp, cut, None), (f"{fsdp}{release}", cut, True)]
    for words, parallel, offload in changes:
        need = planner.rank(parallel, offload=offload).total
        if need <= memory:
            return [f"the same topology fits with {words} ({_size(need)})"]
    return []


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.2f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
