"""Imported by every Python process of `make test-xfuser`: xfuser can then be imported on a CPU.

xfuser asks PyTorch which accelerator it was built for while it is imported, and stops where that is
none. Here it hears of CUDA for as long as the import takes; afterwards it finds a CPU, on which its
process groups are gloo's and its functions compute where PyTorch's operators do. It makes Ulysses
and ring groups only where it takes yunchang to be usable, which it asks of a GPU as well.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder


class _AsOnCuda(Loader):
    """Executes a module with what surrounds it."""

    def __init__(self, name, loader):
        self.name, self.loader = name, loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        import torch

        if self.name == "xfuser.envs":
            self.loader.exec_module(module)
            module.PACKAGES_CHECKER.packages_info["has_long_ctx_attn"] = True
            return
        before, torch.version.cuda = torch.version.cuda, "13.0"
        try:
            self.loader.exec_module(module)
        finally:
            torch.version.cuda = before


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in ("xfuser", "xfuser.envs"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AsOnCuda(name, spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
