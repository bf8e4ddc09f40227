"""Offloads weights while their layers do not compute: `offload_model` `cpu` and `block`.

With `block` only some blocks of a network are on its device; each block is copied there before it
is called. An accelerator has two buffers: a block computes in one buffer while the next block is
copied into the other from page-locked host memory, on a separate copy stream. On a CPU, weights
that need no conversion are memory-mapped from their files, as when the whole network is loaded; the
other weights are converted (dtype, LoRA) and written into one buffer.

With `cpu` all networks have a copy in page-locked host memory, and one network at a time is on the
accelerator.

All copies are made in forward hooks, so the layers need no code for offloading, and a block that a
step cache skips is copied at most as the next block of a computed one. A weight without memory is a
NaN (or 0) expanded to its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.formats.tensor_source import (
    TensorSource,
    TensorSources,
    owns_memory,
    replace_by_mapped_views,
)
from wan.checkpoint.load import DtypeRule, WeightTransform, copy_rows
from wan.device import CopyStream
from wan.settings.execution import count_block_buffers
from wan.utils.log import make_progress_bar
from wan.utils.system import limit_cpu_threads

_ALIGNMENT = 512  # bytes, as PyTorch aligns an accelerator's memory
_SLAB_BYTES = 1 << 28  # bytes; PyTorch rounds page-locked memory up to a power of two, and keeps it


class FlatTensors:
    """Tensors of a module, packed one after the other into one buffer.

    Attributes:
        size: Bytes of the buffer.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._layout: list[tuple[slice, torch.dtype, torch.Size]] = []
        self.size = 0
        for tensor in self.tensors:
            span = slice(self.size, self.size + tensor.nbytes)
            self._layout.append((span, tensor.dtype, tensor.shape))
            self.size = -(-span.stop // _ALIGNMENT) * _ALIGNMENT

    def bind_storage(self, memory: Tensor) -> None:
        """Makes the tensors views of `memory`, uint8 [>= size]."""
        for tensor, (span, dtype, shape) in zip(self.tensors, self._layout, strict=True):
            tensor.data = memory[span].view(dtype).view(shape)

    def free_storage(self) -> None:
        """Replaces each tensor by one expanded element, which frees its memory."""
        for tensor, (_, dtype, shape) in zip(self.tensors, self._layout, strict=True):
            fill = float("nan") if dtype.is_floating_point else 0
            tensor.data = torch.full((), fill, dtype=dtype, device=tensor.device).expand(shape)

    def byte_views(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the byte offset of each tensor, and its values as uint8."""
        for tensor, (span, _, _) in zip(self.tensors, self._layout, strict=True):
            yield span.start, tensor.reshape(-1).view(torch.uint8)


class PinnedMemory:
    """Page-locked host memory of `size` bytes."""

    def __init__(self, size: int) -> None:
        count = -(-size // _SLAB_BYTES)
        self._slabs = [
            torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(count)
        ]

    def chunks(self, start: int, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Splits `size` bytes from `start` at the slab boundaries.

        Yields:
            A slice of 0..size, and the uint8 view of its bytes.
        """
        offset = 0
        while offset < size:
            slab, slab_offset = divmod(start + offset, _SLAB_BYTES)
            chunk = self._slabs[slab][slab_offset : slab_offset + size - offset]
            yield slice(offset, offset + len(chunk)), chunk
            offset += len(chunk)

    def write(self, start: int, values: Tensor) -> None:
        """Copies uint8 values from a device to offset `start`, and waits for the copy."""
        for span, chunk in self.chunks(start, len(values)):
            chunk.copy_(values[span])


@dataclass(eq=False)
class OffloadableBlock:
    """A block of a network, with the sources of its weights.

    Attributes:
        module: The block.
        last_module: Of the block and its adapter modules, the one that is called last.
        flat: The tensors that are copied into a buffer.
        sources: The sources of these tensors.
        mapped_sources: The sources of the block's memory-mapped tensors.
        buffer: The buffer that holds the block; None while it has no memory.
    """

    module: nn.Module
    last_module: nn.Module
    flat: FlatTensors
    sources: Sequence[TensorSource]
    mapped_sources: Sequence[TensorSource] = ()
    buffer: BlockBuffer | None = None

    def load_into(
        self, memory: Tensor, update_progress: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Reads the weights from their sources into `memory`, and makes the tensors views of it."""
        self.flat.bind_storage(memory)
        for tensor, source in zip(self.flat.tensors, self.sources, strict=True):
            copy_rows(tensor, source, on_progress=update_progress)


@dataclass(eq=False)
class BlockBuffer:
    """Device memory for one block at a time.

    Attributes:
        memory: uint8.
        block: The block that is in the buffer.
        copy_event: Recorded on an accelerator after the copy of the block.
        compute_event: Recorded on an accelerator after the computations with the block.
    """

    memory: Tensor
    block: OffloadableBlock | None = None
    copy_event: Any = None
    compute_event: Any = None


class FileBlockLoader:
    """Fills a CPU's buffer from the weight files when a block is called.

    The operating system reads the next block ahead meanwhile.
    """

    def __init__(self, blocks: Sequence[OffloadableBlock]) -> None:
        self._next_block = dict(zip(blocks, (*blocks[1:], *blocks[:1]), strict=True))

    def fetch(self, block: OffloadableBlock, buffer: BlockBuffer) -> None:
        block.load_into(buffer.memory)
        next_block = self._next_block[block]
        for source in (*next_block.sources, *next_block.mapped_sources):
            source.prefetch()

    def wait_for_copy(self, buffer: BlockBuffer) -> None:
        """Does nothing: `fetch` has finished the copy."""

    def release(self, buffer: BlockBuffer) -> None:
        """Does nothing: the CPU has finished its computations."""


class HostBlockLoader:
    """Fills an accelerator's buffers from page-locked memory while blocks compute."""

    def __init__(
        self,
        blocks: Sequence[OffloadableBlock],
        buffers: Sequence[BlockBuffer],
        stream: CopyStream,
        update_progress: Callable[[int], object],
    ) -> None:
        """Reads all blocks into host memory through a device buffer, which converts the dtypes."""
        sizes = [block.flat.size for block in blocks]
        offsets = accumulate(sizes, initial=0)
        self._offsets = dict(zip(blocks, offsets, strict=False))
        self._host = PinnedMemory(sum(sizes))
        self._stream = stream
        for block in blocks:
            block.load_into(buffers[0].memory, update_progress)
            self._host.write(self._offsets[block], buffers[0].memory[: block.flat.size])
            block.flat.free_storage()
        for buffer in buffers:
            self._stream.record_stream(buffer.memory)
            buffer.copy_event = self._stream.make_event()
            buffer.compute_event = self._stream.make_event()
            self.release(buffer)

    def fetch(self, block: OffloadableBlock, buffer: BlockBuffer) -> None:
        """Starts the copy of a block, after the last computation that uses the buffer."""
        block.flat.bind_storage(buffer.memory)
        chunks = self._host.chunks(self._offsets[block], block.flat.size)
        self._stream.copy(buffer.memory, chunks, event=buffer.compute_event)
        self._stream.record_copied(buffer.copy_event)

    def wait_for_copy(self, buffer: BlockBuffer) -> None:
        """Makes later computations wait for the copy into the buffer."""
        self._stream.make_compute_wait(buffer.copy_event)

    def release(self, buffer: BlockBuffer) -> None:
        """Makes the next copy into the buffer wait for the computations queued so far."""
        self._stream.record_computed(buffer.compute_event)


class BlockStreamer:
    """Blocks that every forward calls in a fixed order, or skips; some stay resident.

    Before a block is called, its weights are fetched; on an accelerator also those of the next
    block (after the last block: the first).
    """

    def __init__(
        self, blocks: Sequence[OffloadableBlock], device: torch.device, num_resident: int
    ) -> None:
        """Loads the resident blocks, and registers the forward hooks of all blocks.

        Args:
            blocks: In the order of their calls.
            device: The device that computes.
            num_resident: Number of resident blocks. They are spread evenly, so that a copy can
                overlap with several blocks.
        """
        count, on_cpu = len(blocks), device.type == "cpu"
        if count - num_resident <= count_block_buffers(device.type):
            num_resident = count  # buffers would need as much memory as the blocks
        # Resident blocks are spread evenly.
        streamed_blocks = [
            b for i, b in enumerate(blocks) if i * num_resident % count >= num_resident
        ]
        resident_blocks = [block for block in blocks if block not in streamed_blocks]
        buffer_size = max((block.flat.size for block in streamed_blocks), default=0)

        def allocate(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        self._buffers = [
            BlockBuffer(allocate(buffer_size))
            for _ in range(count_block_buffers(device.type))
            if streamed_blocks
        ]
        self._loader: FileBlockLoader | HostBlockLoader = FileBlockLoader(streamed_blocks)
        preloaded = resident_blocks if on_cpu else blocks
        if preloaded:
            total = sum(block.flat.size for block in preloaded)
            with make_progress_bar(total, "loading blocks", "B") as bar, limit_cpu_threads():
                for block in resident_blocks:
                    block.load_into(allocate(block.flat.size), bar.update)
                if streamed_blocks and not on_cpu:
                    self._loader = HostBlockLoader(
                        streamed_blocks, self._buffers, CopyStream(device), bar.update
                    )
        for index, block in enumerate(blocks):
            upcoming = [b for b in (*blocks[index:], *blocks[:index]) if b in streamed_blocks]
            upcoming = (
                upcoming[: len(self._buffers)] if not on_cpu or block in streamed_blocks else []
            )
            block.module.register_forward_pre_hook(partial(self._pre_forward, block, upcoming))
            block.last_module.register_forward_hook(partial(self._post_forward, block))

    def _pre_forward(
        self, block: OffloadableBlock, upcoming: Sequence[OffloadableBlock], *_: object
    ) -> None:
        for next_block in upcoming:
            if next_block.buffer is None:
                self._fetch(next_block, next(b for b in self._buffers if b.block not in upcoming))
        if block.buffer is not None:
            self._loader.wait_for_copy(block.buffer)
        for source in block.mapped_sources:
            source.check_unchanged()

    def _fetch(self, block: OffloadableBlock, buffer: BlockBuffer) -> None:
        if buffer.block is not None:
            buffer.block.flat.free_storage()
            buffer.block.buffer, buffer.block = None, None
        self._loader.fetch(block, buffer)  # if it fails half-way, the buffer holds no block
        buffer.block, block.buffer = block, buffer

    def _post_forward(self, block: OffloadableBlock, *_: object) -> None:
        if block.buffer is not None:
            self._loader.release(block.buffer)


CountResidentBlocks = Callable[[int, int], int]
"""(size, count) -> how many of `count` blocks of `size` bytes are resident."""


def stream_blocks(
    transform: WeightTransform,
    blocks_name: str,
    device: torch.device,
    dtype_of: DtypeRule,
    count_resident: CountResidentBlocks = lambda size, count: 0,
    *,
    embedding_name: str | None = None,
    adapter_modules: Callable[[Any, int], Sequence[nn.Module]] = lambda network, index: (),
) -> WeightTransform:
    """Returns a weight transform that streams the blocks of a network instead of loading them.

    Args:
        transform: The weight transform that is applied first.
        blocks_name: Name of the network's list of blocks.
        device: The device that computes.
        dtype_of: Chooses the dtypes on the device.
        count_resident: Chooses the number of resident blocks.
        embedding_name: Name of an embedding whose rows are read from the files on each lookup.
        adapter_modules: (network, index) -> the modules that are copied together with a block; the
            last one is called after the block in every forward.
    """

    def transform_and_stream(network: nn.Module, sources: TensorSources) -> TensorSources:
        sources = transform(network, sources)
        offloadable_blocks = []
        names = {module: f"{name}." for name, module in network.named_modules()}
        for index, module in enumerate(network.get_submodule(blocks_name).children()):
            block_modules = {
                names[member]: member for member in (module, *adapter_modules(network, index))
            }
            flat, flat_sources, mapped_sources = _materialize_without_storage(
                block_modules, sources, device, dtype_of
            )
            last_module = [*block_modules.values()][-1]
            offloadable_blocks.append(
                OffloadableBlock(module, last_module, flat, flat_sources, mapped_sources)
            )
        largest_size = max(block.flat.size for block in offloadable_blocks)
        BlockStreamer(
            offloadable_blocks,
            device,
            min(count_resident(largest_size, len(offloadable_blocks)), len(offloadable_blocks)),
        )
        if embedding_name is not None:
            module = network.get_submodule(embedding_name)
            _, embedding_sources, _ = _materialize_without_storage(
                {f"{embedding_name}.": module}, sources, device, dtype_of
            )
            for source in embedding_sources:
                module.register_forward_hook(partial(_look_up_embeddings, source))
        return sources

    return transform_and_stream


def _materialize_without_storage(
    modules: Mapping[str, nn.Module],
    sources: TensorSources,
    device: torch.device,
    dtype_of: DtypeRule,
) -> tuple[FlatTensors, list[TensorSource], list[TensorSource]]:
    """Moves meta modules to a device, where their tensors have no memory yet.

    On a CPU, tensors that need no conversion are memory-mapped instead.

    Args:
        modules: The key is the prefix of the module's tensor names.

    Returns:
        The tensors to copy, their sources, and the sources of the memory-mapped tensors.
    """
    tensors: dict[str, tuple[Tensor, TensorSource]] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters(prefix=prefix[:-1]):
            parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))
        module.to_empty(device=device)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensors[f"{prefix}{name}"] = tensor, sources[f"{prefix}{name}"]
    if device.type == "cpu":
        replace_by_mapped_views(tensors.values())
    copies = [(tensor, source) for tensor, source in tensors.values() if owns_memory(tensor)]
    flat = FlatTensors([tensor for tensor, _ in copies])
    flat.free_storage()
    mapped_sources = [source for tensor, source in tensors.values() if not owns_memory(tensor)]
    return flat, [source for _, source in copies], mapped_sources


def _look_up_embeddings(
    source: TensorSource, _: nn.Module, args: tuple[Tensor], output: Tensor
) -> Tensor:
    """Replaces an embedding's output by rows that are read from `source`; a forward hook."""
    token_ids, inverse = args[0].cpu().unique(return_inverse=True)
    source.check_unchanged()
    embeddings = torch.cat([source.read(slice(token, token + 1)) for token in token_ids.tolist()])
    return embeddings.to(output.dtype)[inverse].to(output.device)


class OffloadedModule:
    """A network with a copy in page-locked host memory, loaded to the accelerator when called."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        offloaded_modules: list[OffloadedModule],
        on_free: Callable[[], None],
    ) -> None:
        """Copies the network's tensors to host memory.

        Args:
            network: A loaded network, whose weights do not change from now on.
            device: Its accelerator.
            offloaded_modules: All offloaded networks of a pipeline; at most one is on the device.
            on_free: Frees the network's caches when it is offloaded.
        """
        self._flat = FlatTensors([*network.parameters(), *network.buffers()])
        self._device, self._offloaded_modules, self._on_free = device, offloaded_modules, on_free
        self._host, self._is_on_device = PinnedMemory(self._flat.size), True
        for start, values in self._flat.byte_views():
            self._host.write(start, values)
        offloaded_modules.append(self)
        network.register_forward_pre_hook(self._pre_forward)

    def free_device_memory(self) -> None:
        """Frees the network's memory on the accelerator."""
        self._flat.free_storage()
        self._on_free()
        self._is_on_device = False

    def _pre_forward(self, *_: object) -> None:
        if self._is_on_device:
            return
        for other in self._offloaded_modules:  # at most one has memory; for the others: no effect
            other.free_device_memory()
        memory = torch.empty(self._flat.size, dtype=torch.uint8, device=self._device)
        for span, chunk in self._host.chunks(0, self._flat.size):
            memory[span].copy_(chunk, non_blocking=True)
        self._flat.bind_storage(memory)
        self._is_on_device = True
