"""What the README says exists, and its map of the script is true."""

import dataclasses
import re

import pytest

import fsdp_train
from launch import ROOT

README = (ROOT / "README.md").read_text()
SCRIPT = (ROOT / "fsdp_train.py").read_text()
TESTS = (ROOT / "tests/README.md").read_text()


def test_the_map_has_the_right_lines() -> None:
    lines = SCRIPT.splitlines()
    heads = [
        (n, line.strip("#-= ").removeprefix("Appendix: "))
        for n, line in enumerate(lines, 1)
        if re.match(r"# [-=]{4} ", line)
    ]
    ends = [n - 1 for n, _ in heads[1:]] + [len(lines)]
    right = [f"| {n}-{end} | {name} |" for (n, name), end in zip(heads, ends, strict=True)]
    assert re.findall(r"^\| \d+-\d+ \| .* \|$", README, re.M) == right, "the map should be\n" + "\n".join(right)


def test_files_and_links_exist() -> None:
    for text, folder in ((README, ROOT), (TESTS, ROOT / "tests")):
        for link in re.findall(r"\]\((?!https)([^)#]+)\)", text):
            assert (folder / link).exists(), link
    for name in re.findall(r"\btests/[\w/]+\.\w+|\b\w+\.(?:py|yaml|png)\b", README + TESTS):
        assert any((ROOT / place / name).exists() for place in ("", "tests", "tests/tools", "tests/recipes")), name


def test_every_hyperparameter_has_a_row() -> None:
    table = README.split("## Hyperparameters")[1].split("Reported are")[0]
    fields = {field.name for field in dataclasses.fields(fsdp_train.Config)} - {"seed", "slots_per_trial"}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == fields


def test_what_can_be_deleted_exists() -> None:
    table = README.split("What to delete first")[1].split("## ")[0]
    for name in re.findall(r"`(\w+)`", table):
        assert name in SCRIPT, name


@pytest.mark.parametrize(
    "words",
    [
        "must be numbers, and a rank below its size",
        "tasks, but no RANK",
        "no process group",
        "cannot be used",
        "cannot be saved to",
        "ranks on this node",
        "is not finite",
        "is older",
        "does the search go on?",
        "slots, but",
        "stopped by the search",
    ],
)
def test_troubleshooting_quotes_the_script(words: str) -> None:
    assert words in README and words in SCRIPT


def test_commands_and_options_exist() -> None:
    for option in ("--resume", "--config", "--checkpoint-dir", "--dry-run"):
        assert option in README and f'"{option}"' in SCRIPT
    assert README.count("-m pytest") == 1, ".ci/run takes this line"
    assert len(README.splitlines()) <= 300
