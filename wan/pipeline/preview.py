"""Shows a frame of the predicted video between denoising steps.

The network predicts the velocity v = noise - clean latents, so that latents x at sigma s predict
the clean latents x - s v. The VAE is causal: the first latent frame alone is decoded to exactly the
first frame of the video. Where that frame is an input, the middle latent frame is decoded after the
two before it; this is not exact, because the VAE's layers lack the state of the earlier ones.

Legend: Z latent channels, f h w latent frames/height/width, F H W pixel ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from wan.utils.log import logger, summarize_error

if TYPE_CHECKING:
    from torch import Tensor

    from wan.tasks.base import ShowPreview, VideoParams

_WINDOW = 3  # latent frames, where a later frame is shown; a convolution's state is two of them


class Preview:
    """The preview of one video on the main rank."""

    def __init__(
        self, params: VideoParams, decode: Callable[[Tensor], Tensor], show: ShowPreview
    ) -> None:
        """Decodes nothing yet. decode: latents [Z,f,h,w] to frames [3,F,H,W]."""
        self._params, self._decode, self._show = params, decode, show
        self._clip, self._has_failed = 0, False
        self._select_latents: Callable[[Tensor], Tensor] = lambda latents: latents

    def start_clip(self, clip: int, select_latents: Callable[[int, Tensor], Tensor]) -> None:
        """Continues with a clip. select_latents: as in `wan.tasks.base.ClipMaker`."""
        self._clip, self._select_latents = clip, partial(select_latents, clip)

    def is_due(self, num_steps_done: int) -> bool:
        """Returns whether a picture is shown after this number of steps."""
        return not self._has_failed and num_steps_done % self._params.preview == 0

    def update(self, latents_Zfhw: Tensor) -> None:
        """Shows a frame of the predicted clean latents; after an error there are no more."""
        try:
            latents = self._select_latents(latents_Zfhw)
            window = find_preview_window(self._params, self._clip, latents.shape[1])
            self._show(self._decode(latents[:, window])[:, -1])
        except Exception as error:
            self._has_failed = True
            reason = summarize_error(error)
            logger.error("There are no more previews, and the video goes on (%s).", reason)


def find_preview_window(params: VideoParams, clip: int, num_latents: int) -> slice:
    """Returns the latent frames to decode, of the `num_latents` of a clip; the last one is shown.

    num_latents: With those of S2V's previous clip, which precede the clip's own.
    """
    if not params.task.starts_with_known_frame(params, clip):
        return slice(0, 1)
    num_clip_latents = params.latent_shape[1] - params.task.count_reference_latents(params)
    middle = num_latents - num_clip_latents + num_clip_latents // 2
    return slice(max(0, middle + 1 - _WINDOW), middle + 1)


def count_preview_latents(params: VideoParams) -> int:
    """Returns the maximum number of latent frames that are decoded for a picture; 0 without any."""
    if not params.preview:
        return 0
    num_latents = params.task.count_decoded_latents(params)
    clips = range(min(params.num_clip or 1, 2))
    windows = [find_preview_window(params, clip, num_latents) for clip in clips]
    return max(window.stop - window.start for window in windows)
