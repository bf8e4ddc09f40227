"""Fixtures of tests that read checkpoints: the smallest one, with one network in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from tests.conftest import Tiny
    from wan.checkpoint.layout import Checkpoint


@pytest.fixture(scope="session")
def dense(tiny: Tiny) -> Checkpoint:
    """The tiny dense checkpoint. Do not write into its folder."""
    from wan.checkpoint.layout import inspect_checkpoint

    return inspect_checkpoint(tiny("t2v-1.3B"))


@pytest.fixture(scope="session")
def pair_of_experts(tiny: Tiny) -> Checkpoint:
    """A tiny checkpoint of two experts."""
    from wan.checkpoint.layout import inspect_checkpoint

    return inspect_checkpoint(tiny("t2v-A14B"))


@pytest.fixture(scope="session")
def weights(tiny: Tiny) -> dict[str, Tensor]:
    """The weights of the tiny dense checkpoint."""
    from safetensors.torch import load_file

    return load_file(tiny("t2v-1.3B") / "diffusion_pytorch_model.safetensors")
