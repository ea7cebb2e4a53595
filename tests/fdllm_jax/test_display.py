"""What a terminal shows while text is decoded."""

import io

import numpy as np
import pytest
from rich.console import Console

from fdllm_jax import display
from fdllm_jax.engine import SHIPPED
from fdllm_jax.job import Snapshot
from fdllm_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED)


def test_open_positions_are_shaded_up_to_the_last_committed_one(tokenizer: Tokenizer) -> None:
    tokens = np.array(tokenizer.encode_raw("12 + 7 = 19"))
    committed = np.ones(len(tokens), bool)
    committed[[0, len(tokens) - 1]] = False
    text = display.render(tokenizer, Snapshot(0, tokens, committed)).plain
    assert text == "░" + tokenizer.decode(tokens[1:-1].tolist())
    assert display.render(tokenizer, Snapshot(0, tokens, np.zeros(len(tokens), bool))).plain == ""


def test_a_text_taller_than_the_terminal_shows_its_end(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=8)
    monkeypatch.setattr(display, "Console", lambda: console)
    tokens = np.array(tokenizer.encode_raw("\n".join(f"line {i}" for i in range(20))))
    with display.display(tokenizer, 1) as watch:
        watch([Snapshot(0, tokens, np.ones(len(tokens), bool))])
    assert "line 19" in out.getvalue() and "line 13" not in out.getvalue()
