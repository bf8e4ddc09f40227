"""What the server behind `tests.dist` imports for all ranks, beside `tests.preload`."""

import gc

from xfuser.core.distributed import attention_backend

__all__ = ["attention_backend"]

gc.freeze()
