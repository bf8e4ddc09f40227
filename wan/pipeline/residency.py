"""Where weights are while a network waits and while it runs: `--offload_model cpu` and `block`.

`block`: only some of a network's blocks are on its device, each copied there before it is called.
An accelerator has two buffers: a block computes in one while the next is copied into the other, on
a stream of its own, from page-locked host memory. A CPU has one buffer, filled from the mapped
files, and converted, merged or rounded on the way as when the whole network is loaded.

`cpu`: networks stay in page-locked host memory, and one of them is on the accelerator, whole.

All is done in hooks of modules' calls: a block that is skipped is not copied, and what computes
knows nothing of it. Where a weight has no memory it is one NaN (or 0) of its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.load import Adapt, DTypeOf, Source, Sources, copy
from wan.device import CopyStream
from wan.host import on_own_cores
from wan.log import progress
from wan.settings.execution import buffers

_ALIGNED = 512  # bytes, as PyTorch aligns an accelerator's memory
_SLAB = 1 << 28  # bytes; PyTorch rounds page-locked memory up to a power of two, and keeps it


class Flat:
    """The tensors of a module, one behind the other in one piece of memory.

    tensors: parameters, then buffers. size: bytes that they take.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._places: list[tuple[slice, torch.dtype, torch.Size]] = []
        self.size = 0
        for tensor in self.tensors:
            place = slice(self.size, self.size + tensor.nbytes)
            self._places.append((place, tensor.dtype, tensor.shape))
            self.size = -(-place.stop // _ALIGNED) * _ALIGNED

    def use(self, memory: Tensor) -> None:
        """From here on the tensors are what is in this memory, uint8 [>= size]."""
        for tensor, (place, dtype, shape) in zip(self.tensors, self._places, strict=True):
            tensor.data = memory[place].view(dtype).view(shape)

    def rest(self) -> None:
        """From here on the tensors have no memory."""
        for tensor, (_, dtype, shape) in zip(self.tensors, self._places, strict=True):
            nothing = float("nan") if dtype.is_floating_point else 0
            tensor.data = torch.full((), nothing, dtype=dtype, device=tensor.device).expand(shape)

    def bytes(self) -> Iterator[tuple[int, Tensor]]:
        """Where each tensor begins, and its values, uint8."""
        for tensor, (place, _, _) in zip(self.tensors, self._places, strict=True):
            yield place.start, tensor.reshape(-1).view(torch.uint8)


class Pinned:
    """Page-locked host memory of `size` bytes."""

    def __init__(self, size: int) -> None:
        count = -(-size // _SLAB)
        self._slabs = [torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    def parts(self, start: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """These bytes in parts: the places among them, and the memory of each."""
        done = 0
        while done < size:
            slab, first = divmod(start + done, _SLAB)
            part = self._slabs[slab][first : first + size - done]
            yield slice(done, done + len(part)), part
            done += len(part)

    def keep(self, start: int, values: Tensor) -> None:
        """Write values, uint8, from a device; the host waits."""
        for place, part in self.parts(start, len(values)):
            part.copy_(values[place])


@dataclass(eq=False)
class Block:
    """A block, where its weights come from, and the buffer it is in, if any."""

    module: nn.Module
    flat: Flat
    sources: Sequence[Source]
    buffer: Buffer | None = None

    def read(self, memory: Tensor, done: Callable[[int], object] = int) -> None:
        """Its weights from the files into memory, where it has them from here on."""
        self.flat.use(memory)
        for tensor, source in zip(self.flat.tensors, self.sources, strict=True):
            copy(tensor, source, done=done)


@dataclass(eq=False)
class Buffer:
    """Memory for one block at a time, and which one is there.

    copied, computed: events of an accelerator: the block has come, and it has been used.
    """

    memory: Tensor
    block: Block | None = None
    copied: Any = None
    computed: Any = None


class FromFiles:
    """Fills a CPU's buffer at the call of a block; the system reads the next one meanwhile."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._next = dict(zip(blocks, (*blocks[1:], *blocks[:1]), strict=True))

    def fetch(self, block: Block, buffer: Buffer) -> None:
        block.read(buffer.memory)
        for source in self._next[block].sources:
            source.read_ahead()

    def arrive(self, buffer: Buffer) -> None:
        """It has."""

    def leave(self, buffer: Buffer) -> None:
        """It may be filled again at once."""


class FromHost:
    """Fills an accelerator's buffers from page-locked memory while blocks compute."""

    def __init__(
        self,
        blocks: Sequence[Block],
        buffers: Sequence[Buffer],
        stream: CopyStream,
        done: Callable[[int], object],
    ) -> None:
        """Reads the blocks by way of a buffer: what is converted is converted on the device."""
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

    def fetch(self, block: Block, buffer: Buffer) -> None:
        """Ask for a copy, which waits for what still computes in the buffer."""
        block.flat.use(buffer.memory)
        parts = self._host.parts(self._starts[block], block.flat.size)
        self._stream.copy(buffer.memory, parts, after=buffer.computed)
        self._stream.copied(buffer.copied)

    def arrive(self, buffer: Buffer) -> None:
        """What is computed from here on waits for the copy."""
        self._stream.compute_after(buffer.copied)

    def leave(self, buffer: Buffer) -> None:
        """The next copy waits for what has been computed."""
        self._stream.computed(buffer.computed)


class Streamed:
    """Blocks that are called one after the other, in every forward; some stay in memory.

    A call asks for the blocks that are due: on a CPU its own, on an accelerator also the next one,
    which behind the last is the first of the next forward.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device, resident: int) -> None:
        """resident: how many stay, spread evenly: a copy then has the time of several calls."""
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
            block.module.register_forward_hook(partial(self._after, block))

    def _before(self, block: Block, due: Sequence[Block], *_: object) -> None:
        for wanted in due:
            if wanted.buffer is None:
                self._fetch(wanted, next(b for b in self._buffers if b.block not in due))
        if block.buffer is not None:
            self._source.arrive(block.buffer)

    def _fetch(self, block: Block, buffer: Buffer) -> None:
        if buffer.block is not None:
            buffer.block.flat.rest()
            buffer.block.buffer, buffer.block = None, None
        self._source.fetch(block, buffer)  # may fail half-way: the block is not there then
        buffer.block, block.buffer = block, buffer

    def _after(self, block: Block, *_: object) -> None:
        if block.buffer is not None:
            self._source.leave(block.buffer)


Resident = Callable[[int, int], int]
"""resident(size, count): how many of so many blocks of this size stay on the device."""


def streamed(
    adapt: Adapt,
    blocks: str,
    device: torch.device,
    dtype_of: DTypeOf,
    resident: Resident = lambda size, count: 0,
    *,
    table: str | None = None,
) -> Adapt:
    """An adaptation after which some modules of a network are not loaded with it.

    Args:
        adapt: What else the network becomes.
        blocks: The list of modules that are `Streamed`.
        device: Where they compute.
        dtype_of: The dtypes that they compute in.
        resident: How many stay on the device.
        table: An embedding whose rows are read from the files when they are looked up.
    """

    def adapted(network: nn.Module, sources: Sources) -> Sources:
        sources = adapt(network, sources)
        found = []
        for index, module in enumerate(network.get_submodule(blocks).children()):
            flat, names = _on_device(module, f"{blocks}.{index}.", sources, device, dtype_of)
            found.append(Block(module, flat, [sources[name] for name in names]))
        most = max(block.flat.size for block in found)
        Streamed(found, device, min(resident(most, len(found)), len(found)))
        if table is not None:
            module = network.get_submodule(table)
            _, (name,) = _on_device(module, f"{table}.", sources, device, dtype_of)
            module.register_forward_hook(partial(_look_up, sources[name]))
        return sources

    return adapted


def _on_device(
    module: nn.Module, prefix: str, sources: Sources, device: torch.device, dtype_of: DTypeOf
) -> tuple[Flat, list[str]]:
    """A module from the meta device, without memory, and its tensors' names in the network."""
    for name, parameter in module.named_parameters(prefix=prefix[:-1]):
        parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))
    flat = Flat(module.to_empty(device=device))
    flat.rest()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return flat, [f"{prefix}{name}" for name, _ in tensors]


def _look_up(source: Source, _: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    """The rows that an embedding was asked for, in place of what it found without memory."""
    rows, places = args[0].cpu().unique(return_inverse=True)
    found = torch.cat([source.read(slice(row, row + 1)) for row in rows.tolist()])
    return found.to(output.dtype)[places].to(output.device)


class Parked:
    """A network that waits in page-locked host memory and is on its accelerator when it is called.

    beside: all such networks of a pipeline; the others leave when one comes.
    """

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        beside: list[Parked],
        left: Callable[[], None],
    ) -> None:
        """network: loaded; its weights do not change any more. left: frees what else it keeps."""
        self._flat, self._device, self._beside, self._left = Flat(network), device, beside, left
        self._host, self._there = Pinned(self._flat.size), True
        for start, values in self._flat.bytes():
            self._host.keep(start, values)
        beside.append(self)
        network.register_forward_pre_hook(self._before)

    def leave(self) -> None:
        """Frees the accelerator's memory."""
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
