"""LoRAs of single videos: read into host memory, and attached to an expert while it denoises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wan.checkpoint.load import DtypeRule
from wan.checkpoint.lora.folder import VideoLora, VideoLoras
from wan.checkpoint.lora.merge import read_lora_factors
from wan.modules.lora_branch import LoraBranch, add_lora_branches, set_lora_branches
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.modules.model import WanModel
    from wan.pipeline.denoise import ExpertSource

Factors = dict[str, dict[str, Tensor]]
"""Layer -> name of a factor (`LoraBranch.factors`) -> the factor."""


class VideoLoraLoader:
    """Reads LoRAs, and caches the last ones in host memory.

    Attributes:
        max_bytes: Limit of the cache.
    """

    def __init__(self, device: torch.device, dtype_of: DtypeRule, max_bytes: int) -> None:
        """Starts with an empty cache.

        Args:
            device: The device of the experts.
            dtype_of: Chooses the dtypes of the experts' weights, which the factors get.
            max_bytes: Limit of the cache.
        """
        self.max_bytes = max_bytes
        self._device, self._dtype_of = device, dtype_of
        self._cache: dict[tuple[str, str], Factors] = {}  # (sha256, expert); newest last

    @property
    def cached_bytes(self) -> int:
        """Size of the cached factors."""
        return sum(map(_count_bytes, self._cache.values()))

    def read(self, expert: str, lora: VideoLora) -> Factors:
        """Returns the factors of a LoRA at scale 1, on the CPU.

        Raises:
            InputError: A value is NaN or infinite.
            FileChangedError: The file has changed since its header was read.
        """
        key = lora.sha256, expert
        factors = self._cache.pop(key, None)
        if factors is None:
            logger.info("Reading the LoRA %s of %s.", lora.name, expert)
            factors = read_lora_factors(lora.lora, self._dtype_of)
        self._cache[key] = factors
        for oldest in [*self._cache]:
            if self.cached_bytes <= self.max_bytes:
                break
            del self._cache[oldest]
        return factors

    def read_all(self, loras: VideoLoras) -> None:
        """Reads the LoRAs of a video before it starts."""
        for expert, entries in loras.items():
            for lora in entries:
                self.read(expert, lora)

    def make_branches(self, expert: str, loras: VideoLoras) -> dict[str, tuple[LoraBranch, ...]]:
        """Returns the branches of each layer of an expert, on the device of the experts."""
        branches: dict[str, tuple[LoraBranch, ...]] = {}
        for lora in loras.get(expert, ()):
            for layer, factors in self.read(expert, lora).items() if lora.scale else ():
                device_factors = {name: x.to(self._device) for name, x in factors.items()}
                branch = LoraBranch(lora.scale, device_factors)
                branches[layer] = (*branches.get(layer, ()), branch)
        return branches

    @contextmanager
    def attach(self, experts: ExpertSource, loras: VideoLoras) -> Iterator[ExpertSource]:
        """Returns the experts with the LoRAs of a video, which are removed at the end."""
        if not any(lora.scale for entries in loras.values() for lora in entries):
            yield experts
            return
        source = _ExpertsWithLoras(experts, partial(self.make_branches, loras=loras))
        try:
            yield source
        finally:
            source.detach()


class _ExpertsWithLoras:
    """Implements `wan.pipeline.denoise.ExpertSource`: experts with the LoRAs of one video."""

    def __init__(self, experts: ExpertSource, make_branches: Any) -> None:
        self._experts, self._make_branches = experts, make_branches
        self._name = ""
        self._branches: Mapping[str, tuple[LoraBranch, ...]] = {}
        self._network: WanModel | None = None
        self._hooks: list[RemovableHandle] = []

    def get(self, name: str) -> Any:
        if name != self._name:
            self.detach()
            # Before the expert is loaded, because block offloading fills the free memory.
            self._branches, self._name = self._make_branches(name), name
        network: Any = self._experts.get(name)
        if network is not self._network and self._branches:
            self._network = network
            network.clear_caches()  # keys and values of the text without these LoRAs
            for layer_name, branches in self._branches.items():
                layer = network.get_submodule(layer_name)
                self._hooks.append(attach_lora_branches(layer, branches))
        return network

    def prefetch(self, name: str) -> None:
        self._experts.prefetch(name)

    def detach(self) -> None:
        """Removes the branches from the network."""
        for hook in self._hooks:
            hook.remove()
        if self._network is not None:
            for layer_name in self._branches:
                set_lora_branches(self._network.get_submodule(layer_name), ())
            self._network.clear_caches()
        self._name, self._branches, self._network, self._hooks = "", {}, None, []


def attach_lora_branches(layer: nn.Module, branches: tuple[LoraBranch, ...]) -> RemovableHandle:
    """Gives a layer its branches, which are added to its output; returns the hook."""
    set_lora_branches(layer, branches)
    return layer.register_forward_hook(_add_to_output)


def _add_to_output(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Adds the branches to the output of a layer; a forward hook."""
    return add_lora_branches(layer, args[0], output)


def _count_bytes(factors: Factors) -> int:
    return sum(x.nbytes for layer in factors.values() for x in layer.values())
