"""The process that has the device: reads jobs from its input, writes answers to a pipe.

Started by `supervise`, with the pipe's number as its argument. Jobs and answers are lines of JSON:
first {"device", "index", "world"}, answered by facts or a refusal; then a step each, answered by
its lines as they come and by how it ended.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if not __package__:
    sys.path[:1] = [str(REPO)]  # in the place of this folder, whose names are not modules

from tools.device_check.steps import UnavailableError, plain  # noqa: E402
from wan.settings.errors import InputError, is_out_of_memory  # noqa: E402

Job = dict[str, Any]


def serve(answers: Any) -> None:
    """Answer jobs until the input ends."""
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()

    def answer(**value: Any) -> None:
        answers.write(json.dumps(plain(value)) + "\n")
        answers.flush()

    hello = jobs.get()
    import torch

    from tools.device_check import bench, machine
    from wan.device import resolve

    try:
        device = resolve(hello["device"], hello["index"])
    except InputError as error:
        answer(refused=str(error))
        return
    torch.set_grad_enabled(False)
    facts = bench.facts(device, hello["world"])
    answer(facts=asdict(facts), environment=machine.environment(device))
    while True:
        job = jobs.get()
        module, _, function = job["work"].partition(":")
        try:
            made = bench.prepare(device, job)
            for line in getattr(importlib.import_module(module), function)(made):
                answer(line=asdict(line))
        except (UnavailableError, InputError) as error:
            answer(absent=str(error))
        except BaseException as error:
            traceback.print_exc()
            memory = is_out_of_memory(error)
            answer(**{"absent" if memory else "failed": bench.sentence(error)})
        else:
            answer(done=True)
        gc.collect()
        device.empty_cache()


def _read(jobs: queue.Queue[Job]) -> None:
    """Lines of the input as jobs. At its end whoever asks is gone, and so is this process."""
    for text in sys.stdin:
        jobs.put(json.loads(text))
    os._exit(0)


if __name__ == "__main__":
    faulthandler.enable()  # a crash says where
    faulthandler.register(signal.SIGUSR1)
    serve(os.fdopen(int(sys.argv[1]), "w"))
