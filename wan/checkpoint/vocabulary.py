"""Reads the tokenizer's vocabulary that is embedded in a text encoder's weight file.

ComfyUI's files contain a SentencePiece model as bytes (tensor `spiece_model`); GGUF files contain
its vocabulary in their metadata (llama.cpp's keys). Three fields of SentencePiece's protobuf
message are needed, so neither the sentencepiece nor the protobuf library is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from wan.checkpoint import gguf
from wan.checkpoint.files import opened, safetensors_places
from wan.settings.errors import InputError
from wan.settings.values import shown

_TENSOR = "spiece_model"
_KEYS = {  # llama.cpp's, for T5's Unigram vocabulary
    "pieces": "tokenizer.ggml.tokens",
    "scores": "tokenizer.ggml.scores",
    "types": "tokenizer.ggml.token_type",
    "charsmap": "tokenizer.ggml.precompiled_charsmap",
}
_SPECIAL = (3, 4)  # SentencePiece's types: control, user defined
_UNIGRAM = 1


@dataclass(frozen=True)
class Vocabulary:
    """A Unigram tokenizer's vocabulary.

    Attributes:
        vocab: Text and score of each token, by id.
        special_tokens: Tokens that are matched in a text before it is split.
        precompiled_charsmap: SentencePiece's compiled rules for normalizing a text.
    """

    pieces: list[tuple[str, float]]
    special: list[str]
    charsmap: bytes


def has_vocabulary(path: Path) -> bool:
    """Returns whether a text encoder's file contains its tokenizer, by tensor or metadata names."""
    if path.suffix == ".safetensors" and path.is_file():
        return _TENSOR in safetensors_places(path)
    if path.suffix == ".gguf":
        return _KEYS["scores"] in gguf.metadata(path, (_KEYS["scores"],))
    return False


def vocabulary(path: Path) -> Vocabulary:
    """Reads the vocabulary embedded in a weight file; InputError if it is damaged."""
    try:
        return _in_gguf(path) if path.suffix == ".gguf" else _in_safetensors(path)
    except (ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        why = f"holds a damaged tokenizer ({error})"
        raise InputError(f"{path}", None, why, "download it again") from None


def _in_gguf(path: Path) -> Vocabulary:
    found = gguf.metadata(path, _KEYS.values())
    pieces, scores = found[_KEYS["pieces"]], found[_KEYS["scores"]]
    types = found.get(_KEYS["types"], (1,) * len(pieces))
    charsmap = found.get(_KEYS["charsmap"], ())
    return _checked(list(zip(pieces, scores, types, strict=True)), bytes(x & 255 for x in charsmap))


def _in_safetensors(path: Path) -> Vocabulary:
    _, shape, start = safetensors_places(path)[_TENSOR]
    (size,) = shape
    with opened(path) as file:
        file.seek(start)
        model = file.read(size)
    pieces, charsmap, kind = [], b"", _UNIGRAM
    for field, value in _fields(model):
        if field == 1:
            piece = {1: b"", 2: 0.0, 3: 1, **dict(_fields(value))}
            pieces.append((piece[1].decode("utf-8"), piece[2], piece[3]))
        elif field == 2:
            kind = dict(_fields(value)).get(3, kind)
        elif field == 3:
            charsmap = dict(_fields(value)).get(2, b"")
    if kind != _UNIGRAM:
        raise ValueError(f"a model of kind {kind}, not Unigram")
    return _checked(pieces, charsmap)


def _checked(pieces: list[tuple[str, float, int]], charsmap: bytes) -> Vocabulary:
    for piece, score, kind in pieces:
        number = isinstance(score, float) and isfinite(score)
        if not (isinstance(piece, str) and number and isinstance(kind, int)):
            raise ValueError(f"{shown(piece)} with the score {shown(score)}")
    if not isinstance(charsmap, bytes):
        raise ValueError("its normalization rules are no bytes")
    first = [piece for piece, _, _ in pieces[:3]]
    if first != ["<pad>", "</s>", "<unk>"]:
        raise ValueError(f"its first tokens are {first}, not T5's")
    special = [piece for piece, _, kind in pieces if kind in _SPECIAL]
    return Vocabulary([(piece, score) for piece, score, _ in pieces], special, charsmap)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a protobuf message's fields; values are int, float or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        found = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise ValueError("truncated")
            byte = message[at]
            at, found, shift = at + 1, found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    while at < len(message):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or (varint() if wire == 2 else len(message) + 1)
        value, at = message[at : at + size], at + size
        if at > len(message):
            raise ValueError("truncated")
        yield key >> 3, struct.unpack("<f", value)[0] if wire == 5 else value
