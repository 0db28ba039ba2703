"""How long pages and sentences are: what README and the documentation ask of a reader.

Cells, bullets, headings and alternative texts count; fenced code, comments and addresses do not.
A sentence ends at ``.``, ``!`` or ``?``, or with its cell, bullet or paragraph; ``python
tests/test_words.py`` prints the counts and every sentence that is too long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
LOOKED_UP = ("reference", "api", "command-line", "compatibility", "glossary", "benchmarks/README")
"""Pages that nobody reads from the beginning to the end."""

MOST_WORDS_OF_README = 1_000
MOST_WORDS = {"for users": 9_700, "for changes": 9_300}
MOST_WORDS_OF_SENTENCE = 25
MOST_PAGES = 26
MOST_FIGURES = 15

NOT_READ = r"^```.*?^```|<!--.*?-->"
ITEM = r"^\s*(?:[*+-]|\d+\.|#+|>)\s+"


def parts(page: str) -> Iterator[str]:
    """Paragraphs, cells, bullets, headings and alternative texts."""
    text = re.sub(NOT_READ, "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r'<[^>]*?\balt="([^"]*)"[^>]*>', r"\n\n\1\n\n", text)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\n\n\1\n\n", text)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"<[/a-z][^>]*>", " ", text)
    text = re.sub(ITEM, "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.lstrip().startswith("|"):
            yield from re.split(r"(?<!\\)\||\n", paragraph)
        else:
            yield paragraph


def words(text: str) -> list[str]:
    """What has a letter or a digit in it."""
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(page: str) -> Iterator[str]:
    """Of all parts."""
    for part in parts(page):
        for sentence in re.split(r"(?<=[.!?])[)*\"]*\s+", part.replace("e.g.", "e.g")):
            if words(sentence):
                yield " ".join(sentence.split())


def long_sentences(page: str) -> list[str]:
    """Those of too many words."""
    return [s for s in sentences(page) if len(words(s)) > MOST_WORDS_OF_SENTENCE]


def count(page: str) -> int:
    """Words of a page."""
    return sum(len(words(part)) for part in parts(page))


def read_pages() -> dict[str, str]:
    """All pages of the documentation."""
    return {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}


def group(name: str) -> str:
    """Whom a page is for; empty: it is looked up."""
    written = "for changes" if name.startswith("internals/") else "for users"
    return "" if name.removesuffix(".md") in LOOKED_UP else written


def test_a_page_is_counted_as_it_is_read() -> None:
    page = (
        "# A head\n\n<!-- none -->\nOne: two; three\n`four.five` e.g. six. Seven? [Eight](a/b.md)\n"
        "\n| nine | ten. Eleven |\n| --- | --- |\n\n* twelve\n  thirteen\n* fourteen\n\n"
        '![fifteen 16](a.svg)\n<img alt="seventeen" src="a.svg">\n\n```python\nnone = 0\n```\n'
    )
    assert count(page) == 19
    found = list(sentences(page))
    assert found[:4] == ["A head", "One: two; three `four.five` e.g six.", "Seven?", "Eight"]
    assert found[4:8] == ["nine", "ten.", "Eleven", "twelve thirteen"]
    assert found[8:] == ["fourteen", "fifteen 16", "seventeen"]
    assert long_sentences("word " * 25 + ".") == []
    assert len(long_sentences("word " * 26)) == 1


def test_readme_is_short() -> None:
    assert count(README.read_text()) <= MOST_WORDS_OF_README
    assert long_sentences(README.read_text()) == []


def test_documentation_is_short() -> None:
    pages = read_pages()
    assert len(pages) > 25
    for readers, most in MOST_WORDS.items():
        found = [count(text) for name, text in pages.items() if group(name) == readers]
        assert 0.8 * most < sum(found) <= most, readers
    long = [f"{name}: {s}" for name, text in pages.items() for s in long_sentences(text)]
    assert long == []


def test_there_are_few_pages_and_few_files_of_figures() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert 20 < len(re.findall(r"\.md$", navigation, re.MULTILINE)) <= MOST_PAGES
    assert len(list((DOCS / "benchmarks").glob("**/*.json"))) <= MOST_FIGURES


if __name__ == "__main__":
    for name, text in ({"README.md": README.read_text()} | read_pages()).items():
        print(f"{count(text):6} words  {name}")
        for sentence in long_sentences(text):
            print(f"       {len(words(sentence))}: {sentence}")
