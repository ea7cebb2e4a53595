"""Table 4 and Figure 5: the trade-off of gamma, track_budget and threshold: python -m benchmarks.paper.table4

A seed draws the items: decoding without noise has no other chance in it. Figures are the median over the seeds, and
the least and the greatest.
"""

from benchmarks.paper.command import start
from benchmarks.paper.grid import Asked, Cell, Panel, Table, cross

GAMMAS = (0.6, 0.7, 0.8, 0.85, 0.9, 1.0)
BUDGETS = (32, 48, 64, 96)  # the paper's beta_t
THRESHOLDS = (0.8, 0.85, 0.9, 0.95)  # the paper's epsilon


def cells(asked: Asked) -> list[Cell]:
    """Every gamma with every budget, then thresholds with the task's own settings."""
    both = [{"track_budget": budget, "gamma": gamma} for budget in BUDGETS for gamma in GAMMAS]
    thresholds = [{"threshold": threshold} for threshold in THRESHOLDS]
    return [*cross(asked, options=both, sweep="gamma"), *cross(asked, options=thresholds, sweep="threshold")]


TABLE = Table(
    name="table4",
    title="Table 4, Figure 5: accuracy and speed by gamma, track_budget and threshold; seeds draw the items",
    cells=cells,
    methods=("flash-dllm",),
    by=("task", "gen_length", "batch", "name", "sweep", "track_budget", "gamma", "threshold"),
    metrics=("accuracy", "tokens_per_second", "tokens_per_step"),
    panels=(
        Panel(x="tokens_per_second", y="accuracy", sweep="gamma", note="gamma"),
        Panel(x="tokens_per_second", y="accuracy", sweep="threshold", note="threshold"),
    ),
    lines="track_budget",
    each=("task", "gen_length", "batch", "name"),
    seeds=5,
    limit=200,
)

if __name__ == "__main__":
    start(TABLE)
