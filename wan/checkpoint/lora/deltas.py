"""Weight deltas of LoRA files, described by the tensors that they are computed from; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from wan.checkpoint.formats.tensor_info import TensorInfo


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix that is stored whole, with all axes but the first flattened."""

    info: TensorInfo

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        return (self.info,)

    @property
    def shape(self) -> tuple[int, int] | None:
        return (self.info.shape[0], prod(self.info.shape[1:])) if self.info.shape else None


@dataclass(frozen=True)
class LowRankMatrix:
    """up @ down.

    Attributes:
        up: [rows, rank, 1, ...].
        down: [rank, columns...].
    """

    up: TensorInfo
    down: TensorInfo

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        return self.up, self.down

    @property
    def rank(self) -> int:
        return self.down.shape[0] if self.down.shape else 0

    @property
    def shape(self) -> tuple[int, int] | None:
        """None if the factors do not fit each other."""
        up, down = self.up.shape, self.down.shape
        if len(up) < 2 or len(down) < 2 or not prod(down) or prod(up[2:]) != 1:
            return None
        return (up[0], prod(down[1:])) if up[1] == down[0] else None


Matrix = StoredMatrix | LowRankMatrix


@dataclass(frozen=True)
class WeightDelta:
    """A weight delta of one parameter.

    Attributes:
        scale: Factor of the matrix or the product; includes the LoRA's strength, but for a DoRA.
        matrices: Two for a product, otherwise one.
        operation: "add" the matrix; the product of two matrices by elements ("hadamard", LoHa) or
            of Kronecker ("kronecker", LoKr); the weight times the matrix ("multiply", GLoRA); or
            "replace" the parameter by the matrix.
        magnitude: DoRA's norms of the rows of the changed weight.
        strength: The LoRA's, of a DoRA.
    """

    scale: float
    matrices: tuple[Matrix, ...]
    operation: Literal["add", "hadamard", "kronecker", "multiply", "replace"] = "add"
    magnitude: TensorInfo | None = None
    strength: float = 1.0

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """All tensors."""
        infos = tuple(info for matrix in self.matrices for info in matrix.infos)
        return infos if self.magnitude is None else (*infos, self.magnitude)

    @property
    def file(self) -> Path:
        return self.infos[0].file

    @property
    def shape(self) -> tuple[int, int] | None:
        """Of the weight, of "multiply" of the matrix; None if the tensors do not fit each other."""
        shapes = [matrix.shape for matrix in self.matrices]
        first, last = shapes[0], shapes[-1]
        if first is None or last is None:
            return None
        if self.operation == "kronecker":
            return first[0] * last[0], first[1] * last[1]
        return first if first == last else None

    @property
    def rank(self) -> int:
        """The rank of the pair that computes it without the weight; 0 for LoKr."""
        ranks = [matrix.rank for matrix in self.matrices if isinstance(matrix, LowRankMatrix)]
        return 0 if self.operation == "kronecker" else prod(ranks)

    @property
    def needs_base(self) -> bool:
        """Whether the delta depends on the weight."""
        return self.magnitude is not None or self.operation in ("multiply", "replace")

    @property
    def is_separable(self) -> bool:
        """Whether a layer can add its output to that of the unchanged weight, in less memory."""
        if self.magnitude is not None or self.operation == "replace" or self.shape is None:
            return False
        if self.operation == "kronecker":
            sizes = [prod(matrix.shape or ()) for matrix in self.matrices]
            return 2 * sum(sizes) <= prod(self.shape)
        if any(isinstance(x, StoredMatrix) for x in self.matrices):
            return False
        return self.operation != "hadamard" or 2 * self.rank * sum(self.shape) <= prod(self.shape)


def list_factor_shapes(deltas: Sequence[WeightDelta]) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the buffers of a layer with separate deltas, by name.

    `lora_up` and `lora_down` are the pairs of all deltas, joined; `lora_left_I` and `lora_right_I`
    the matrices of the I-th LoKr.
    """
    shapes: dict[str, tuple[int, int]] = {}
    pairs = [delta for delta in deltas if delta.operation != "kronecker"]
    weight_shape = next((x.shape for x in pairs if x.operation != "multiply"), None)
    if weight_shape is not None:  # GLoRA has a pair of this shape, too
        rows, columns = weight_shape
        rank = sum(delta.rank for delta in pairs)
        shapes = {"lora_up": (rows, rank), "lora_down": (rank, columns)}
    for index, delta in enumerate(list_kroneckers(deltas)):
        for side, matrix in zip(("left", "right"), delta.matrices, strict=True):
            assert matrix.shape is not None
            shapes[f"lora_{side}_{index}"] = matrix.shape
    return shapes


def list_kroneckers(deltas: Sequence[WeightDelta]) -> list[WeightDelta]:
    """Returns the deltas of LoKr."""
    return [delta for delta in deltas if delta.operation == "kronecker"]
