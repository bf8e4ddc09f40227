"""Modules that the fork server of `tests.dist` imports in addition to `tests.preload`."""

import gc

from xfuser.core.distributed import attention_backend

__all__ = ["attention_backend"]

gc.freeze()
