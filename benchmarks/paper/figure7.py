"""Figure 7: how many masked positions a pass computes (mask_window, beta_m): python -m benchmarks.paper.figure7"""

from functools import partial

from benchmarks.paper.command import start
from benchmarks.paper.grid import Panel, Table, cross

WINDOWS = (16, 32, 64, 96, 128)

TABLE = Table(
    name="figure7",
    title="Figure 7: accuracy and speed by mask_window",
    cells=partial(cross, options=[{"mask_window": window} for window in WINDOWS]),
    methods=("flash-cache", "flash-dllm", "balanced"),
    by=("task", "gen_length", "batch", "name", "mask_window"),
    metrics=("accuracy", "tokens_per_second", "tokens_per_step"),
    panels=(Panel(x="mask_window", y="tokens_per_second"), Panel(x="mask_window", y="accuracy")),
)

if __name__ == "__main__":
    start(TABLE)
