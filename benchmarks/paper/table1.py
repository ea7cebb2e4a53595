"""Table 1: accuracy and speed by task, response length and method: python -m benchmarks.paper.table1"""

from functools import partial

from benchmarks.paper.command import start
from benchmarks.paper.grid import Panel, Table, cross
from benchmarks.paper.methods import METHODS

TABLE = Table(
    name="table1",
    title="Table 1: accuracy and speed by method",
    cells=partial(cross, lengths=lambda suite: suite.gen_lengths[1:3]),
    methods=tuple(METHODS),
    by=("task", "gen_length", "batch", "name"),
    metrics=("accuracy", "tokens_per_second", "tokens_per_step", "tokens_per_forward"),
    panels=(Panel(x="tokens_per_second", y="accuracy"),),
    all_tasks=True,
)

if __name__ == "__main__":
    start(TABLE)
