"""The documentation: links lead somewhere, generated sections are current, quoted messages exist."""

import importlib.util
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "docs/records", "docker")
    for page in (ROOT / folder).glob("*.md")
)


def links(page: Path) -> list[str]:
    """The targets of all links and images of a page."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            found += [child.attrs[name] for name in ("href", "src") if name in child.attrs]
    return found


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes for the headings of a page."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    inline = [tokens[i + 1].children or () for i, token in enumerate(tokens) if token.type == "heading_open"]
    titles = ["".join(child.content for child in children) for children in inline]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, root: Path) -> list[str]:
    """What is wrong with the links of a page. Links to other sites are not asked: tests need no network."""
    found = []
    for link in links(page):
        if re.match(r"https?://[\w.-]+\.\w+(/|$)", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link} does not exist")
        elif root not in (target, *target.parents):
            found.append(f"{link} leaves the repository")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    assert broken(ROOT / name, ROOT) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A *b* c\n\n| a |\n|---|\n| [x](gone.md) ![y](gone.png) [z](#a-b-c) [w](#d) [v](/etc/) [u](http:) |\n"
    )
    assert broken(page, tmp_path) == [
        "gone.md does not exist", "gone.png does not exist", "#d: no such heading", "/etc/ leaves the repository",
        "http: does not exist",
    ]  # fmt: skip


def test_every_page_is_in_the_table_of_contents():
    listed = links(ROOT / "docs" / "README.md")
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - {*listed, "README.md"}
    assert not missing


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_sections_are_current(page):
    text = page.read_text()
    assert _generator().current(text) == text, "run python tools/docs.py"


def test_every_generated_section_is_shown():
    text = "".join(page.read_text() for page in GENERATED)
    generator = _generator()
    assert set(generator.SECTIONS) == {found[1] for found in generator.MARK.findall(text)}


def _sources() -> str:
    folders = ("tk_serving", "integrations", "model_patches")
    text = "".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return re.sub(r"\"\s*\n\s*f?\"", "", text)  # a message may be written as several strings


def test_quoted_messages_exist_in_the_code():
    """The first column of every table of the page, with … for what varies."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"(?m)^\| `([^`]+)` \|", text)
    assert len(quoted) > 25
    sources = _sources()
    for message in quoted:
        for piece in message.split("…"):
            assert piece.strip() in sources, (
                f"troubleshooting.md quotes {message!r}, but no code says {piece.strip()!r}"
            )
