"""Names that users type, import or read back stay the same: flags, keywords, keys, metrics.

`WRITE_NAMES=1 python -m pytest tests/unit/test_public_names.py` writes public_names.txt anew.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny
from wan.cli import main as cli
from wan.settings import flags

NAMES = Path(__file__).parents[1] / "public_names.txt"

CALLS = (
    *(
        f"wan.{name}.{call}"
        for name in (
            "WanT2V",
            "WanI2V",
            "WanTI2V",
            "WanS2V",
            "WanAnimate",
            "WanAnimate2",
            "WanVace",
        )
        for call in ("__init__", "generate")
    ),
    "wan.diffusers.apply_cache_on_pipe",
    "wan.diffusers.parallelize_pipe",
    "wan.modules.animate.WanAnimateModel.forward",
    "wan.modules.attnlayer.FAPowerCapAttention.__call__",
    "wan.modules.attnlayer.FAPowerCapAttention.__init__",
    "wan.modules.model.WanModel.forward",
    "wan.modules.s2v.WanModel_S2V.forward",
    "wan.modules.vace.VaceWanModel.forward",
)


def list_signatures() -> Iterator[str]:
    for path in CALLS:
        parts = path.split(".")
        depth = next(i for i, part in enumerate(parts) if part[0].isupper() or i == len(parts) - 1)
        target: Any = import_module(".".join(parts[:depth]))
        for part in parts[depth:]:
            target = getattr(target, part, None)
        if target is None:
            continue
        for name, parameter in inspect.signature(target).parameters.items():
            yield f"call {path}({parameter.kind.description}: {name})"


def list_keys(value: Any, path: str) -> Iterator[str]:
    """The keys of a JSON value; of a list, those of all its items."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}.{key}"
            yield from list_keys(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from list_keys(item, f"{path}[]")


def metric_names() -> Iterator[str]:
    from prometheus_client import CollectorRegistry

    from wan.serve.http.metrics import Metrics

    registries = [x for x in vars(Metrics()).values() if isinstance(x, CollectorRegistry)]
    assert registries
    for registry in registries:
        for metric in registry.collect():
            yield f"metric {metric.name} ({metric.type})"


def command_line() -> Iterator[str]:
    for name, flag in flags.FLAGS.items():
        yield f"flag --{name}"
        if flag.keyword is not None:
            yield f"keyword {flag.keyword} of --{name}"


def request_fields() -> Iterator[str]:
    from wan.serve.requests import fields

    yield from (f"field {name}" for name in (*fields.FIELD_TO_SETTING, *fields.UPLOADS))


def files_of_a_run(checkpoint: Path, folder: Path) -> Iterator[str]:
    """Keys of the record, of the trace and of its kernels that a short run writes."""
    argv = ["--task", "t2v-A14B", "--ckpt_dir", str(checkpoint), "--size", "32*32"]
    argv += ["--frame_num", "1", "--sample_steps", "2", "--trace", str(folder / "trace")]
    assert cli.main([*argv, "--base_seed", "0", "--save_file", str(folder / "v.mp4")]) == 0
    record = json.loads((folder / "v.json").read_text())
    record["sources"] = {}  # the keys are settings
    yield from list_keys(record, "record")
    yield from list_keys(json.loads((folder / "trace" / "rank0.json").read_text()), "trace")


@pytest.mark.usefixtures("one_thread")
def test_public_names(tiny: Tiny, tmp_path: Path) -> None:
    sources: list[Callable[[], Iterator[str]]] = [
        command_line, request_fields, metric_names, list_signatures,
        lambda: files_of_a_run(tiny("t2v-A14B"), tmp_path),
    ]  # fmt: skip
    names = "".join(f"{name}\n" for name in sorted({n for source in sources for n in source()}))
    if os.environ.get("WRITE_NAMES"):
        NAMES.write_text(names)
    assert names == NAMES.read_text()
