"""InputCache: which entry is evicted, and that inputs are not kept alive."""

from __future__ import annotations

import weakref

import torch

from wan.modules.textcache import InputCache


def test_what_was_used_last_stays() -> None:
    """The second branch's input is the same in every clip, the first one's is not."""
    kept, always, made = InputCache[str](2), torch.zeros(1), []
    for name in "abc":
        clip = torch.zeros(1)
        for given, what in ((clip, name), (always, "always")):
            kept.get_or_compute([given], lambda what=what: made.append(what) or what)
    assert made == ["a", "always", "b", "c"]


def test_inputs_are_not_kept_alive() -> None:
    kept, given = InputCache[str](), torch.zeros(1)
    kept.add([given, 0], "x")
    assert kept.get([given, 0]) == "x" and kept.get([given, 1]) is None
    alive = weakref.ref(given)
    del given
    assert alive() is None and kept.get([torch.zeros(1), 0]) is None
