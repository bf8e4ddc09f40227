"""Removes what programs write before the names of a network's tensors; no torch.

`strip_prefixes` removes prefixes from a list, `find_shared_prefix` finds an unknown one that all
names of a file have. Both stop at a name that the network knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing write, at any place in a name."""
NETWORK_PREFIXES = tuple(
    f"{word}."
    for word in ("module", "model", "net", "pipe", "dit", "transformer", "diffusion_model")
)
"""Prefixes of a DiT in files of training programs, in any order and number."""
OTHER_LAYERS = frozenset(
    (
        *("vace", "double", "single", "control", "controlnet", "control_net"),
        *("encoder", "text_encoder", "te", "te1", "te2", "clip", "conditioner", "cond_stage_model"),
    )
)
"""Words of a prefix that make another layer of a DiT's: `vace_blocks_0` is not `blocks_0`. In names
with dots, modules that are other networks."""

IsKnown = Callable[[str], bool]
"""Whether a name without prefixes is one of the network."""


def strip_prefixes(
    name: str, is_known: IsKnown, prefixes: Sequence[str] = NETWORK_PREFIXES
) -> list[str]:
    """Removes wrappers and prefixes until the name is known.

    Returns:
        The name after each removal, the shortest one last.
    """
    names = [WRAPPERS.sub("", name)]
    while not is_known(names[-1]):
        matches = [prefix for prefix in prefixes if names[-1].startswith(prefix)]
        if not matches:
            break
        names.append(names[-1].removeprefix(max(matches, key=len)))
    return names


def _starts_with_dotted_module(name: str) -> bool:
    """Whether a dot follows the first module, so that an underscore before it is part of a name."""
    return "." in name and re.match(r"[A-Za-z_]+_\d", name) is None


def find_shared_prefix(
    names: Iterable[str], is_known: IsKnown, prefixes: Sequence[str] = NETWORK_PREFIXES
) -> str | None:
    """Returns the shortest prefix of all names before names that are known; None if none is.

    It ends with a dot, or with an underscore in names with underscores between their first modules.
    Its words, or its parts between dots if it ends with a dot, are none of `OTHER_LAYERS`.

    Args:
        prefixes: May come between it and the known name.
    """
    first_name, *next_names = names

    def is_prefix(prefix: str) -> bool:
        is_flat = prefix.endswith("_")
        parts = re.split("[._]", prefix) if is_flat else prefix.split(".")
        return OTHER_LAYERS.isdisjoint(parts) and all(
            name.startswith(prefix)
            and not (is_flat and _starts_with_dotted_module(name.removeprefix(prefix)))
            and is_known(strip_prefixes(name.removeprefix(prefix), is_known, prefixes)[-1])
            for name in (first_name, *next_names)
        )

    ends = [match.end() for match in re.finditer("[._]", first_name)]
    return next((x for x in ("", *(first_name[:end] for end in ends)) if is_prefix(x)), None)
