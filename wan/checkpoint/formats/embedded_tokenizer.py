"""Reads the vocabulary of a SentencePiece tokenizer, embedded in a weight file or alone.

ComfyUI's files contain a SentencePiece model as bytes (tensor `spiece_model`), folders as
`spiece.model`; GGUF files contain its vocabulary in their metadata (llama.cpp's keys). Three fields
of SentencePiece's protobuf message are needed, so neither the sentencepiece nor the protobuf
library is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from wan.checkpoint.formats import gguf
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.tensor_info import SAFETENSORS_SUFFIXES
from wan.settings.errors import InputError
from wan.settings.values import format_value
from wan.utils.files import open_regular_file

_TENSOR_NAME = "spiece_model"
_GGUF_KEYS = {  # llama.cpp's, for T5's Unigram vocabulary
    "pieces": "tokenizer.ggml.tokens",
    "scores": "tokenizer.ggml.scores",
    "types": "tokenizer.ggml.token_type",
    "charsmap": "tokenizer.ggml.precompiled_charsmap",
}
_SPECIAL_TYPES = (3, 4)  # SentencePiece's types: control, user defined
_UNIGRAM = 1


class _DamagedVocabError(ValueError):
    """A vocabulary cannot be used; the message is the reason."""


@dataclass(frozen=True)
class UnigramVocab:
    """A Unigram tokenizer's vocabulary.

    Attributes:
        vocab: Text and score of each token, by id.
        special_tokens: Tokens that are matched in a text before it is split.
        precompiled_charsmap: SentencePiece's compiled rules for normalizing a text.
    """

    vocab: list[tuple[str, float]]
    special_tokens: list[str]
    precompiled_charsmap: bytes


def has_embedded_tokenizer(path: Path) -> bool:
    """Returns whether a text encoder's file contains its tokenizer, by tensor or metadata names."""
    if path.suffix in SAFETENSORS_SUFFIXES and path.is_file():
        return _find_model(read_safetensors_header(path)) is not None
    if path.suffix == ".gguf":
        return _GGUF_KEYS["scores"] in gguf.read_gguf_metadata(path, (_GGUF_KEYS["scores"],))
    return False


def _find_model(names: Iterable[str]) -> str | None:
    """Returns the name of the SentencePiece model, which may have a prefix."""
    return next((name for name in names if f".{name}".endswith(f".{_TENSOR_NAME}")), None)


def read_embedded_tokenizer(path: Path) -> UnigramVocab:
    """Reads the vocabulary in a weight file or a `spiece.model`; InputError if it is damaged."""
    try:
        return _read_gguf_vocab(path) if path.suffix == ".gguf" else _read_sentencepiece_vocab(path)
    except _DamagedVocabError as error:
        why = f"holds a damaged tokenizer ({error})"
        raise InputError(f"{path}", None, why, "download it again") from None
    except (ValueError, struct.error, LookupError, TypeError, AttributeError):
        why = "holds a damaged tokenizer"  # Python's own words would not help
        raise InputError(f"{path}", None, why, "download it again") from None


def _read_gguf_vocab(path: Path) -> UnigramVocab:
    metadata = gguf.read_gguf_metadata(path, _GGUF_KEYS.values())
    tokens, scores = metadata[_GGUF_KEYS["pieces"]], metadata[_GGUF_KEYS["scores"]]
    types = metadata.get(_GGUF_KEYS["types"], (1,) * len(tokens))
    charsmap = metadata.get(_GGUF_KEYS["charsmap"], ())
    return _check_vocab(
        list(zip(tokens, scores, types, strict=True)), bytes(x & 255 for x in charsmap)
    )


def _read_sentencepiece_vocab(path: Path) -> UnigramVocab:
    size, offset = -1, 0  # a file of the model alone
    if path.suffix in SAFETENSORS_SUFFIXES:
        infos = read_safetensors_header(path)
        info = infos[_find_model(infos) or _TENSOR_NAME]
        size, offset = info.nbytes, info.data_offset
    with open_regular_file(path) as file:
        file.seek(offset)
        model = file.read(size)
    tokens, charsmap, tokenizer_type = [], b"", _UNIGRAM
    for field, value in _iter_protobuf_fields(model):
        if field == 1:
            token = {1: b"", 2: 0.0, 3: 1, **dict(_iter_protobuf_fields(value))}
            tokens.append((token[1].decode("utf-8"), token[2], token[3]))
        elif field == 2:
            tokenizer_type = dict(_iter_protobuf_fields(value)).get(3, tokenizer_type)
        elif field == 3:
            charsmap = dict(_iter_protobuf_fields(value)).get(2, b"")
    if tokenizer_type != _UNIGRAM:
        raise _DamagedVocabError(f"a model of kind {tokenizer_type}, not Unigram")
    return _check_vocab(tokens, charsmap)


def _check_vocab(tokens: list[tuple[str, float, int]], charsmap: bytes) -> UnigramVocab:
    for token, score, token_type in tokens:
        is_score = isinstance(score, float) and isfinite(score)
        if not (isinstance(token, str) and is_score and isinstance(token_type, int)):
            raise _DamagedVocabError(f"{format_value(token)} with the score {format_value(score)}")
    if not isinstance(charsmap, bytes):
        raise _DamagedVocabError("its normalization rules are no bytes")
    first_tokens = [token for token, _, _ in tokens[:3]]
    if first_tokens != ["<pad>", "</s>", "<unk>"]:
        raise _DamagedVocabError(f"its first tokens are {first_tokens}, not T5's")
    special_tokens = [token for token, _, token_type in tokens if token_type in _SPECIAL_TYPES]
    return UnigramVocab([(token, score) for token, score, _ in tokens], special_tokens, charsmap)


def _iter_protobuf_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a protobuf message's fields; values are int, float or bytes."""
    position = 0

    def read_varint() -> int:
        nonlocal position
        result = shift = 0
        while True:
            if position >= len(message) or shift > 63:
                raise _DamagedVocabError("truncated")
            byte = message[position]
            position, result, shift = position + 1, result | (byte & 127) << shift, shift + 7
            if byte < 128:
                return result

    while position < len(message):
        key = read_varint()
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, read_varint()
            continue
        size = {1: 8, 5: 4}.get(wire_type) or (
            read_varint() if wire_type == 2 else len(message) + 1
        )
        value, position = message[position : position + size], position + size
        if position > len(message):
            raise _DamagedVocabError("truncated")
        yield key >> 3, struct.unpack("<f", value)[0] if wire_type == 5 else value
