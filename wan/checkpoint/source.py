"""Where the values of a network's tensors come from, and those that stay in their mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from wan import host
from wan.checkpoint.files import FileState, alignment, file_gone, file_state
from wan.settings.errors import FileChangedError

N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class MappedFile:
    """A weight file that is mapped, and must stay as it was then while it is used.

    The system ends a process that reads a mapped page behind the end of a truncated file, so the
    file is looked at before its pages are used. A file that another one has replaced is still
    there, nameless, for who has it open.

    Attributes:
        path: Its name.
        opened: The file itself.
        state: What it must stay.
    """

    path: Path
    opened: BinaryIO
    state: FileState

    @classmethod
    def open(cls, path: Path, state: FileState | None = None) -> MappedFile:
        """Opens a file.

        Args:
            path: The file.
            state: What it was when its header was read; None: what it is now.

        Raises:
            FileChangedError: It has another state, or is not there.
        """
        try:
            opened = path.open("rb")
        except OSError as error:
            raise file_gone(path, error) from None
        file = cls(path, opened, file_state(opened.fileno()) if state is None else state)
        file.check()
        return file

    def check(self) -> None:
        """Raises FileChangedError if the file was written or truncated; takes microseconds."""
        if file_state(self.opened.fileno()) != self.state:
            raise FileChangedError(
                f"{self.path} was changed while its weights were used; start again, and give a "
                "file a new content by moving another one to its name."
            )


@dataclass(frozen=True)
class Source:
    """Where the values of one tensor come from, and what they become while they are loaded.

    Attributes:
        dtype: What the values are read as.
        shape: The shape that the network has.
        read: Returns rows on the CPU, in any dtype; the caller copies them.
        mapped: The part of the file that is read, for reading ahead.
        file: The file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slice], Tensor]
    mapped: Tensor | None = None
    file: MappedFile | None = None

    def read_ahead(self) -> None:
        """Asks the system to read all of it from the disk soon, and does not wait."""
        if self.mapped is not None:
            host.read_ahead_mapped(self.mapped.data_ptr(), self.mapped.nbytes)

    def read_checked(self, rows: slice) -> Tensor:
        """Returns rows, after `check`."""
        self.check()
        return self.read(rows)

    def check(self) -> None:
        """Raises FileChangedError if its file is not what it was when it was mapped."""
        if self.file is not None:
            self.file.check()

    def stays_mapped(self, tensor: Tensor) -> bool:
        """Returns whether a CPU's tensor may be the mapped values themselves.

        They are then read as they are stored, and begin where products have the bits of a copy's.
        The same tensors must give the same video from every file layout, and MKL's products of
        one row in float32 depend on where a matrix begins. ADR 8 has the measurements.
        """
        view = self.mapped
        return (
            view is not None
            and self.file is not None
            and self.read == view.__getitem__
            and (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
            and view.is_contiguous()
            and view.data_ptr() % alignment(view.itemsize) == 0
        )


Sources = Mapping[str, Source]


def joined(parts: Sequence[Source], shape: tuple[int, ...]) -> Source:
    """Reads rows of several tensors as if they were one; they have equally many."""
    size = shape[0] // len(parts)

    def read(rows: slice) -> Tensor:
        start, stop, _ = rows.indices(shape[0])
        found = []
        for i, part in enumerate(parts):
            first, last = max(start - i * size, 0), min(stop - i * size, size)
            if first < last:
                found.append(part.read_checked(slice(first, last)))
        return torch.cat(found)

    return Source(parts[0].dtype, shape, read, file=parts[0].file)


def use_mapped(tensors: Iterable[tuple[Tensor, Source]]) -> list[Source]:
    """Makes those tensors of a CPU views of the mapped files that are stored as they are used.

    Returns:
        Their sources.
    """
    found = []
    for tensor, source in tensors:
        if source.mapped is not None and source.stays_mapped(tensor):
            tensor.data = source.mapped
            found.append(source)
    return found


def watch(network: nn.Module, used: Sequence[Source]) -> None:
    """Reads mapped weights ahead, and looks at their files whenever the network is called.

    They are read in the background, if there is memory for all of them. The files are looked at
    before each call of the network or of a module directly inside it, which raises
    FileChangedError where one is not what it was.
    """
    host.in_background(partial(_read_ahead, used))
    files = {source.file for source in used if source.file is not None}
    for module in (network, *network.children()) if files else ():
        module.register_forward_pre_hook(partial(_check_files, files))


def _read_ahead(sources: Iterable[Source]) -> None:
    size = sum(source.mapped.nbytes for source in sources if source.mapped is not None)
    if size <= (host.available_memory() or 0):  # otherwise the end would push out the beginning
        for source in sources:
            source.read_ahead()


def _check_files(files: Iterable[MappedFile], *_: object) -> None:
    for file in files:
        file.check()


def mapped_bytes(network: nn.Module, sources: Sources, prefix: str = "") -> int:
    """Returns the bytes of a meta network that would stay mapped. prefix: of their names."""
    return sum(
        tensor.nbytes
        for name, tensor in tensors_of(network).items()
        if name.startswith(prefix) and name in sources and sources[name].stays_mapped(tensor)
    )


def is_own(tensor: Tensor) -> bool:
    """Returns whether a tensor's memory is PyTorch's, and no mapped file's."""
    return tensor.untyped_storage().resizable()


def own(network: N) -> N:
    """Copies what is still in mapped files, so that the network may be changed; returns it."""
    for tensor in tensors_of(network).values():
        if not is_own(tensor):
            tensor.data = tensor.data.clone()
    return network


def tensors_of(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Returns the parameters and the buffers of a module by name."""
    parameters = module.named_parameters(recurse=recurse)
    return dict(parameters) | dict(module.named_buffers(recurse=recurse))
