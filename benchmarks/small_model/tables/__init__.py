"""Text tables of the generators: words, pipelines and functions."""

from pathlib import Path


def read(name: str) -> str:
    """The text of a table of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


WORDS: dict[str, tuple[str, ...]] = {
    key: tuple(words.split()) for key, words in (line.split(": ", 1) for line in read("words.txt").splitlines())
}
"""Lists of words by name."""
