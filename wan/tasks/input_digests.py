"""Hashes the inputs of a video, by which ranks check that they have the same ones; no torch."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

from wan.checkpoint.formats.headers import compute_file_digest


def hash_input(content: Any) -> str | None:
    """Returns the SHA-256 of an image, a tensor, audio or files; None for other values."""
    digest = hashlib.sha256()
    if isinstance(content, Path):
        return compute_file_digest(content)
    if isinstance(content, tuple):
        digest.update("".join(str(hash_input(item)) for item in content).encode())
        return digest.hexdigest() if content else None
    if hasattr(content, "untyped_storage"):  # a tensor
        digest.update(f"{content.dtype} {tuple(content.shape)}".encode())
        values = content.detach().cpu().contiguous().flatten()
        digest.update(values.view(import_module("torch").uint8).numpy().tobytes())
    elif hasattr(content, "tobytes") and hasattr(content, "mode"):  # a PIL image
        digest.update(f"{content.mode} {content.size}".encode() + content.tobytes())
    elif hasattr(content, "samples"):  # audio
        digest.update(content.samples.tobytes())
    else:
        return None
    return digest.hexdigest()
