"""Wan2.2 video generation. `import wan` needs no accelerator and loads nothing heavy.

    from wan import WanT2V
    video = WanT2V("t2v-A14B", "./Wan2.2-T2V-A14B").generate("a cat", size=(832, 480))
    wan.save_video(video, "cat.mp4", fps=16)

The classes have the official names, files (`wan.text2video`, ...), keywords and defaults. The
constructor takes settings for loading and running the networks, `generate` those of one video. Both
take the official keywords and those of the command line (`wan.settings.fields.Option.python`).
Differences from the official classes: networks are loaded when first needed. With
`offload_model=True`, the official default, every network is released after its stage and read again
by the next call. False keeps the networks that fit, "cpu" keeps them in host memory, and "block"
runs networks that do not fit (docs/memory.md). `generate_many` generates many videos. Both show
progress bars, unless `progress=False`, and a notebook shows the video that `generate` returns.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wan.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from wan.animate import WanAnimate
    from wan.animate2 import WanAnimate2
    from wan.app.video import Video
    from wan.causal import WanCausal
    from wan.image2video import WanI2V
    from wan.media.video_writer import save_video
    from wan.speech2video import WanS2V
    from wan.text2video import WanT2V
    from wan.textimage2video import WanTI2V
    from wan.vace import WanVace

__all__ = [
    "Video",
    "WanAnimate",
    "WanAnimate2",
    "WanCausal",
    "WanI2V",
    "WanS2V",
    "WanT2V",
    "WanTI2V",
    "WanVace",
    "save_video",
]

_MODULES = {
    "Video": "app.video",
    "WanAnimate": "animate",
    "WanAnimate2": "animate2",
    "WanCausal": "causal",
    "WanI2V": "image2video",
    "WanS2V": "speech2video",
    "WanT2V": "text2video",
    "WanTI2V": "textimage2video",
    "WanVace": "vace",
    "save_video": "media.video_writer",
}

_PACKAGES = ("configs", "distributed", "modules")  # officially imported with `wan`


def __dir__() -> list[str]:
    """Lists the names that an editor completes."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "import_module"})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"wan.{_MODULES[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"wan.{name}")
    raise AttributeError(f"module 'wan' has no attribute {name!r}")
