"""What the layouts of a run send inside machines and between them: `generate.py --plan --nodes N`.

Ranks are laid out as (cfg, ring, ulysses), ulysses innermost, and machines hold consecutive ranks.
Bytes are those of dense attention in one layer: a Ulysses group sends q, k, v and the result, each
rank its share to every other one; a ring passes keys and values on, one way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wan.settings.errors import InputError
from wan.settings.parallel import legal, size_flags


@dataclass(frozen=True)
class Placed:
    """One layout.

    Attributes:
        sizes: (cfg, ring, ulysses).
        inside: Bytes that a rank sends to others of its machine, of the rank that takes longest.
        between: Bytes that it sends to other machines.
        seconds: Both, divided by the rates of the links.
    """

    sizes: tuple[int, int, int]
    inside: float
    between: float
    seconds: float


def sends(
    sizes: tuple[int, int, int], tensor: float, per_machine: int
) -> Iterator[tuple[float, float]]:
    """(inside, between) for each rank. tensor: bytes of q of one rank's tokens."""
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
    """Every layout of these ranks, the cheapest first.

    Args:
        world: Ranks, `nodes` times as many as a machine has; InputError where they are not.
        heads: Of the network.
        nodes: Machines.
        sequence: Bytes of q of the whole sequence.
        rates: GB/s that a rank sends inside a machine, and to another one. None: what is sent
            between machines counts first.
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
    """Describes the layouts with as many guidance branches of a rank as the chosen one."""
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
