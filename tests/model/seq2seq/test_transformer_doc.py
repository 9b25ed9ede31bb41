"""docs/transformer.md points at lines of code; this keeps it pointing at the right ones."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
LINKS = re.findall(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(?:#L(\d+))?\)", (DOCS / "transformer.md").read_text("utf-8"))


@pytest.mark.parametrize(("text", "path", "line"), LINKS, ids=[f"{path}#{line}" for _, path, line in LINKS])
def test_each_link_leads_to_what_it_names(text: str, path: str, line: str) -> None:
    """The file is there, and the line that is linked holds the name in the link."""
    target = DOCS / path
    assert target.is_file()
    if line:
        name = text.strip("`").rpartition(".")[2]
        found = target.read_text("utf-8").splitlines()[int(line) - 1]
        assert re.search(rf"\b{name}", found), f"{path} line {line} is {found!r}"


def test_the_links_cover_both_models() -> None:
    """Side by side means that neither side is told without its code."""
    lines = [path for _, path, line in LINKS if line]
    assert sum("/seq2seq/" in path for path in lines) >= 10
    assert sum("/seq2seq/" not in path for path in lines) >= 8
