"""Counts the bytes that rank layouts send inside and between machines: `--plan --nodes N`.

Ranks are laid out as (cfg, ring, ulysses), ulysses innermost; a machine has consecutive ranks. The
bytes are those of dense attention in one layer: the ranks of a Ulysses group exchange q, k, v and
the output in all-to-alls, and the ranks of a ring send keys and values in one direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wan.settings.errors import InputError
from wan.settings.parallel import legal, size_flags


@dataclass(frozen=True)
class Placed:
    """The communication of a rank layout, for the slowest rank.

    Attributes:
        sizes: (cfg, ring, ulysses).
        bytes_inside: Bytes to ranks of the same machine.
        bytes_between: Bytes to other machines.
        seconds: Both, divided by the rates of the links.
    """

    sizes: tuple[int, int, int]
    inside: float
    between: float
    seconds: float


def sends(
    sizes: tuple[int, int, int], tensor: float, per_machine: int
) -> Iterator[tuple[float, float]]:
    """Yields the bytes (inside, between) of each rank. q_bytes: bytes of q on a rank."""
    _, ring, ulysses = sizes
    for rank in range(sizes[0] * ring * ulysses):
        bytes_to = dict[int, float]()
        first = rank // ulysses * ulysses
        for peer in range(first, first + ulysses):
            bytes_to[peer] = 4 * tensor / ulysses
        bytes_to[rank] = 0.0
        if ring > 1:
            place = rank // ulysses % ring
            following = rank + ((place + 1) % ring - place) * ulysses
            bytes_to[following] = bytes_to.get(following, 0.0) + 2 * tensor * (ring - 1)
        machine = rank // per_machine
        inside = sum(size for peer, size in bytes_to.items() if peer // per_machine == machine)
        yield inside, sum(bytes_to.values()) - inside


def layouts(
    world: int, heads: int, nodes: int, sequence: float, rates: Sequence[float] | None
) -> list[Placed]:
    """Lists every layout of these ranks, fastest first.

    Args:
        world: Number of ranks, a multiple of `nodes`; otherwise InputError.
        heads: Attention heads of the network.
        nodes: Number of machines.
        sequence_bytes: Bytes of q of the complete sequence.
        rates: GB/s of a rank inside a machine and between machines. None: layouts are sorted by
            the bytes between machines, then by those inside.
    """
    if world % nodes:
        why = f"does not divide the {world} ranks"
        raise InputError("`nodes`", nodes, why, "give machines of equally many ranks")
    found = []
    for sizes in legal(world, heads):
        both = sends(sizes, sequence / (sizes[1] * sizes[2]), world // nodes)
        in_rate, out_rate = (1e15, 1e6) if rates is None else (rate * 1e9 for rate in rates)
        seconds, inside, between = max((a / in_rate + b / out_rate, a, b) for a, b in both)
        found.append(Placed(sizes, inside, between, seconds))
    return sorted(found, key=lambda placed: placed.seconds)


def lines(
    placed: Sequence[Placed], chosen: tuple[int, int, int], rates: Sequence[float] | None
) -> Iterator[str]:
    """Describes the layouts with the same cfg size as the chosen layout, one per line."""
    rows = [one for one in placed if one.sizes[0] == chosen[0]]
    words = "first between machines, then inside"
    if rates is not None:
        words = f"with {rates[0]:g} GB/s inside a machine and {rates[1]:g} GB/s between machines"
    yield f"Layouts, by what a rank sends per layer, {words}:"
    for one in rows:
        taken = "" if rates is None else f", {one.seconds * 1e3:.1f} ms"
        yield (
            f"  {size_flags(*one.sizes)}: inside {one.inside / 1e6:.0f} MB, between "
            f"{one.between / 1e6:.0f} MB{taken}{' (this run)' if one.sizes == chosen else ''}"
        )
    yield f"The cheapest is {size_flags(*rows[0].sizes)}."
