"""The LoRAs that requests may name."""

from __future__ import annotations

from typing import Any

from wan.app.run import Run
from wan.checkpoint.lora_folder import describe_lora, find_lora_files
from wan.checkpoint.tensor_info import FileState, read_file_state


class LoraCatalog:
    """Describes the LoRAs of `--lora_folder`; each file is read once, unless it changes."""

    def __init__(self, run: Run) -> None:
        """Lists the files. run: The run that the ranks were started with."""
        folder = run.setup.lora_options.lora_folder
        self._files = {} if folder is None else find_lora_files(folder)
        self._checkpoint = run.setup.checkpoint
        self._descriptions: dict[str, tuple[FileState | None, dict[str, Any]]] = {}

    def describe_all(self) -> list[dict[str, Any]]:
        """Returns name, bytes, experts, kind, SHA-256 and error of each LoRA."""
        for name, path in self._files.items():
            try:
                state = read_file_state(path)
            except OSError:
                state = None
            if name not in self._descriptions or self._descriptions[name][0] != state:
                self._descriptions[name] = state, describe_lora(name, path, self._checkpoint)
        return [self._descriptions[name][1] for name in self._files]
