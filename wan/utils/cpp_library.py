"""C++ functions for CPUs with AVX-512, compiled once for a machine's CPU and kept by the user.

PyTorch's Inductor also compiles C++, but importing it takes a second in every process.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import torch

from wan.utils.compiler_cache import prepare_compiler_cache
from wan.utils.env import find_cpp_compiler
from wan.utils.log import logger, summarize_error
from wan.utils.system import read_cpu_features

# Products and sums are rounded one by one.
_FLAGS = (
    *("-O3", "-std=c++20", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-tree-loop-vectorize"),
)


class CppLibrary:
    """The functions of a C++ file.

    Args:
        source: The file.
        declare: Sets the types of the functions' arguments and results.
        consequence: What happens where the file does not compile, for the warning.
    """

    def __init__(self, source: Path, declare: Callable[[CDLL], None], consequence: str) -> None:
        self._source, self._declare, self._consequence = source, declare, consequence
        self._lock = Lock()
        self._library: CDLL | None = None
        self._is_available: bool | None = None

    def is_available(self) -> bool:
        """Whether this CPU has AVX-512 and the file compiles; a process tries and warns once."""
        with self._lock:
            if self._is_available is None:
                self._is_available = torch.backends.cpu.get_cpu_capability() == "AVX512"
                if self._is_available:
                    self._try_loading()
            return self._is_available

    def load(self) -> CDLL:
        """Returns the functions; only where they are available."""
        if self._library is None:
            self.is_available()
        if self._library is None:
            raise RuntimeError(f"{self._source.name} is not available; test it first.")
        return self._library

    def _try_loading(self) -> None:
        try:
            library = CDLL(str(_compile_cpp(self._source)))
            self._declare(library)
            self._library = library
        except Exception as error:  # any of the compiler, or of the folder of compiled code
            self._is_available = False
            logger.warning("%s: %s.", self._consequence, summarize_error(error))


def _compile_cpp(source: Path) -> Path:
    """Compiles a C++ file, unless this has been done on this machine; returns the library.

    Raises:
        OSError: There is no compiler, or files cannot be written.
        RuntimeError: The compiler has failed.
        InputError: The folder that the user named for compiled code cannot be used.
    """
    compiler, text = find_cpp_compiler(), source.read_bytes()
    inputs = "\n".join((compiler, *_FLAGS, str(read_cpu_features()), "")).encode()
    digest = hashlib.sha256(inputs + text).hexdigest()
    output = prepare_compiler_cache() / f"{source.stem}-{digest[:16]}.so"
    lock_file = output.with_suffix(".lock")
    lock_file.touch(mode=0o600)  # for any umask: others must not write in the folder
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank compiles, the others wait
        if not output.exists():
            with TemporaryDirectory(dir=output.parent) as folder:
                library = Path(folder) / "library.so"
                command = [compiler, *_FLAGS, str(source), "-o", str(library)]
                process = subprocess.run(command, capture_output=True, text=True, errors="replace")
                if process.returncode:
                    raise RuntimeError(f"{compiler} has failed: {process.stderr}")
                library.chmod(0o700)
                library.replace(output)
    return output
