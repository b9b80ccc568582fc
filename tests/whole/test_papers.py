"""papers/: keys, pages, files and notebooks belong together, and a number stands there as it was measured.

A number that was measured elsewhere in the repository is followed by a comment, which a rendered page does not show:

    … they move by +6.1 (middle 80%: +4.4 to +8.2).
    <!-- from notebooks/03_steer_a_model.ipynb: +6.1 (middle 80%: +4.4 to +8.2) -->

What is quoted, several pieces with ``;`` between them, must stand in the comment's own paragraph and in what it is
from: a notebook's outputs, or the text of another file. The README may quote in the same way.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kwflow as kf

ROOT = Path(__file__).parents[2]
INDEX, REPORT = ROOT / "papers" / "README.md", ROOT / "papers" / "kwflow.md"
PAGES = {path.stem: path for path in sorted(INDEX.parent.glob("*.md")) if path not in (INDEX, REPORT)}
BIBLIOGRAPHY = (INDEX.parent / "references.bib").read_text()
KEYS = re.findall(r"^@\w+\{(\w+),$", BIBLIOGRAPHY, re.MULTILINE)
SECTIONS = ["Claim", "Here", "Notebook", "Status", "Ours", "What differs", "Cost"]
STATUSES = ("reproduced", "partly", "failed", "not tried")
QUOTE = re.compile(r"<!-- from ([\w./-]+): (.+?) -->", re.DOTALL)
NOTEBOOK = re.compile(r"\]\(\.\./notebooks/(\w+)\.ipynb\)")

every_page = pytest.mark.parametrize("key", PAGES)


def sections(path: Path) -> dict[str, str]:
    """The text under each heading of second rank."""
    _, *parts = re.split(r"^## (.+)\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def plain(text: str) -> str:
    """Without comments, emphasis and line breaks."""
    return " ".join(re.sub(r"<!--.*?-->|[*`]", "", text, flags=re.DOTALL).split())


def said(path: Path) -> str:
    """What a notebook's outputs say, or a file."""
    if path.suffix != ".ipynb":
        return plain(path.read_text())
    outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return plain("\n".join("".join(text) for text in texts))


def test_every_key_has_its_places() -> None:
    """A page has an entry and a row; an entry has a page, or a page or the index speaks of it."""
    assert len(KEYS) == len(set(KEYS)) and KEYS == sorted(KEYS)
    assert set(PAGES) <= set(KEYS)
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\.md\)", INDEX.read_text(), re.MULTILINE)) == sorted(PAGES)
    texts = "".join(path.read_text() for path in [INDEX, REPORT, *PAGES.values()])
    assert [key for key in KEYS if key not in PAGES and f"[{key}]" not in texts] == []
    assert [key for key in re.findall(r"\[([a-z]+\d{4})\]", texts) if key not in KEYS] == []


@every_page
def test_a_page_says_everything(key: str) -> None:
    text, parts = PAGES[key].read_text(), sections(PAGES[key])
    assert text.startswith(f"# {key}: ") and list(parts) == SECTIONS
    assert 25 <= len(text.splitlines()) <= 80
    status = parts["Status"].split(".")[0].strip().strip("*")
    assert status in STATUSES
    (row,) = re.findall(rf"^\| \[{key}\]\({key}\.md\) .*$", INDEX.read_text(), re.MULTILINE)
    assert row.split(" | ")[-1].rstrip(" |") == status, "the index says the same"
    measured = re.findall(r"`python -m (benchmarks\.\w+)", parts["Ours"])
    assert QUOTE.search(parts["Ours"]) or measured or status == "not tried", "where the number is from"
    assert "`kwflow/" in parts["Here"]


@pytest.mark.parametrize("path", [INDEX, REPORT, *PAGES.values()], ids=lambda path: path.stem)
def test_what_is_named_exists(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"`((?:kwflow|tests|benchmarks|notebooks)/[\w./]*)`", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link
    for name in re.findall(r"`kf\.(\w+)", text):
        assert hasattr(kf, name), name
    wide = [line for line in text.splitlines() if len(line) > 122 and "|" not in line and "<!--" not in line]
    assert not wide


def test_notebooks_name_their_papers_back() -> None:
    """The first cell of a notebook links the pages that link the notebook."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        named = set(re.findall(r"\]\(\.\./papers/(\w+)\.md\)", first))
        naming = {key for key, page in PAGES.items() if path.stem in NOTEBOOK.findall(sections(page)["Notebook"])}
        assert named == naming, path.stem


@pytest.mark.parametrize("path", [ROOT / "README.md", INDEX, REPORT, *PAGES.values()], ids=lambda path: path.stem)
def test_numbers_are_those_that_were_measured(path: Path) -> None:
    for paragraph in re.split(r"\n\s*\n", path.read_text()):
        for source, pieces in QUOTE.findall(paragraph):
            for piece in map(plain, pieces.split(";")):
                assert len(piece) >= 5 and re.search(r"\d", piece), f"{piece!r} says too little to be found again"
                assert piece in plain(paragraph), f"{piece!r} does not stand beside the comment that quotes it"
                assert piece in said(ROOT / source), f"{piece!r} is not in {source} (any more)"
        assert "<!-- from" not in QUOTE.sub("", paragraph), paragraph


def test_the_report_is_one_of_a_few_pages() -> None:
    assert 150 <= len(REPORT.read_text().splitlines()) <= 250
