"""Table 6 and Figure 4: speed and memory by batch: python -m benchmarks.paper.table6

Memory is that of the compiled program: weights, caches and work space. What the device has counted at its peak stands
beside it where a method raised it, for the peak is the whole process's.
"""

from functools import partial

from benchmarks.paper.command import start
from benchmarks.paper.grid import Panel, Table, cross

TABLE = Table(
    name="table6",
    title="Table 6, Figure 4: speed and memory by batch, 1-shot",
    cells=partial(cross, shots=1),
    methods=("llada", "fast-dllm-dual", "flash-cache", "flash-dllm", "balanced"),
    by=("task", "gen_length", "batch", "name"),
    metrics=("tokens_per_second", "planned_memory", "peak_memory"),
    panels=(Panel(x="batch", y="tokens_per_second"), Panel(x="batch", y="planned_memory")),
    each=("task", "gen_length"),
    batches=(1, 4, 8, 16, 24, 32),
)

if __name__ == "__main__":
    start(TABLE)
