"""Bodies of requests: forms, and pictures as data URLs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from PIL import Image

FORM = "multipart/form-data; boundary=edge"


def make_form(fields: Mapping[str, Any]) -> bytes:
    """Returns a form; values are texts, bytes (sent as files), or lists of them."""
    parts = []
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            end = f'; filename="{name}"' if isinstance(item, bytes) else ""
            head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{end}\r\n\r\n'
            parts += [head.encode(), item if isinstance(item, bytes) else item.encode(), b"\r\n"]
    return b"".join([*parts, b"--edge--\r\n"])


def make_picture(red: int = 200) -> bytes:
    """Returns a PNG of one color."""
    file = BytesIO()
    Image.new("RGB", (64, 64), (red, 0, 0)).save(file, "PNG")
    return file.getvalue()


def make_data_url(content: bytes = make_picture(), media_type: str = "image/png") -> str:
    """Returns a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
