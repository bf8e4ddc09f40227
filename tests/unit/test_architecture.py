"""Who may import whom, and how long files and functions are, read from the code itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FILES = sorted([REPO / "generate.py", *(REPO / "wan").rglob("*.py")])
_OTHERS = ("tools", "benchmarks", "examples")
PROGRAMS = sorted([*FILES, *(path for name in _OTHERS for path in (REPO / name).rglob("*.py"))])
TESTS = sorted((REPO / "tests").rglob("*.py"))

# Folders and files of wan/: each imports those of the rows above it, and no other one of its row.
LAYERS = (
    "settings",
    "utils",
    "configs device checkpoint",
    "kernels distributed media",
    "modules",
    "tasks",
    "guidance",
    "cache",
    "pipeline",
    "metering testing",
    "app",
    "planner diffusers power serve",
    "text2video image2video textimage2video speech2video animate animate2 vace causal",
    "cli",
    "__main__",
)
# Rooms of the service, by the same rule.
ROOMS = ("requests", "jobs", "ranks", "queue", "events store", "http", "__main__")
ROW, ROOM_ROW = (
    {name: row for row, names in enumerate(layers) for name in names.split()}
    for layers in (LAYERS, ROOMS)
)
# Files at official paths, for code that imports them; they may import everything but programs.
OFFICIAL = (
    *(f"wan.modules.{name}" for name in ("attention", "tokenizers", "vae2_1", "vae2_2")),
    *("wan.modules.s2v.audio_encoder", "wan.modules.animate.preprocess"),
    *(f"wan.utils.{name}" for name in ("utils", "fm_solvers", "fm_solvers_unipc")),
    *("wan.utils.prompt_extend", "wan.distributed.util", "wan.distributed.sequence_parallel"),
    "wan.configs.shared_config",
    *(f"wan.configs.wan_{name}" for name in ("t2v_A14B", "i2v_A14B", "ti2v_5B", "s2v_14B")),
    "wan.configs.wan_animate_14B",
)
METERS = " ".join(
    f"wan.metering.{name}" for name in ("power_source", "meter", "nvml", "npu_smi", "rapl")
)
# Part of wan -> the only modules outside it that may import it.
ONLY_FOR = {
    "wan.distributed": "wan.modules.attnlayer wan.modules.vae.sharded wan.pipeline wan.app wan.cli "
    "wan.metering wan.planner wan.diffusers wan.power wan.serve.ranks.__main__",
    "wan.pipeline.build": "wan.app wan.cli wan.diffusers.session wan.planner.measure "
    "wan.planner.report wan.power.rounds wan.serve.ranks.__main__",
    "wan.metering": "wan.app.job wan.app.output wan.app.record wan.power",
}
WITHOUT_TORCH = (
    "generate",
    "wan.__main__",
    "wan.cli",
    "wan.settings",
    *(f"wan.utils.{name}" for name in ("env", "system", "files", "log", "trace")),
    *("wan.utils.compiler_cache", "wan.utils.text_streams"),
    *METERS.split(),
    *(f"wan.checkpoint.{name}" for name in ("config", "layout", "quant.w8a8_export")),
    *(f"wan.checkpoint.formats.{name}" for name in ("tensor_info", "headers", "gguf")),
    *(f"wan.checkpoint.names.{name}" for name in ("keymaps", "prefixes")),
    *(f"wan.checkpoint.lora.{name}" for name in ("resolve", "names", "deltas", "reader")),
    "wan.media",
    "wan.guidance",
    "wan.tasks",
    *(f"wan.pipeline.{name}" for name in ("setup", "memory_estimate", "weight_sizes")),
    *(f"wan.app.{name}" for name in ("record", "run", "resolve", "launch", "job")),
    *(f"wan.app.{name}" for name in ("prompt_file", "flag_parser", "programs", "failures")),
    *(f"wan.metering.{name}" for name in ("exchange_order", "recording")),
    "wan.power.report",
    "wan.serve",
)
# Library, or private part of one -> the only modules that may import it.
ONLY_IN = {
    "diffusers": "wan.testing.random_checkpoint wan.diffusers wan.utils.fm_solvers "
    "wan.utils.fm_solvers_unipc",
    "transformers": "wan.modules.t5 wan.modules.clip wan.modules.audio_encoder "
    "wan.testing.random_checkpoint wan.app.prompt_extend",
    "soxr": "wan.media.audio",
    "imageio_ffmpeg": "wan.media.ffmpeg",
    "torch_npu": "wan.device wan.kernels.npu",
    "mindiesd": "wan.device wan.kernels.npu",
    "xfuser": "wan.kernels.xfuser",
    "pynvml": "wan.metering.nvml",
    "starlette": "wan.serve.http",
    "fsspec": "wan.serve.store.videos",
    "uvicorn": "wan.serve.http.connections",
    "prometheus_client": "wan.serve.http.metrics",
}
# Longer than 70 lines, and why.
LONG_FUNCTIONS = {
    "wan.modules.model.WanModel.__init__": "half of it is the official signature",
    "wan.app.python_api.Generator.__init__": "half of it is the official signature",
    "wan.text2video.WanT2V.generate": "the official signature",
    "wan.image2video.WanI2V.generate": "the official signature",
    "wan.speech2video.WanS2V.generate": "the official signature",
    "wan.textimage2video.WanTI2V.generate": "the official signature",
    "wan.app.resolve.resolve_run": "the order of the checks, one call each",
    "wan.pipeline.build.build_pipeline": "composition, one argument a line",
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


PATHS = {module(path): path for path in FILES}


@cache
def read_text(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(read_text(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree_of(path))]


def for_each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes one test of a check of one file; it names every file that fails."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failed.append(f"{module(path)}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


@cache
def imports(path: Path, *, functions: bool = True, types: bool = True) -> set[str]:
    """Modules that a file imports, also inside of functions and of type-checking blocks."""
    modules, queue = set(), [*tree_of(path).body]
    for node in queue:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if (is_function and not functions) or (is_typing and not types):
            continue
        queue += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = REPO / Path(*node.module.split(".")) / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                modules.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return modules


BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes that contain statements."""


@cache
def loaded_modules(name: str) -> set[str]:
    """Modules that are loaded when a module is imported, with those that they load in turn."""
    loaded, queue = set[str](), [name]
    while queue:
        name = queue.pop()
        if name and name not in loaded:
            loaded.add(name)
            queue.append(name.rpartition(".")[0])
            if name in PATHS:
                queue += imports(PATHS[name], functions=False, types=False)
    return loaded


def is_under(name: str, prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes.split())


@for_each(FILES)
def test_imports(path: Path) -> None:
    name, imported = module(path), imports(path)
    wan_imports = {other for other in imported if other.startswith("wan.")}
    if name not in ("generate", "wan", *OFFICIAL):
        part = name.split(".")[1]
        other_parts = {other for other in wan_imports if other.split(".")[1] != part}
        assert not {other for other in other_parts if ROW[other.split(".")[1]] >= ROW[part]}
    if name.startswith("wan.serve."):
        room = name.split(".")[2]
        rooms = {i.split(".")[2] for i in wan_imports if i.startswith("wan.serve.")} - {room}
        assert not {other for other in rooms if ROOM_ROW[other] >= ROOM_ROW[room]}
    if name not in (*OFFICIAL, "wan.modules"):
        assert not {i for i in wan_imports if i in OFFICIAL}
    for inner, users in ONLY_FOR.items():
        assert is_under(name, f"{inner} {users}") or not {
            i for i in wan_imports if is_under(i, inner)
        }
    if is_under(name, METERS):
        at_run_time = {i for i in imports(path, types=False) if is_under(i, "wan")}
        assert not {i for i in at_run_time if not is_under(i, f"wan.utils.system {METERS}")}
    for library, users in ONLY_IN.items():
        assert is_under(name, users) or not {i for i in imported if is_under(i, library)}
    if is_under(name, " ".join(WITHOUT_TORCH)):
        assert not {i for i in loaded_modules(name) if is_under(i, "torch numpy")}


# Folder -> the folders that its files may import.
FOLDERS = {
    "wan": {"wan"},
    "examples": {"wan"},
    "tools": {"wan", "tools"},
    "benchmarks": {"wan", "benchmarks"},
    "tests": {"wan", "tools", "benchmarks", "examples", "tests"},
}


def test_there_is_no_circle_of_files() -> None:
    """Imports inside of functions and for types count."""
    paths = {module(path): path for path in (*PROGRAMS, *TESTS)}
    edges = {name: paths.keys() & imports(path) for name, path in paths.items()}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_folders_import_those_below() -> None:
    for path in (*PROGRAMS, *TESTS):
        name = module(path)
        others = {i for i in imports(path) if i.split(".")[0] in FOLDERS}
        allowed = FOLDERS.get(name.split(".")[0], {"wan"})
        assert {i.split(".")[0] for i in others} <= allowed, f"{name} imports {others}"


@for_each(FILES)
def test_restricted_interfaces_stay_in_their_modules(path: Path) -> None:
    """Few modules use the environment, the vendors' runtimes, or private names of PyTorch."""
    name, text = module(path), read_text(path)
    if not is_under(
        name,
        "wan.utils.env wan.utils.system wan.utils.compiler_cache wan.utils.text_streams "
        "wan.distributed.rank_env wan.app.prompt_extend",
    ):
        assert "os.environ" not in text and "getenv" not in text
    assert "MethodType" not in text
    if not is_under(name, "wan.device wan.kernels"):
        assert "torch.cuda." not in text and "torch.npu." not in text
    if name != "wan.utils.torch_private":
        assert not {i for i in imports(path) if i.startswith("torch") and "._" in i}
        assert not re.search(r"torch\._[a-z]|torch\.ops\.aten", text)


def test_one_module_starts_ffmpeg() -> None:
    """Elsewhere, ffmpeg could take the name of a file for an address, an option or a pattern."""
    users = {
        module(path)
        for path in PROGRAMS
        if {imported for imported in imports(path) if is_under(imported, "imageio imageio_ffmpeg")}
    }
    assert users == {"wan.media.ffmpeg"}


@for_each(PROGRAMS)
def test_files_and_functions_are_short(path: Path) -> None:
    text = read_text(path)
    assert len(text.splitlines()) <= 600
    classes = [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    owners = {node: f"{owner.name}." for owner in classes for node in owner.body}
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef):
            name, length = f"{module(path)}.{owners.get(node, '')}{node.name}", _lines(node)
            assert length <= 70 or name in LONG_FUNCTIONS, f"{name} has {length} lines"


def _lines(function: ast.FunctionDef) -> int:
    """Count the lines of a function without its docstring."""
    doc = function.body[0]
    is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    skipped = doc.end_lineno - doc.lineno + 1 if is_doc else 0
    return function.end_lineno - function.lineno + 1 - skipped


def _list_definitions(path: Path) -> list[str]:
    """Lists classes, type aliases and module-level functions, without leading underscores."""
    names = [node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            aliases = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [x for x in aliases if x.lstrip("_")[0].isupper() and not x.isupper()]
    return [name.lstrip("_") for name in names if name not in ("__dir__", "__getattr__")]


def test_a_name_has_one_meaning() -> None:
    """A type or a module-level function of `wan`; a program starts in its `main`."""
    modules: dict[str, str] = {}
    for path in (path for path in FILES if module(path) not in OFFICIAL):
        for name in _list_definitions(path):
            first = modules.setdefault(name, module(path))
            one_home = first == module(path) or name == "main"
            assert one_home, f"{name} is defined in {first} and {module(path)}"


NO_NAMES = {
    word
    for line in (
        "given own owned found told said says say asked made kept taken known begun spoken seen",
        "heard hear hearing hears look looked behind beside standing above before again apart",
        "reached rest rests leave left put over twin twins twice what whole one every anywhere",
        "together besides others shown called moved done stepped stated wished wishes moves",
        "sounds controlled driving following characters chain marks vocabulary pieces place",
        "placed places rehearsed account words facts",
    )
    for word in line.split()
}
"""Words that do not say what a value is or what a function does."""
NO_PARTS = {"given", "told", "said", "asked", "found", "heard", "behind", "standing", "apart"}
ALLOWED = {
    ("wan.settings.video_options", "chain"): "the flag --chain",
    ("wan.settings.errors", "what"): "the first of the four parts of a refusal",
    ("wan.serve.jobs.job", "done"): "a column of the journal",
    ("wan.serve.queue.service", "done"): "a column of the journal",
}


def _bindings(path: Path) -> Iterator[tuple[str, int]]:
    """Yields each name that a module defines or binds, with its line."""
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@for_each(FILES)
def test_names_say_what_they_name(path: Path) -> None:
    """docs/vocabulary.md has the terms."""
    for name, line in _bindings(path):
        bare = name.strip("_").lower()
        if (module(path), bare) not in ALLOWED:
            unclear = bare in NO_NAMES or NO_PARTS & {*bare.split("_")}
            assert not unclear, f"{path}:{line}: {name} does not say what it names"


def test_import_wan_is_light() -> None:
    """It loads no torch, and an editor completes the names of the classes, and no imports."""
    script = "import wan, sys; names = {*dir(wan)}; imports = {'Any', 'import_module'} & names\n"
    script += "print('torch' in sys.modules, {*wan.__all__} - names | imports)"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=60
    )
    assert process.stdout.strip() == "False set()" and process.returncode == 0, process.stderr


FOR_PROGRAMS = (
    "wan.app.programs",
    "wan.checkpoint.formats.safetensors_stream",
    "wan.testing.measuring",
)
"""Modules that tools and benchmarks share."""


def _list_documented_names() -> Iterator[str]:
    """Yields what docs/official_names.md offers to other code, as "module.name"."""
    for row in re.findall(r"^\| `(wan[\w.]*)` \| (.*) \|$", read_text(REPO / NAMES_PAGE), re.M):
        yield from (f"{row[0]}.{name}" for name in re.findall(r"`(\w+)`", row[1]))


NAMES_PAGE = "docs/official_names.md"


def test_nothing_is_left_without_a_use() -> None:
    """A kernel, policy, solver or order whose row in its table has been forgotten, for example.

    A row of a table names its factory as "module:name", perhaps in two parts.
    """
    defined, used = set[str](), {"generate", "wan", "wan.__main__", "wan.power.__main__"}
    for path in FILES:
        tree = tree_of(path)
        if path.name != "__init__.py" and module(path) not in OFFICIAL:  # what users call
            kinds = (ast.ClassDef, ast.FunctionDef)
            names = [node.name for node in tree.body if isinstance(node, kinds)]
            defined |= {module(path), *(f"{module(path)}.{name}" for name in names)}
        used |= imports(path)
        for node in nodes_of(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"(wan[.\w]+)?:?(\w*)", node.value)
                used |= {*match.groups()} if match is not None else set()
    for path in {*PROGRAMS} - {*FILES}:
        used |= imports(path) & {*FOR_PROGRAMS}
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module in FOR_PROGRAMS:
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "measuring":
                used.add(node.attr)
    unused = {name for name in defined if not {name, name.rpartition(".")[2]} & used}
    unused -= {*_list_documented_names()}
    assert not unused, sorted(unused)


REPLACES = {"unlink", "rename", "rmtree", "removedirs"}
# Files outside wan/utils/files.py -> the calls that remove or replace a file, and the reason why
# these files can only be the program's own.
REMOVES = {
    "tools.check_device": ({"shutil.rmtree"}, "a folder of tempfile.mkdtemp"),
    "tools.compare_versions": (
        {"shutil.rmtree", "log.unlink"},
        "in a folder of which the file `commit` shows that it is its own",
    ),
    "tools.demo.export": ({"shutil.rmtree"}, "an export that `check_export` has recognised"),
    "wan.app.job": (
        {"audio_file.replace", "audio_file.unlink", "path.unlink"},
        "temporary files of this run",
    ),
    "wan.app.output": ({"stale_file.unlink"}, "hidden files whose name has an ended process"),
    "wan.media.video_writer": (
        {"path.unlink", "self.path.unlink"},
        "the stream of this run, whose name `check_run_outputs` has checked",
    ),
    "wan.utils.cpp_library": (
        {"library.replace"},
        "a library in the folder of compiled code, in which only the user can write",
    ),
    "wan.serve.ranks.group": ({"path.replace"}, "a log in the journal of the service"),
    "wan.serve.jobs.folders": ({"path.unlink"}, "files of a job, by the names of the service"),
}


def removals(path: Path) -> set[str]:
    """The calls of a module that remove or replace files, as source text."""
    calls = set()
    for node in nodes_of(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        of_os = owner == "os" and name in ("replace", "remove", "renames", "truncate")
        of_path = name == "replace" and len(node.args) == 1 and not node.keywords
        if name in REPLACES or of_os or of_path or (owner == "shutil" and name == "move"):
            calls.add(f"{owner}.{name}")
    return calls


@for_each(PROGRAMS)
def test_files_are_removed_in_one_place(path: Path) -> None:
    """Other calls could remove or replace files of the user."""
    if module(path) != "wan.utils.files":
        assert removals(path) == REMOVES.get(module(path), (set(), ""))[0]


@for_each([path for path in PROGRAMS if path.relative_to(REPO).parts[0] in ("tools", "benchmarks")])
def test_programs_print_any_text(path: Path) -> None:
    """They set up the encoding of arguments and outputs, or call what does."""
    text = read_text(path)
    if re.search(r"^if __name__ ", text, re.MULTILINE):
        assert re.search(r"\b(set_up_text|run_program)\(", text)


@for_each(PROGRAMS)
def test_numbers_of_options_have_ranges(path: Path) -> None:
    """`type=int` accepts 10**30, and `type=float` nan; a reader of settings.values does not."""
    assert not re.search(r"\btype=(int|float)\b", read_text(path))
