"""Normalized attention guidance (NAG, arXiv:2505.21179): a negative prompt in cross-attention.

Legend: B batch, L this rank's tokens, N heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan.settings.guidance import Guidance

if TYPE_CHECKING:
    from torch import Tensor

_NUM_ROWS = 8192  # tokens that are combined at once in float32


class NormalizedAttention:
    """Combines the attention to the prompt with the attention to the negative prompt.

    The norm is over all heads and channels of a token. Cross-attention has all heads of a rank's
    tokens, so that ranks exchange nothing.
    """

    def __init__(self, settings: Guidance) -> None:
        parameters = settings.nag_parameters
        self.scale, self.tau = parameters["scale"], parameters["tau"]
        self.alpha = parameters["alpha"]
        self.norm_order = 2 if parameters["norm"] == "l2" else 1

    def __call__(self, positive_BLND: Tensor, negative_BLND: Tensor) -> Tensor:
        """Returns the guided attention output, in the memory of `negative_BLND`.

        With alpha 0, or if both are equal, it is exactly `positive_BLND`.
        """
        rows = zip(
            positive_BLND.split(_NUM_ROWS, 1), negative_BLND.split(_NUM_ROWS, 1), strict=True
        )
        for positive, negative in rows:
            negative.copy_(self._combine_tokens(positive.float(), negative.float()))
        return negative_BLND

    def _combine_tokens(self, positive_BLND: Tensor, negative_BLND: Tensor) -> Tensor:
        # z+ + (scale - 1) (z+ - z-) is scale z+ - (scale - 1) z-, and z+ exactly if they are equal.
        guided = positive_BLND + (self.scale - 1) * (positive_BLND - negative_BLND)
        norm, guided_norm = (
            x.flatten(2).norm(self.norm_order, -1)[..., None, None] for x in (positive_BLND, guided)
        )
        guided *= (self.tau * norm / guided_norm.clamp_min(1e-30)).clamp(max=1)
        return positive_BLND + self.alpha * (guided - positive_BLND)
