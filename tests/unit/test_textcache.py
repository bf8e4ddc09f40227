"""InputCache: which entry is evicted, and that inputs are not kept alive."""

from __future__ import annotations

import weakref

import torch

from wan.modules.text_kv_cache import InputCache


def test_the_least_recently_used_entry_is_forgotten() -> None:
    """The second branch's input is the same in every clip, the first one's is not."""
    cache, always, computed = InputCache[str](2), torch.zeros(1), []
    for name in "abc":
        clip = torch.zeros(1)
        for tensor, label in ((clip, name), (always, "always")) * 2:  # two steps
            cache.get_or_compute([tensor], lambda label=label: computed.append(label) or label)
    assert computed == ["a", "always", "b", "c"]


def test_inputs_are_not_kept_alive() -> None:
    cache, tensor = InputCache[str](), torch.zeros(1)
    cache.add([tensor, 0], "x")
    assert cache.get([tensor, 0]) == "x" and cache.get([tensor, 1]) is None
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None and cache.get([torch.zeros(1), 0]) is None
