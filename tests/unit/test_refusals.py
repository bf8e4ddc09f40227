"""Refusals in the words of every front end: the command line, the Python classes, diffusers."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter
from typing import Any, get_type_hints

import pytest

from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.app import failures
from wan.settings import flags, rules, values
from wan.settings.errors import COMMAND_LINE_NAMING, InputError, WriteError
from wan.settings.flags import DIFFUSERS_NAMING, FLAGS, PYTHON_NAMING
from wan.settings.kernels import DEFAULT_KERNEL, DENSE_KERNELS
from wan.settings.presets import PRESETS
from wan.settings.step_cache import POLICIES
from wan.utils import env, log

REPO = Path(__file__).parents[2]
OF_CACHES = [rule for row in POLICIES.values() for rule in row.conflicts]
VIEWS: dict[type, tuple[rules.Rule[Any], ...]] = {
    object: (*rules.USER_SETTING_RULES, *flags.NEEDS_RULES, *OF_CACHES),
    rules.TopologyView: rules.TOPOLOGY_RULES,
    rules.PipelineView: (*rules.PIPELINE_RULES, *rules.GROUPING_RULES),
    rules.VideoView: (*rules.VIDEO_RULES, *flags.TASK_RULES),
}
ROWS = tuple(row for rows in VIEWS.values() for row in rows)
FRONT_ENDS = {
    "command line": (COMMAND_LINE_NAMING, {*FLAGS}),
    "Python": (PYTHON_NAMING, {n for n, flag in FLAGS.items() if flag.python or flag.keyword}),
    "diffusers": (DIFFUSERS_NAMING, {n for n, flag in FLAGS.items() if flag.diffusers}),
}


def test_names_cannot_control_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """C0, DEL, C1, line breaks, directions of text and half characters are escaped."""
    name, shown = (
        "模\u3000a\x1b[2J\x7f\x9b\u202e\n\u2028\udc41",
        ("模\u3000a\\x1b[2J\\x7f\\x9b\\u202e\\n\\u2028\\udc41"),
    )
    assert str(InputError(name, name, name, name)) == f"{shown} {shown} {shown}; {shown}."
    assert failures.describe_error(WriteError(name)) == shown
    failures.print_error(name)
    log.set_up_logging()
    log.logger.info("%s", name)
    log.logger.handlers = []
    output = capfd.readouterr()
    assert output.out.endswith(f"] {shown}\n")
    for text in (output.err.removesuffix("\n"), values.format_value(name, str)):  # one space
        assert text.isprintable() and "模 a\\x1b[2J\\x7f\\x9b\\u202e" in text


class Placeholder:
    """A placeholder for any value in the text of a rule."""

    def __getattr__(self, _: str) -> Placeholder:
        return self

    def __getitem__(self, _: object) -> Placeholder:
        return self

    def __format__(self, _: str) -> str:
        return "7"


def find_foreign_names(text: str, front: str) -> set[str]:
    """Returns the names in the text that users of this front end do not write."""
    naming, _ = FRONT_ENDS[front]
    if front == "command line":
        names = {name for name in FLAGS if re.search(rf"\b{name}=", text)}
    else:
        renamed = {name for name in FLAGS if "_" in name and naming.names.get(name, name) != name}
        names = {name for name in renamed if re.search(rf"\b{name}\b", text)} - {
            *naming.names.values()
        }
        names |= set(re.findall(r"--\w+", text)) - {"--nproc_per_node"}  # torchrun's
    return names | set(re.findall("[`{}]", text))


def find_type(kind: type, path: str) -> type:
    """Returns the type at the end of a path of attributes, as the classes declare it."""
    for name in path.split("."):
        member = getattr(kind, name, None)
        if isinstance(member, property):
            kind = get_type_hints(member.fget)["return"]
        else:
            kind = get_type_hints(kind).get(name) or type(member)
        assert kind is not type(None), f"{name} of {path}"
    return kind


@pytest.mark.parametrize("view", VIEWS)
def test_texts_and_conditions_name_what_exists(view: type) -> None:
    """A text reads attributes of the rule's view, and a condition reads a setting."""
    for row in VIEWS[view]:
        for text in (row.full_subject, row.why, row.remedy):
            for _, field, _, _ in Formatter().parse(text):
                if field is not None:
                    assert field.startswith("s.")
                    find_type(view, field.removeprefix("s.").partition("[")[0])
        for condition in row.conditions:
            assert condition.removeprefix("not ").partition("=")[0] in FLAGS


@pytest.mark.parametrize("front", FRONT_ENDS)
def test_every_row_is_written_in_a_front_ends_own_words(front: str) -> None:
    """A row names only settings of this front end, by the front end's names."""
    naming, supported = FRONT_ENDS[front]
    wrong = []
    for row in ROWS:
        settings = {condition.partition("=")[0] for condition in row.conditions} & FLAGS.keys()
        if not settings <= supported:
            continue  # the front end cannot ask for it
        text = f"{row.full_subject} {row.why}; {row.remedy}.".format(s=Placeholder())
        named = set(re.findall(r"`([a-z]\w*)[`=]", text))
        unknown = named - (FLAGS.keys() & supported)
        if unknown or find_foreign_names(naming.render(text), front):
            wrong.append((text, unknown, find_foreign_names(naming.render(text), front)))
    assert not wrong


def test_namings_of_each_front_end() -> None:
    texts = {
        "--sample_steps 7 and --step_cache": COMMAND_LINE_NAMING,
        "sampling_steps=7 and step_cache": PYTHON_NAMING,
        "num_inference_steps=7 and policy": DIFFUSERS_NAMING,
    }
    text = "`sample_steps=7` and `step_cache`"
    assert [naming.render(text) for naming in texts.values()] == [*texts]


def list_refusals() -> list[tuple[str, int, str]]:
    """Every text of a refusal in the package: (file, line, text)."""
    texts = []
    for path in sorted((REPO / "wan").rglob("*.py")):
        source = path.read_text()
        # wan.power has separate commands
        if path.is_relative_to(REPO / "wan" / "power") or "InputError(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError":
                parts = [
                    part.value
                    for argument in (*node.args, *(word.value for word in node.keywords))
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                texts.append((str(path.relative_to(REPO)), node.lineno, "".join(parts)))
    return texts


def test_no_refusal_is_written_for_one_front_end_only() -> None:
    """Texts quote settings in backticks, so that each front end can rename them."""
    texts = list_refusals()
    assert len(texts) > 200
    wrong = []
    for file, line, text in texts:
        flag = re.search(r"(?<!\w)--(\w+)", text)
        is_flag = flag is not None and flag[1] in FLAGS and "tools/" not in text  # its own command
        unknown = set(re.findall(r"`([a-z]\w*)[`=]", text)) - FLAGS.keys()
        if is_flag or unknown:
            wrong.append((file, line, text))
    assert not wrong


@pytest.mark.parametrize(
    ("dtype", "device", "modes"),
    [
        *(("F8_E4M3", "cpu", ["keep", "multiply"]), ("F8_E4M3", "npu", [])),
        *(("F8_E5M2", "cpu", ["keep"]), ("BF16", "cpu", [])),
        *(("Q4_K", "cpu", ["keep"]), ("Q4_K", "npu", ["keep"])),
        *(("IQ4_XS", "cuda", ["keep"]), ("MXFP4", "cpu", ["keep"])),
    ],
)
def test_modes_of_stored_weights(dtype: str, device: str, modes: list[str]) -> None:
    view = rules.PipelineView(
        preset=PRESETS["t2v-14B"],
        device=device,
        dit_fsdp=False,
        dense_kernel=DENSE_KERNELS[DEFAULT_KERNEL],
        policy="none",
        has_quantized_dit=False,
        checkpoint_dtypes={"F32", dtype},
    )
    accepted = [
        mode
        for mode in ("keep", "multiply")
        if not get_refusal(rules.check_rules, rules.PIPELINE_RULES, {"stored_weights": mode}, view)
    ]
    assert accepted == modes


def test_a_value_is_written_as_it_was_typed() -> None:
    """Backticks in a value do not mark a setting."""
    error = InputError("`size`", "`frame_num`", "must be WIDTH*HEIGHT", "see `task`")
    error.naming = COMMAND_LINE_NAMING
    assert str(error) == "--size `frame_num` must be WIDTH*HEIGHT; see --task."


def test_equivalent_environment_variables_are_named() -> None:
    naming = env.make_flag_naming({"ALGO": "1", "OVERLAP": "1", "ROPE_OPT": "1"})
    assert naming.render("`attention_backend=laser`") == "--attention_backend laser (or ALGO=1)"
    assert naming.render("`attention_backend=fused`") == "--attention_backend fused"
    assert naming.render("`fa_alltoall_overlap`") == "--fa_alltoall_overlap (or OVERLAP=1)"
    assert naming.render("`fused_ops=rope`") == "--fused_ops rope (or ROPE_OPT=1)"
    assert naming.render("`fused_ops=gelu`") == "--fused_ops gelu"
    assert naming.render("`fa_quant=fp8`") == "--fa_quant fp8"


def test_steps_of_thousands_of_digits_are_refused() -> None:
    for text in ("9" * 5000, "0-" + "9" * 5000):
        with pytest.raises(InputError, match="give step numbers from 0"):
            values.read_steps("`trace_steps`", text)


def test_a_plan_that_no_device_can_carry_out_is_refused() -> None:
    """Each setting is of another device."""
    messages = {}
    for arguments in (
        "--fused_ops=rope --fa_quant=fp8",
        "--attention_backend=laser --fused_ops=gelu",
    ):
        messages[arguments] = get_refusal(resolve_plan, *arguments.split())
    check_refusals("plan: no device", messages, hide=["this device is .*?(?=;)"])


def test_a_long_word_is_shortened() -> None:
    path = "/" + "n" * 100_000
    for error in (InputError("`save_file`", path), InputError(path, why=f"is not {path}")):
        assert len(str(error)) < 400 and "(100001 long)" in str(error)
