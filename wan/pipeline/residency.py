"""Offloads weights while their layers do not compute: `offload_model` `cpu` and `block`.

With `block` only some blocks of a network are on its device; each block is copied there before it
is called. An accelerator has two buffers: a block computes in one buffer while the next block is
copied into the other from page-locked host memory, on a separate copy stream. On a CPU, weights
that need no conversion are memory-mapped from their files, as when the whole network is loaded; the
other weights are converted, merged or rounded into one buffer.

With `cpu` all networks have a copy in page-locked host memory, and one network at a time is on the
accelerator.

All copies are made in forward hooks, so a skipped block is not copied and the layers need no code
for offloading. A weight without memory is a NaN (or 0) expanded to its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.load import Adapt, DTypeOf, copy
from wan.checkpoint.source import Source, Sources, is_own, use_mapped
from wan.device import CopyStream
from wan.host import on_own_cores
from wan.log import progress
from wan.settings.execution import buffers

_ALIGNED = 512  # bytes, as PyTorch aligns an accelerator's memory
_SLAB = 1 << 28  # bytes; PyTorch rounds page-locked memory up to a power of two, and keeps it


class Flat:
    """Tensors of a module, packed one after the other into one buffer.

    Attributes:
        size: Bytes of the buffer.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._layout: list[tuple[slice, torch.dtype, torch.Size]] = []
        self.size = 0
        for tensor in self.tensors:
            place = slice(self.size, self.size + tensor.nbytes)
            self._layout.append((place, tensor.dtype, tensor.shape))
            self.size = -(-place.stop // _ALIGNED) * _ALIGNED

    def use(self, memory: Tensor) -> None:
        """Makes the tensors views of `memory`, uint8 [>= size]."""
        for tensor, (place, dtype, shape) in zip(self.tensors, self._layout, strict=True):
            tensor.data = memory[place].view(dtype).view(shape)

    def rest(self) -> None:
        """Replaces each tensor by one expanded element, which frees its memory."""
        for tensor, (_, dtype, shape) in zip(self.tensors, self._layout, strict=True):
            nothing = float("nan") if dtype.is_floating_point else 0
            tensor.data = torch.full((), nothing, dtype=dtype, device=tensor.device).expand(shape)

    def bytes(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the byte offset of each tensor, and its values as uint8."""
        for tensor, (place, _, _) in zip(self.tensors, self._layout, strict=True):
            yield place.start, tensor.reshape(-1).view(torch.uint8)


class Pinned:
    """Page-locked host memory of `size` bytes."""

    def __init__(self, size: int) -> None:
        count = -(-size // _SLAB)
        self._slabs = [torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    def parts(self, start: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Splits `size` bytes from `start` at the slab boundaries.

        Yields:
            A slice of 0..size, and the uint8 view of its bytes.
        """
        done = 0
        while done < size:
            slab, first = divmod(start + done, _SLAB)
            part = self._slabs[slab][first : first + size - done]
            yield slice(done, done + len(part)), part
            done += len(part)

    def keep(self, start: int, values: Tensor) -> None:
        """Copies uint8 values from a device to offset `start`, and waits for the copy."""
        for place, part in self.parts(start, len(values)):
            part.copy_(values[place])


@dataclass(eq=False)
class StreamedBlock:
    """A block of a network, with the sources of its weights.

    Attributes:
        module: The block.
        last_module: The last called module of the block and its adapter modules.
        flat: The tensors that are copied into a buffer.
        sources: The sources of these tensors.
        mapped_sources: The sources of the block's memory-mapped tensors.
        buffer: The buffer that holds the block; None while it has no memory.
    """

    module: nn.Module
    last: nn.Module
    flat: Flat
    sources: Sequence[Source]
    mapped: Sequence[Source] = ()
    buffer: Buffer | None = None

    def read(self, memory: Tensor, done: Callable[[int], object] = int) -> None:
        """Reads the weights from their sources into `memory`, and makes the tensors views of it."""
        self.flat.use(memory)
        for tensor, source in zip(self.flat.tensors, self.sources, strict=True):
            copy(tensor, source, done=done)


@dataclass(eq=False)
class Buffer:
    """Device memory for one block at a time.

    Attributes:
        memory: uint8.
        block: The block that is in the buffer.
        copy_event: Recorded on an accelerator after the copy of the block.
        compute_event: Recorded on an accelerator after the computations with the block.
    """

    memory: Tensor
    block: StreamedBlock | None = None
    copied: Any = None
    computed: Any = None


class FromFiles:
    """Fills a CPU's buffer from the weight files when a block is called.

    The operating system reads the next block ahead meanwhile.
    """

    def __init__(self, blocks: Sequence[StreamedBlock]) -> None:
        self._next = dict(zip(blocks, (*blocks[1:], *blocks[:1]), strict=True))

    def fetch(self, block: StreamedBlock, buffer: Buffer) -> None:
        block.read(buffer.memory)
        following = self._next[block]
        for source in (*following.sources, *following.mapped):
            source.read_ahead()

    def arrive(self, buffer: Buffer) -> None:
        """Does nothing: `fetch` has finished the copy."""

    def leave(self, buffer: Buffer) -> None:
        """Does nothing: the CPU has finished its computations."""


class FromHost:
    """Fills an accelerator's buffers from page-locked memory while blocks compute."""

    def __init__(
        self,
        blocks: Sequence[StreamedBlock],
        buffers: Sequence[Buffer],
        stream: CopyStream,
        done: Callable[[int], object],
    ) -> None:
        """Reads all blocks into host memory through a device buffer, which converts the dtypes."""
        sizes = [block.flat.size for block in blocks]
        starts = accumulate(sizes, initial=0)
        self._starts = dict(zip(blocks, starts, strict=False))
        self._host = Pinned(sum(sizes))
        self._stream = stream
        for block in blocks:
            block.read(buffers[0].memory, done)
            self._host.keep(self._starts[block], buffers[0].memory[: block.flat.size])
            block.flat.rest()
        for buffer in buffers:
            self._stream.uses(buffer.memory)
            buffer.copied, buffer.computed = self._stream.event(), self._stream.event()
            self.leave(buffer)

    def fetch(self, block: StreamedBlock, buffer: Buffer) -> None:
        """Starts the copy of a block, after the last computation that uses the buffer."""
        block.flat.use(buffer.memory)
        parts = self._host.parts(self._starts[block], block.flat.size)
        self._stream.copy(buffer.memory, parts, after=buffer.computed)
        self._stream.copied(buffer.copied)

    def arrive(self, buffer: Buffer) -> None:
        """Makes later computations wait for the copy into the buffer."""
        self._stream.compute_after(buffer.copied)

    def leave(self, buffer: Buffer) -> None:
        """Makes the next copy into the buffer wait for the computations queued so far."""
        self._stream.computed(buffer.computed)


class StreamedBlocks:
    """Blocks that are called in a fixed order in every forward; some stay resident.

    Before a block is called, its weights are fetched; on an accelerator also those of the next
    block, which is the first block again after the last.
    """

    def __init__(
        self, blocks: Sequence[StreamedBlock], device: torch.device, resident: int
    ) -> None:
        """Loads the resident blocks, and registers the forward hooks of all blocks.

        Args:
            blocks: In the order of their calls.
            device: The device that computes.
            num_resident: Number of resident blocks. They are spread evenly, so that a copy can
                overlap with several blocks.
        """
        count, on_cpu = len(blocks), device.type == "cpu"
        resident = resident if count - resident > buffers(device.type) else count
        moving = [b for i, b in enumerate(blocks) if i * resident % count >= resident]
        staying = [block for block in blocks if block not in moving]
        most = max((block.flat.size for block in moving), default=0)

        def memory(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        self._buffers = [Buffer(memory(most)) for _ in range(buffers(device.type)) if moving]
        self._source: FromFiles | FromHost = FromFiles(moving)
        first = staying if on_cpu else blocks
        if first:
            total = sum(block.flat.size for block in first)
            with progress(total, "loading blocks", "B") as bar, on_own_cores():
                for block in staying:
                    block.read(memory(block.flat.size), bar.update)
                if moving and not on_cpu:
                    self._source = FromHost(moving, self._buffers, CopyStream(device), bar.update)
        for index, block in enumerate(blocks):
            due = [b for b in (*blocks[index:], *blocks[:index]) if b in moving]
            due = due[: len(self._buffers)] if not on_cpu or block in moving else []
            block.module.register_forward_pre_hook(partial(self._before, block, due))
            block.last.register_forward_hook(partial(self._after, block))

    def _before(self, block: StreamedBlock, due: Sequence[StreamedBlock], *_: object) -> None:
        for wanted in due:
            if wanted.buffer is None:
                self._fetch(wanted, next(b for b in self._buffers if b.block not in due))
        if block.buffer is not None:
            self._source.arrive(block.buffer)
        for source in block.mapped:
            source.check()

    def _fetch(self, block: StreamedBlock, buffer: Buffer) -> None:
        if buffer.block is not None:
            buffer.block.flat.rest()
            buffer.block.buffer, buffer.block = None, None
        self._source.fetch(block, buffer)  # if it fails half-way, the buffer holds no block
        buffer.block, block.buffer = block, buffer

    def _after(self, block: StreamedBlock, *_: object) -> None:
        if block.buffer is not None:
            self._source.leave(block.buffer)


Resident = Callable[[int, int], int]
"""(size, count) -> how many of `count` blocks of `size` bytes are resident."""


def streamed(
    adapt: Adapt,
    blocks: str,
    device: torch.device,
    dtype_of: DTypeOf,
    resident: Resident = lambda size, count: 0,
    *,
    table: str | None = None,
    behind: Callable[[Any, int], Sequence[nn.Module]] = lambda network, index: (),
) -> Adapt:
    """Returns a weight transform that streams the blocks of a network instead of loading them.

    Args:
        transform: The weight transform that is applied first.
        blocks: Name of the network's list of blocks.
        device: The device that computes.
        dtype_of: Chooses the dtypes on the device.
        count_resident: Chooses the number of resident blocks.
        adapter_modules: (network, index) -> the modules that are copied together with a block; the
            last one is called after the block in every forward.
        table: Name of an embedding whose rows are read from the files on each lookup.
    """

    def adapted(network: nn.Module, sources: Sources) -> Sources:
        sources = adapt(network, sources)
        found, names = [], {module: f"{name}." for name, module in network.named_modules()}
        for index, module in enumerate(network.get_submodule(blocks).children()):
            moving = {names[one]: one for one in (module, *behind(network, index))}
            placed = _on_device(moving, sources, device, dtype_of)
            found.append(StreamedBlock(module, [*moving.values()][-1], *placed))
        most = max(block.flat.size for block in found)
        StreamedBlocks(found, device, min(resident(most, len(found)), len(found)))
        if table is not None:
            module = network.get_submodule(table)
            _, read, _ = _on_device({f"{table}.": module}, sources, device, dtype_of)
            for source in read:
                module.register_forward_hook(partial(_look_up, source))
        return sources

    return adapted


def _on_device(
    modules: Mapping[str, nn.Module], sources: Sources, device: torch.device, dtype_of: DTypeOf
) -> tuple[Flat, list[Source], list[Source]]:
    """Moves meta modules to a device, where their tensors have no memory yet.

    Args:
        modules: The key is the prefix of the module's tensor names.

    Returns:
        The tensors to copy, their sources, and the sources of the memory-mapped tensors.
    """
    tensors: dict[str, tuple[Tensor, Source]] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters(prefix=prefix[:-1]):
            parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))
        module.to_empty(device=device)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensors[f"{prefix}{name}"] = tensor, sources[f"{prefix}{name}"]
    if device.type == "cpu":
        use_mapped(tensors.values())
    read = [(tensor, source) for tensor, source in tensors.values() if is_own(tensor)]
    flat = Flat([tensor for tensor, _ in read])
    flat.rest()
    mapped = [source for tensor, source in tensors.values() if not is_own(tensor)]
    return flat, [source for _, source in read], mapped


def _look_up(source: Source, _: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    """Replaces an embedding's output by rows that are read from `source`; a forward hook."""
    rows, places = args[0].cpu().unique(return_inverse=True)
    source.check()
    found = torch.cat([source.read(slice(row, row + 1)) for row in rows.tolist()])
    return found.to(output.dtype)[places].to(output.device)


class Parked:
    """A network with a copy in page-locked host memory, loaded to the accelerator when called."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        beside: list[Parked],
        left: Callable[[], None],
    ) -> None:
        """Copies the network's tensors to host memory.

        Args:
            network: A loaded network, whose weights do not change from now on.
            device: Its accelerator.
            offloaded_modules: All offloaded networks of a pipeline; at most one is on the device.
            on_free: Frees the network's caches when it is offloaded.
        """
        self._flat = Flat([*network.parameters(), *network.buffers()])
        self._device, self._beside, self._left = device, beside, left
        self._host, self._there = Pinned(self._flat.size), True
        for start, values in self._flat.bytes():
            self._host.keep(start, values)
        beside.append(self)
        network.register_forward_pre_hook(self._before)

    def leave(self) -> None:
        """Frees the network's memory on the accelerator."""
        self._flat.rest()
        self._left()
        self._there = False

    def _before(self, *_: object) -> None:
        if self._there:
            return
        for other in self._beside:
            other.leave()
        memory = torch.empty(self._flat.size, dtype=torch.uint8, device=self._device)
        for place, part in self._host.parts(0, self._flat.size):
            memory[place].copy_(part, non_blocking=True)
        self._flat.use(memory)
        self._there = True
