"""How several processes share one run: topology, attention mode, sharded weights. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wan.modules.schedule import Mode, mode_of
from wan.settings.errors import InputError

RING_TYPES = ("ring", "bidirectional")
SIZES = ("cfg_size", "ring_size", "ulysses_size")


@dataclass(frozen=True)
class Parallel:
    """A resolved topology: cfg_size x ring_size x ulysses_size processes.

    cfg_size: 2 computes the two guidance branches on two halves of the ranks. ulysses_size: ranks
    that exchange heads for tokens. ring_size: ranks that pass K/V round. comm_type: 0 baseline,
    1 InsertComm, 2 BlockAttn. dist_timeout: minutes a rank waits for the others.
    Build it with `resolve`, which checks it.
    """

    world_size: int = 1
    cfg_size: int = 1
    ring_size: int = 1
    ulysses_size: int = 1
    ring_type: str = "ring"
    comm_type: int = 0
    fa_alltoall_overlap: bool = False
    dit_fsdp: bool = False
    t5_fsdp: bool = False
    dist_timeout: float = 30.0

    @property
    def mode(self) -> Mode:
        """The attention mode."""
        return mode_of(self.comm_type, self.fa_alltoall_overlap)

    @property
    def sequence_size(self) -> int:
        """Ranks that share the tokens of one forward pass."""
        return self.ring_size * self.ulysses_size


def legal(world: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """Every (cfg, ring, ulysses) that `world` processes can form, the largest ulysses first."""
    for cfg in (1, 2):
        if world % cfg:
            continue
        ranks = world // cfg
        for ulysses in range(ranks, 0, -1):
            if ranks % ulysses == 0 and heads % ulysses == 0:
                yield cfg, ranks // ulysses, ulysses


def resolve(
    values: Mapping[str, Any], world: int, heads: int, guide_scale: tuple[float, float]
) -> tuple[Parallel, tuple[str, ...]]:
    """The topology for the given flags, and notices about what was chosen.

    values: checked settings; sizes that are absent are chosen (as much Ulysses as heads and
    processes allow, the rest ring). Raises InputError listing what would work.
    """
    given = {name: values.get(name) for name in SIZES}
    cfg, ring, ulysses = _choose(given, world, heads)
    chosen = {k: values[k] for k in Parallel.__dataclass_fields__ if k in values and k not in SIZES}
    parallel = Parallel(world, cfg, ring, ulysses, **chosen)
    _check_product(parallel, heads)
    _check_modes(parallel, values)
    notices = _check_guidance(parallel, heads, guide_scale)
    chosen_ring = given["ring_size"] is None and ring > 1
    if world > 1 and (given["ulysses_size"] is None or chosen_ring):
        notices.append(f"Chosen: {_flags(cfg, ring, ulysses)} for {world} processes.")
    if (parallel.comm_type or parallel.fa_alltoall_overlap) and heads == ulysses:
        notices.append(
            "Each rank has one head, so there is one chunk and nothing to interleave; "
            "use a smaller --ulysses_size."
        )
    return parallel, tuple(notices)


def _choose(given: Mapping[str, int | None], world: int, heads: int) -> tuple[int, int, int]:
    cfg, ring, ulysses = (given[name] for name in SIZES)
    cfg = 1 if cfg is None else cfg
    ranks = max(world // cfg, 1)
    if ulysses is None:
        rest = max(ranks // (ring or 1), 1)
        fitting = [u for u in range(1, rest + 1) if rest % u == 0 and heads % u == 0]
        ulysses = fitting[-1]
    if ring is None:
        ring = max(ranks // ulysses, 1)
    return cfg, ring, ulysses


def _check_product(parallel: Parallel, heads: int) -> None:
    cfg, ring, ulysses = parallel.cfg_size, parallel.ring_size, parallel.ulysses_size
    world, product = parallel.world_size, cfg * ring * ulysses
    if world == 1 and product > 1:
        raise InputError(
            f"{_flags(cfg, ring, ulysses)} needs {product} processes, but this is one; start it as "
            f"torchrun --nproc_per_node={product} generate.py ..., or drop the flags."
        )
    if heads % ulysses:
        raise InputError(
            f"--ulysses_size {ulysses} does not divide the model's {heads} heads; "
            + _legal_words(world, heads)
        )
    if cfg not in (1, 2) or product != world:
        raise InputError(
            f"{_flags(cfg, ring, ulysses)} makes {product} processes, but {world} were started; "
            + _legal_words(world, heads)
        )


def _check_modes(parallel: Parallel, values: Mapping[str, Any]) -> None:
    """Flags that contradict each other, or that would be accepted without an effect."""
    overlap, ulysses = parallel.fa_alltoall_overlap, parallel.ulysses_size
    if parallel.comm_type and overlap:
        raise InputError(
            f"--comm_type {parallel.comm_type} puts exchanges between pieces of attention, "
            "--fa_alltoall_overlap (or OVERLAP=1) hides them under attention; choose one."
        )
    if parallel.comm_type and ulysses <= 1:
        raise InputError("comm_type optimization requires ulysses_size > 1.")
    if overlap and ulysses <= 1:
        raise InputError(
            "--fa_alltoall_overlap (or OVERLAP=1) hides all-to-all exchanges, and there are none "
            "with --ulysses_size 1; use a larger one or drop the flag."
        )
    if "ring_type" in values and parallel.ring_size == 1:
        raise InputError(
            f"--ring_type {parallel.ring_type} has no effect with --ring_size 1; drop it or use a "
            "larger ring."
        )
    if "dist_timeout" in values and parallel.world_size == 1:
        raise InputError("--dist_timeout has no effect on one process; drop it.")
    for flag in ("dit_fsdp", "t5_fsdp"):
        if values.get(flag) and parallel.world_size == 1:
            raise InputError(
                f"--{flag} shards weights over several devices, but this is one process; start it "
                "with torchrun, or drop the flag."
            )
    if parallel.t5_fsdp and values.get("t5_cpu"):
        raise InputError("--t5_fsdp shards the text encoder over devices; drop --t5_cpu or it.")
    if values.get("compile"):
        for wish, asked in (
            ("--ring_size above 1", parallel.ring_size > 1),
            ("--fa_alltoall_overlap", overlap),
        ):
            if asked:
                raise InputError(f"--compile does not work with {wish}; drop one of them.")


def _check_guidance(parallel: Parallel, heads: int, guide_scale: tuple[float, float]) -> list[str]:
    if parallel.cfg_size == 1:
        return []
    if all(scale == 1 for scale in guide_scale):
        raise InputError(
            "--cfg_size 2 computes two guidance branches, but with guidance 1 there is only one; "
            + _legal_words(parallel.world_size, heads, (1,))
        )
    if 1 in guide_scale:
        expert = "low" if guide_scale[0] == 1 else "high"
        return [
            f"Guidance is 1 for the {expert}-noise expert: in its steps both halves of --cfg_size "
            "2 compute the same."
        ]
    return []


def _flags(cfg: int, ring: int, ulysses: int) -> str:
    parts = [f"--cfg_size {cfg}"] if cfg != 1 else []
    return " ".join([*parts, f"--ring_size {ring}", f"--ulysses_size {ulysses}"])


def _legal_words(world: int, heads: int, cfgs: tuple[int, ...] = (1, 2)) -> str:
    words = [_flags(*sizes) for sizes in legal(world, heads) if sizes[0] in cfgs]
    return f"with {heads} heads, {world} processes can use: {'; '.join(words)}."
