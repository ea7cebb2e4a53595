"""The trace page, read back with the standard library's HTML parser and compared with what went in."""

import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fdllm_jax.trace import DARK_RAMP, LIGHT_RAMP, Trace, check_trace_path, ramp, trace_page, write_trace

HOSTILE = "</script><script>alert('1')</script>\"&\x00\x1b[31m"
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Elements opened and closed in order; the tokens' attributes; the text of answers and prompts."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {"answer": [], "prompt": []}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        kind = dict(attrs).get("class")
        if kind in self.text:
            self.text[kind].append("")
        if tag not in VOID:
            self.open.append((tag, kind))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, kind in self.open:
            if kind in self.text:
                self.text[kind][-1] += data

    def tokens(self) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if tag == "span" and "data-step" in attrs]


def trace(**overrides: Any) -> Trace:
    entries = {
        "prompt": "How many?",
        "pieces": ["She", " has", " 2", "\n\n", "", "    ", "x\n", "<|endoftext|>"],
        "steps": [0, 0, 3, 1, 2, 1, 3, 0],
        "confidences": [0.99, 0.9, 0.1234567, 0.5, 1.0, 0.25, 0.75, 0.0],
        "rules": ["threshold", "threshold", "most confident", "verified", "quota", "quota", "quota", "threshold"],
        "method": "threshold",
        "settings": {"threshold": 0.9, "seed": None},
    }
    return Trace(**(entries | overrides))


def test_page_holds_what_went_in() -> None:
    first, second = trace(), trace(prompt="Second", steps=[7, 6, 5, 4, 3, 2, 1, 0])
    page = Page(trace_page([first, second], title="A & B"))
    assert page.text["prompt"] == ["How many?", "Second"]
    assert page.text["answer"] == ["".join(first.pieces)] * 2  # whitespace and line ends included
    tokens = page.tokens()
    for key, entries in (("data-step", "steps"), ("data-confidence", "confidences"), ("data-rule", "rules")):
        assert [token[key] for token in tokens] == [str(v) for t in (first, second) for v in getattr(t, entries)]
    assert tokens[2]["title"] == "step 4, confidence 0.123, most confident"
    assert [token.get("data-mark") for token in tokens[3:7]] == ["↵↵", "∅", None, "↵"]
    sliders = [attrs for tag, attrs in page.elements if tag == "input"]
    assert [(slider["max"], slider["value"]) for slider in sliders] == [("4", "4"), ("8", "8")]


def test_steps_have_colours_and_bars() -> None:
    page = Page(trace_page([trace()]))
    colours = [(token["class"] or "").split()[1] for token in page.tokens()]
    assert colours == ["c0", "c0", "c63", "c21", "c42", "c21", "c63", "c0"]
    bars = [attrs for tag, attrs in page.elements if tag == "i" and "style" in attrs]
    assert [bar["style"] for bar in bars] == ["height:100.0%", "height:66.7%", "height:33.3%", "height:66.7%"]
    assert [bar["class"] for bar in bars] == ["c0", "c21", "c42", "c63"]


def test_everything_is_escaped_and_nothing_is_fetched() -> None:
    hostile = trace(
        prompt=HOSTILE, pieces=[HOSTILE] * 8, rules=[HOSTILE] * 8, method=HOSTILE, settings={HOSTILE: HOSTILE}
    )
    text = trace_page([hostile], title=HOSTILE)
    page = Page(text)
    seen = HOSTILE.replace("\x00", "␀").replace("\x1b", "␛")
    assert page.text["answer"] == [seen * 8]
    assert page.text["prompt"] == [seen]
    assert [token["data-rule"] for token in page.tokens()] == [seen] * 8
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "\x00" not in text
    assert not any(name in attrs for _, attrs in page.elements for name in ("src", "href"))
    assert "url(" not in text
    assert "://" not in text


def test_an_empty_answer_has_nothing_to_replay() -> None:
    page = Page(trace_page([trace(pieces=[], steps=[], confidences=[], rules=[])]))
    assert page.tokens() == []
    assert all("disabled" in attrs for tag, attrs in page.elements if tag in ("button", "input"))


def test_uneven_lists_and_uncommitted_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="'pieces': 8, 'steps': 1"):
        trace(steps=[0])
    with pytest.raises(ValueError, match="got -1"):
        trace(steps=[0, 0, 3, 1, -1, 1, 3, 0])


@pytest.mark.parametrize(("ends", "ink"), [(LIGHT_RAMP, 0x1B1B1F), (DARK_RAMP, 0xF4F4F2)], ids=["light", "dark"])
def test_text_is_readable_on_every_colour(ends: Any, ink: int) -> None:
    """WCAG contrast of at least 4.5, and colours that a screen can show."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    text = luminance(tuple((ink >> shift & 255) / 255 for shift in (16, 8, 0)))
    for colour in ramp(*ends):
        assert min(colour) >= 0
        assert max(colour) <= 1
        low, high = sorted((text, luminance(colour)))
        assert (high + 0.05) / (low + 0.05) > 4.5


def test_the_ramp_is_oklch() -> None:
    # Red, green and blue of sRGB in OKLCH, rounded as the colour space's description gives them.
    for oklch, rgb in {
        (0.62796, 0.25768, 29.234): (1, 0, 0),
        (0.86644, 0.29483, 142.495): (0, 1, 0),
        (0.45201, 0.31321, 264.052): (0, 0, 1),
    }.items():
        assert ramp(oklch, oklch)[0] == pytest.approx(rgb, abs=2e-3)


def test_file_is_written_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    path.write_text("old")
    write_trace(path, [trace(prompt="caf\u00e9 \ud800")])
    assert Page(path.read_text(encoding="utf-8")).text["prompt"] == ["café ?"]
    assert os.listdir(tmp_path) == ["trace.html"]
    link = tmp_path / "link.html"
    link.symlink_to(path)
    write_trace(link, [trace(prompt="new")])
    assert link.is_symlink()
    assert "new" in path.read_text(encoding="utf-8")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.html"
    path.write_text("old")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"trace\.html: No space left on device"):
        write_trace(path, [trace()])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["trace.html"]


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing/trace\.html: the folder .*missing does not exist"):
        write_trace(tmp_path / "missing" / "trace.html", [trace()])
    for taken in (tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{taken}: it is not a file"):
            check_trace_path(taken)
    with pytest.raises(ValueError, match="File name too long"):
        write_trace(tmp_path / ("n" * 300), [trace()])
    assert os.listdir(tmp_path) == []
