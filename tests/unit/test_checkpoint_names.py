"""One checkpoint and one LoRA under every naming, prefix and container."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import slow
from tools import checkpoint_names
from wan.checkpoint.lora_names import DIFFERENCES, NAMINGS
from wan.checkpoint.prefixes import NETWORK_PREFIXES


@pytest.mark.parametrize("is_complete", [False, slow(True)])
def test_every_file_has_the_values_of_the_plain_one(is_complete: bool, tmp_path: Path) -> None:
    """Without the whole product: each row, prefix and container of the page's matrix."""
    count, unequal = checkpoint_names.find_unequal_cases(tmp_path, is_complete)
    assert not unequal and count > 30


def test_few_cases_have_each_row_and_each_column() -> None:
    """A new row of the package's tables is covered."""
    cases = [*checkpoint_names.list_cases(is_complete=False)]
    assert {case[:2] for case in cases} == {*checkpoint_names.NETWORKS}
    assert {case.container for case in cases} == {*checkpoint_names.CONTAINERS}
    assert {case.prefix for case in cases} == {*checkpoint_names.PREFIXES} > {*NETWORK_PREFIXES}
    lora_cases = [*checkpoint_names.list_lora_cases(is_complete=False)]
    assert [case.naming for case in lora_cases] == [*NAMINGS, *DIFFERENCES]
    assert {case.spelling for case in lora_cases} == {*checkpoint_names.LAYER_NAMES}
