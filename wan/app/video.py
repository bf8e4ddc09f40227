"""The video that `generate` returns: a tensor that a notebook shows."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from wan.media.video_writer import write_video
from wan.settings.command import Output


class Video(Tensor):
    """Float32 [3,F,H,W] in [-1, 1]; operations on it return plain tensors.

    Attributes:
        fps: Frames per second of the networks that generated it.
    """

    fps: float

    @classmethod
    def from_tensor(cls, video_3FHW: Tensor, fps: float) -> Video:
        """Returns a view of a tensor as a video."""
        video: Video = video_3FHW.as_subclass(cls)
        video.fps = fps
        return video

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Without types, the base class runs the operation as on plain tensors.
        return Tensor.__torch_function__(func, (), args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor, which `torch.load` reads with `weights_only=True`."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Video:
        return Video.from_tensor(deepcopy(self.as_subclass(Tensor), memo), self.fps)

    def _repr_html_(self) -> str:
        """Returns an HTML player with the video as an mp4, for notebooks."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            frames = self.as_subclass(Tensor).detach().float().cpu()
            write_video(frames, Output(path, fps=self.fps))
            data = b64encode(path.read_bytes()).decode()
        return f'<video controls loop src="data:video/mp4;base64,{data}"></video>'
