"""Sources of a network's weights, and weights that are views of memory-mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from wan.checkpoint.formats.headers import make_file_gone_error
from wan.checkpoint.formats.tensor_info import FileState, get_tensor_alignment, read_file_state
from wan.settings.errors import FileChangedError
from wan.utils import system

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class MappedFile:
    """A memory-mapped weight file, which must not change while it is in use.

    Reading a mapped page past the end of a truncated file kills the process (SIGBUS), so the file
    is checked before its pages are read. A file replaced by renaming another one over it stays
    valid as long as it is open.

    Attributes:
        state: Size and modification time, which must stay the same.
    """

    path: Path
    handle: BinaryIO
    state: FileState

    @classmethod
    def open(cls, path: Path, state: FileState | None = None) -> MappedFile:
        """Opens a file.

        Args:
            state: The file's state when its header was read; None: the current state.

        Raises:
            FileChangedError: The file has another state or does not exist.
        """
        try:
            handle = path.open("rb")
        except OSError as error:
            raise make_file_gone_error(path, error) from None
        file = cls(path, handle, read_file_state(handle.fileno()) if state is None else state)
        file.check()
        return file

    def check(self) -> None:
        """Raises FileChangedError if the file was written or truncated; takes microseconds."""
        if read_file_state(self.handle.fileno()) != self.state:
            raise FileChangedError(
                f"{self.path} was changed while its weights were used; start again. To replace a "
                "weight file, move the new one to its name instead of writing into it."
            )


@dataclass(frozen=True)
class TensorSource:
    """Reads the values of one tensor, possibly dequantized or merged.

    Attributes:
        dtype: The dtype of the values before conversion to the network's dtype.
        shape: The shape of the network's tensor.
        read: Returns rows on the CPU, in any dtype; the caller must copy them.
        mapped_tensor: View of the stored bytes in the file, for prefetching.
        file: None if the values are not read from a mapped file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice], Tensor]
    mapped_tensor: Tensor | None = None
    file: MappedFile | None = None

    def prefetch(self) -> None:
        """Starts reading the tensor from disk into the page cache, without waiting."""
        if self.mapped_tensor is not None:
            system.prefetch_mapped_bytes(self.mapped_tensor.data_ptr(), self.mapped_tensor.nbytes)

    def read_checked(self, rows: slice) -> Tensor:
        """Checks the file and returns rows."""
        self.check_unchanged()
        return self.read(rows)

    def check_unchanged(self) -> None:
        """Raises FileChangedError if the file has changed since it was mapped."""
        if self.file is not None:
            self.file.check()

    def stays_mapped(self, tensor: Tensor) -> bool:
        """Returns whether a tensor on a CPU may be a view of the mapped file.

        The values must be stored in the final dtype and be aligned like a copy: MKL's products of
        one row in float32 depend on the alignment of the matrix, and the same tensors must give
        the same video from every file layout. ADR 8 has the measurements.
        """
        view = self.mapped_tensor
        return (
            view is not None
            and self.file is not None
            and self.read == view.__getitem__
            and (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
            and view.is_contiguous()
            and view.data_ptr() % get_tensor_alignment(view.itemsize) == 0
        )


TensorSources = Mapping[str, TensorSource]


def concat_sources(sources: Sequence[TensorSource], shape: tuple[int, ...]) -> TensorSource:
    """Concatenates sources with equally many rows along dim 0."""
    rows_per_source = shape[0] // len(sources)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(shape[0])
        tensors = []
        for i, source in enumerate(sources):
            first_row = max(start - i * rows_per_source, 0)
            last_row = min(stop - i * rows_per_source, rows_per_source)
            if first_row < last_row:
                tensors.append(source.read_checked(slice(first_row, last_row)))
        return torch.cat(tensors)

    return TensorSource(sources[0].dtype, shape, read, file=sources[0].file)


def replace_by_mapped_views(tensors: Iterable[tuple[Tensor, TensorSource]]) -> list[TensorSource]:
    """Replaces tensors on a CPU by views of the mapped files, where dtype and alignment allow it.

    Returns:
        The sources of the replaced tensors.
    """
    sources = []
    for tensor, source in tensors:
        if source.mapped_tensor is not None and source.stays_mapped(tensor):
            tensor.data = source.mapped_tensor
            sources.append(source)
    return sources


def watch_mapped_files(network: nn.Module, sources: Sequence[TensorSource]) -> None:
    """Prefetches mapped weights, and checks their files whenever the network is called.

    The weights are read from disk in the background if the memory suffices for all of them. Calling
    the network or one of its children raises FileChangedError if a file has changed.
    """
    system.start_background_thread(partial(_prefetch_sources, sources))
    files = {source.file for source in sources if source.file is not None}
    for module in (network, *network.children()) if files else ():
        module.register_forward_pre_hook(partial(_check_mapped_files, files))


def _prefetch_sources(sources: Iterable[TensorSource]) -> None:
    size = sum(
        source.mapped_tensor.nbytes for source in sources if source.mapped_tensor is not None
    )
    if size <= (system.read_available_memory() or 0):  # else the last pages evict the first
        for source in sources:
            source.prefetch()


def _check_mapped_files(files: Iterable[MappedFile], *_: object) -> None:
    for file in files:
        file.check()


def owns_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor's memory was allocated by PyTorch and is not a mapped file."""
    return tensor.untyped_storage().resizable()


def materialize_tensors(network: N) -> N:
    """Copies mapped tensors into memory, so that they may be written; returns the network."""
    for tensor in get_named_tensors(network).values():
        if not owns_memory(tensor):
            tensor.data = tensor.data.clone()
    return network


def get_named_tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Returns the parameters and the buffers of a module by name."""
    parameters = module.named_parameters(recurse=recurse)
    return dict(parameters) | dict(module.named_buffers(recurse=recurse))
