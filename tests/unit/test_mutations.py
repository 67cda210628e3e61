"""The list of mutations still fits the code that it breaks."""

import ast

import pytest

from launch import ROOT
from mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_can_be_made(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    count = source.count(mutation.text)
    assert count == 1, f"{mutation.file} has {mutation.text!r} {count} times: mend tests/tools/mutations.py"
    ast.parse(source.replace(mutation.text, mutation.broken))
    for name in mutation.tests.split():
        assert (ROOT / "tests" / name).exists(), name
