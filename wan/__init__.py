"""Wan2.2 video generation. `import wan` needs no accelerator and loads nothing heavy.

The classes and their `generate` methods have the official names and keywords.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan.api import WanAnimate, WanI2V, WanS2V, WanT2V, WanTI2V, WanVace, save_video

__all__ = ["WanAnimate", "WanI2V", "WanS2V", "WanT2V", "WanTI2V", "WanVace", "save_video"]
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from wan import api

        return getattr(api, name)
    raise AttributeError(f"module 'wan' has no attribute {name!r}")
