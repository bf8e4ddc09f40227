"""Settings of several processes: topology of the ranks, attention mode, sharded weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wan.settings import rules
from wan.settings.attention_modes import (
    CHUNKED_MODES,
    MODES,
    Mode,
    count_heads_per_rank,
    select_attention_mode,
)
from wan.settings.errors import InputError
from wan.settings.fields import build_from_values, layout_option
from wan.settings.values import choice, integer, real, switch

EXCHANGES = ("split", "fused")
RING_TYPES = ("ring", "bidirectional")
SIZE_FLAGS = ("cfg_size", "ring_size", "ulysses_size")
_SIZE = integer(1, 4096)


@dataclass(frozen=True)
class Parallel:
    """A topology, world_size = cfg_size x ring_size x ulysses_size; see `resolve_topology`."""

    world_size: int = 1
    cfg_size: int = layout_option(
        1,
        choice(1, 2),
        "2: half of the ranks compute the conditional branch, half the unconditional (default 1)",
        diffusers=True,
    )
    ring_size: int = layout_option(
        1,
        _SIZE,
        "ranks of a ring, which pass keys and values on (default: the number of ranks divided by "
        "the other sizes)",
        diffusers=True,
    )
    ulysses_size: int = layout_option(
        1,
        _SIZE,
        "ranks that split the attention heads (default: all that fit)",
        diffusers=True,
        common=True,
    )
    ring_type: str = layout_option(
        "ring",
        choice(*RING_TYPES),
        "direction in which a ring passes keys and values; ring (default): one; bidirectional: "
        "both",
        diffusers=True,
    )
    comm_type: int = layout_option(
        0,
        choice(*MODES),
        ", ".join(f"{key}: {mode.name}" for key, mode in MODES.items())
        + " (attention mode of FA_Power_Cap; default 0)",
        diffusers="comm_type",
        common=True,
    )
    chunks: int | None = layout_option(
        None,
        _SIZE,
        f"maximum of head chunks of --comm_type {', '.join(map(str, CHUNKED_MODES))} and "
        "--fa_alltoall_overlap (default 10, as published)",
        diffusers=True,
    )
    fa_alltoall_overlap: bool = layout_option(
        False,
        switch,
        "overlap the all-to-all of a head chunk with the attention of another one (default false)",
        diffusers=True,
        variables={"OVERLAP": {"0": False, "1": True}},
    )
    exchange: str = layout_option(
        "auto",
        choice("auto", *EXCHANGES),
        "exchange of q, k and v of a head chunk; fused: one all-to-all; split: three; auto "
        "(default): the one measured to be faster on this type of device",
        diffusers=True,
    )
    t5_fsdp: bool = layout_option(
        False, switch, "shard the text encoder over the ranks (default false)"
    )
    dit_fsdp: bool = layout_option(
        False, switch, "shard the DiT over the ranks (default false)", common=True
    )
    dist_timeout: float = layout_option(
        30.0,
        real(0, 10080, exclude_min=True),
        "minutes to wait for another rank before the run fails (default 30)",
    )

    @property
    def mode(self) -> Mode:
        """The attention mode: head chunks, query blocks and their order."""
        return select_attention_mode(self.comm_type, self.fa_alltoall_overlap, self.chunks)

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Sizes of the rank mesh: (cfg, ring, ulysses)."""
        return self.cfg_size, self.ring_size, self.ulysses_size

    @property
    def sequence_size(self) -> int:
        """Number of ranks that share the tokens of one forward pass."""
        return self.ring_size * self.ulysses_size


def enumerate_topologies(world: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """Yields each (cfg, ring, ulysses) that `world` ranks can form, the largest ulysses first.

    A Ulysses group needs at least one head per rank. Where its size does not divide the number of
    heads, some ranks have one head more than others.
    """
    for cfg in (1, 2):
        if world % cfg:
            continue
        ranks = world // cfg
        for ulysses in range(ranks, 0, -1):
            if ranks % ulysses == 0 and ulysses <= heads:
                yield cfg, ranks // ulysses, ulysses


def choose_ulysses_size(ranks: int, heads: int) -> int:
    """Chooses the Ulysses size for the ranks that share a sequence.

    It is the largest common divisor of ranks and heads. Where this would leave a ring of more than
    two ranks, or no exchange at all, it is the number of ranks (if there are as many heads), and
    some ranks have one head more than others.

    >>> [choose_ulysses_size(n, 40) for n in (2, 6, 7, 8, 12, 16)], choose_ulysses_size(16, 12)
    ([2, 6, 7, 8, 12, 8], 4)
    """
    divisor = max(u for u in range(1, ranks + 1) if ranks % u == 0 and heads % u == 0)
    return ranks if ranks <= heads and (ranks // divisor > 2 or divisor == 1) else divisor


def resolve_topology(
    values: Mapping[str, Any], world: int, heads: int
) -> tuple[Parallel, tuple[str, ...]]:
    """Builds the topology from checked settings, with notices about the chosen sizes.

    Sizes that are not set are chosen, see `choose_ulysses_size`.

    Args:
        values: Flag -> checked value, also of other settings, which some rules read.
        world: Number of ranks.
        heads: Attention heads of the network.

    Raises:
        InputError: Sizes do not fit the ranks or heads, or flags contradict each other or have no
            effect.
    """
    cfg, ring, ulysses = (values.get(name) for name in SIZE_FLAGS)
    cfg = 1 if cfg is None else cfg
    ranks = max(world // cfg, 1)
    if ulysses is None:
        ulysses = choose_ulysses_size(ranks, heads) if ring is None else max(ranks // ring, 1)
    if ring is None:
        ring = max(ranks // ulysses, 1)
    topology, product = format_topology(cfg, ring, ulysses), cfg * ring * ulysses
    if world == 1 < product:
        why = f"needs {product} ranks, but this is one process"
        remedy = f"start it with torchrun --nproc_per_node={product}, or drop the sizes"
        raise InputError(topology, None, why, remedy)
    if ulysses > heads:
        why = f"is more than the model's {heads} heads, and every rank needs one"
        raise InputError(f"`ulysses_size={ulysses}`", None, why, _describe_topologies(world, heads))
    if product != world:
        why = f"makes {product} ranks, but {world} were started"
        raise InputError(topology, None, why, _describe_topologies(world, heads))
    sizes = {"world_size": world, "cfg_size": cfg, "ring_size": ring, "ulysses_size": ulysses}
    parallel = build_from_values(Parallel, {**values, **sizes})
    view = rules.TopologyView(
        world_size=world,
        ring_size=ring,
        ulysses_size=ulysses,
        comm_type=parallel.comm_type,
        chunks=parallel.chunks,
        num_heads=heads,
    )
    rules.check_rules(rules.TOPOLOGY_RULES, values, view)
    notices = []
    if world > 1 and ("ulysses_size" not in values or ("ring_size" not in values and ring > 1)):
        notices.append(f"Chosen: {topology} for {world} ranks.")
    if heads % ulysses:
        shares = ", ".join(map(str, count_heads_per_rank(heads, ulysses)))
        notices.append(f"{heads} heads on {ulysses} ranks of a Ulysses group: {shares}.")
    if parallel.mode.chunks > 1 and heads // ulysses == 1:
        notices.append(
            f"{'A' if heads % ulysses else 'Each'} rank has one head, so there is one head chunk "
            "and nothing to interleave; use a smaller `ulysses_size`."
        )
    return parallel, tuple(notices)


def note_machine_spanning(parallel: Parallel, per_machine: int, heads: int) -> tuple[str, ...]:
    """Returns a notice where a Ulysses group has ranks on several machines.

    Args:
        parallel: Topology.
        per_machine: Ranks of each machine.
        heads: Attention heads of the network.
    """
    world, ulysses = parallel.world_size, parallel.ulysses_size
    if ulysses == 1 or per_machine >= world or per_machine % ulysses == 0:
        return ()
    ranks = parallel.sequence_size
    sizes_inside = [u for u in range(1, heads + 1) if ranks % u == 0 and per_machine % u == 0]
    suggestion = format_topology(parallel.cfg_size, ranks // sizes_inside[-1], sizes_inside[-1])
    return (
        f"Groups of `ulysses_size={ulysses}` span machines of {per_machine} ranks each, so that "
        f"every exchange goes between machines; {suggestion} would keep exchanges inside.",
    )


def check_guidance(parallel: Parallel, scales: tuple[float, float], heads: int) -> tuple[str, ...]:
    """Checks --cfg_size 2 against the guidance scales and returns notices.

    Raises:
        InputError: Neither expert uses guidance, so that there is only one branch.
    """
    if parallel.cfg_size == 1 or 1 not in scales:
        return ()
    if scales == (1, 1):
        why = "computes two guidance branches, but with guidance 1 there is only one"
        remedy = _describe_topologies(parallel.world_size, heads, (1,))
        raise InputError("`cfg_size=2`", None, why, remedy)
    expert = "low" if scales[0] == 1 else "high"
    return (
        f"Guidance is 1 for the {expert}-noise expert: in its steps both halves of `cfg_size=2` "
        "compute the same.",
    )


def format_topology(cfg: int, ring: int, ulysses: int) -> str:
    """Formats the sizes of a topology as settings in backticks."""
    settings = [f"`cfg_size={cfg}`"] if cfg != 1 else []
    return " ".join([*settings, f"`ring_size={ring}`", f"`ulysses_size={ulysses}`"])


def _describe_topologies(world: int, heads: int, cfgs: tuple[int, ...] = (1, 2)) -> str:
    topologies = [
        format_topology(*sizes) for sizes in enumerate_topologies(world, heads) if sizes[0] in cfgs
    ]
    return f"with {heads} heads, {world} ranks can use: {'; '.join(topologies)}."
