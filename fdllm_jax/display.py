"""Text on a terminal while it is decoded: committed tokens as they are, open positions as shaded cells."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from fdllm_jax.job import Snapshot, Watcher
from fdllm_jax.tokenizer import Tokenizer

OPEN = "░"


def render(tokenizer: Tokenizer, snapshot: Snapshot) -> Text:
    """The response as it stands; what follows the last committed token is left out."""
    last = max((i for i, c in enumerate(snapshot.committed) if c), default=-1) + 1
    text = Text()
    pairs = zip(snapshot.tokens[:last].tolist(), snapshot.committed[:last].tolist(), strict=True)
    for committed, run in groupby(pairs, key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        if committed:
            text.append(tokenizer.decode(tokens))
        else:
            text.append(OPEN * len(tokens), style="dim")
    return text


@contextmanager
def display(tokenizer: Tokenizer, prompts: int) -> Iterator[Watcher]:
    """A watcher for `LLM.generate` that redraws the running responses in place, and clears them at the end."""
    console = Console()
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def watch(snapshots: list[Snapshot]) -> None:
            parts = []
            for snapshot in snapshots:
                if prompts > 1:
                    parts.append(Text(f"── prompt {snapshot.index + 1}", style="bold"))
                parts.append(render(tokenizer, snapshot))
            # The end of what does not fit: the terminal cannot redraw what has scrolled out of it.
            lines = console.render_lines(Group(*parts), pad=False)[-max(1, console.height - 2) :]
            joined = [segment for line in lines for segment in (*line, Segment.line())]
            live.update(Segments(joined[:-1]), refresh=True)

        yield watch
