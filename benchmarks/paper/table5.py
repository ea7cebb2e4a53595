"""Table 5: speed by length of response and of prompt: python -m benchmarks.paper.table5

Longer prompts have more worked examples before the question.
"""

from dataclasses import replace

from benchmarks.paper.command import start
from benchmarks.paper.grid import Asked, Cell, Panel, Table, cross

SHOTS = (0, 4, 8, 16)


def cells(asked: Asked) -> list[Cell]:
    """Responses of several lengths to the task's prompts, then prompts of several lengths."""
    one_length = replace(asked, gen_lengths=asked.gen_lengths[-1:])
    return [
        *cross(asked, lengths=lambda suite: suite.gen_lengths, sweep="gen_length"),
        *(cell for shots in SHOTS for cell in cross(one_length, shots=shots, sweep="shots")),
    ]


TABLE = Table(
    name="table5",
    title="Table 5: speed by length of response and of prompt",
    cells=cells,
    methods=("llada", "fast-dllm-dual", "flash-cache", "flash-dllm", "balanced"),
    by=("task", "batch", "sweep", "gen_length", "shots", "prompt_tokens", "name"),
    metrics=("tokens_per_second", "tokens_per_step", "accuracy"),
    panels=(
        Panel(x="gen_length", y="tokens_per_second", sweep="gen_length"),
        Panel(x="prompt_tokens", y="tokens_per_second", sweep="shots"),
    ),
    each=("task", "batch"),
)

if __name__ == "__main__":
    start(TABLE)
