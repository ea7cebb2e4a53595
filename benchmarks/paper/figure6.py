"""Figure 6: tokens committed per step, their distribution and course: python -m benchmarks.paper.figure6"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.paper.command import start
from benchmarks.paper.grid import Panel, Rows, Table, cross

if TYPE_CHECKING:
    from fdllm_jax.job import Result

PARTS = 10  # of a sequence's decoding


def details(case: Mapping[str, Any], results: "Sequence[Result]") -> Rows:
    """The share of steps that commit so many tokens; the mean tokens of a step in each tenth of a decoding."""
    counts: Counter[int] = Counter()
    course: list[list[int]] = [[] for _ in range(PARTS)]
    for result in results:
        of_step = Counter(result.step_of)
        for step in range(result.steps):
            counts[of_step[step]] += 1
            course[PARTS * step // result.steps].append(of_step[step])
    steps = counts.total()
    shares = [
        report.row({**case, "tokens": tokens}, "share_of_steps", "fraction", counts[tokens] / steps)
        for tokens in range(max(counts) + 1)
    ]
    means = [
        report.row({**case, "tenth": part + 1}, "tokens_of_a_step", "tokens", sum(tokens) / len(tokens))
        for part, tokens in enumerate(course)
        if tokens
    ]
    return shares + means


TABLE = Table(
    name="figure6",
    title="Figure 6: tokens per step (those of the response, up to its end)",
    cells=cross,
    methods=("llada", "fast-dllm-dual", "flash-cache", "flash-dllm", "balanced"),
    by=("task", "gen_length", "batch", "name"),
    metrics=("tokens_per_step", "tokens_per_forward", "accuracy"),
    panels=(Panel(x="tokens", y="share_of_steps"), Panel(x="tenth", y="tokens_of_a_step")),
    details=details,
)

if __name__ == "__main__":
    start(TABLE)
