"""The README's line references: `python tests/tools/line_links.py` brings them up to date.

[`text`](file.py#L12) is the line where `text` is defined, or a section of that name starts, or else the only one with
it. A number at the end of a table's row is that of all lines of the statements that the row refers to.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[(`?)([^]`]+)`?\]\((\w+\.py)#L\d+\)")
ROW = re.compile(r"^(\|.*#L\d+\).*\| )\d+( \|)$", re.M)


def find(text: str, file: str) -> int:
    lines = (ROOT / file).read_text().splitlines()
    exact = re.escape(text)
    for pattern in (rf"\s*(def|class) {exact}\b", rf"# ([-=]{{4}}) {exact} \1$", rf".*{exact}"):
        if found := [number for number, line in enumerate(lines, 1) if re.match(pattern, line)]:
            assert len(found) == 1, f"README: {text!r} is in lines {found} of {file}: name another part of the line"
            return found[0]
    raise AssertionError(f"README: no line of {file} has {text!r}")


def statements(row: str) -> list[range]:
    """The lines of the statements of fsdp_train.py that a row refers to."""
    tree = ast.parse((ROOT / "fsdp_train.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    starts = [find(text, file) for _, text, file in LINK.findall(row)]
    ends = [max(node.end_lineno or 0 for node in nodes if node.lineno == start) for start in starts]
    return [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]


def corrected(readme: str) -> str:
    readme = LINK.sub(lambda link: re.sub(r"\d+\)$", f"{find(link[2], link[3])})", link[0]), readme)
    return ROW.sub(lambda row: f"{row[1]}{sum(map(len, statements(row[0])))}{row[2]}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(corrected(path.read_text()))
