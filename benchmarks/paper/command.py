"""The command line of a table: its cells decoded one after the other with one model, printed, written and drawn."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from benchmarks import report
from benchmarks.paper import picture, show
from benchmarks.paper.grid import Asked, Cell, Rows, Table
from benchmarks.paper.methods import METHODS
from benchmarks.paper.suites import MADE, OWN, PAPERS, SUITES
from fdllm_jax import command_line
from fdllm_jax.compare import batch_size
from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.task import Item, Task

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM


def start(table: Table) -> NoReturn:
    """Run a table's command as a process of its own."""
    command_line.exit_on_ctrl_c(_program(table))
    sys.exit(main(table))


def main(table: Table, arguments: Sequence[str] | None = None) -> int:
    """Run a table's command; returns the exit code: 0, or 2 for a user's error."""
    p = parser(table)
    return command_line.run(_program(table), partial(_run, table, p, p.parse_args(arguments)))


def _program(table: Table) -> str:
    return f"benchmarks.paper.{table.name}"


def parser(table: Table) -> argparse.ArgumentParser:
    """The options of a table's command."""
    p = command_line.Parser(
        _program(table),
        f"{table.title}. On the synthetic tasks of the small checkpoint or, with --model and --data, on the paper's "
        "benchmarks.",
    )
    many: dict[str, Any] = {"nargs": "+", "type": command_line.count, "metavar": "N"}
    batches: dict[str, Any] = many | {"type": batch_size}
    p.add_argument("--data", type=Path, metavar="DIR", help="the benchmarks' JSON lines (see fdllm_jax.evaluate)")
    p.add_argument(
        "--tasks", nargs="+", choices=tuple(SUITES), metavar="TASK",
        help=f"default: {'all' if table.all_tasks else 'the first'} of {', '.join(OWN)}; of {', '.join(PAPERS)} with "
        "--model or --data",
    )  # fmt: skip
    p.add_argument(
        "--methods", nargs="+", choices=tuple(METHODS), default=table.methods, metavar="METHOD",
        help=f"of {', '.join(METHODS)} (default: {' '.join(table.methods)})",
    )  # fmt: skip
    p.add_argument("--gen-length", **many, help="response positions (default: as the table has them)")
    p.add_argument(
        "--batch", **batches, default=table.batches,
        help=f"side by side (default: {_words(table.batches)})",
    )  # fmt: skip
    default = f"all of them, {MADE} of a synthetic task" if table.limit is None else str(table.limit)
    p.add_argument(
        "--limit", type=command_line.count, default=table.limit, metavar="N", help=f"items of a task ({default})"
    )
    if table.seeds is None:
        p.add_argument("--repeats", type=command_line.count, default=3, metavar="N", help="timed runs of each (3)")
    else:
        p.add_argument(
            "--seeds", type=command_line.count, default=table.seeds, metavar="N",
            help=f"samples of the items, each drawn with its seed and timed once ({table.seeds})",
        )  # fmt: skip
    command_line.add_model(p, raw=False)
    p.add_argument(
        "--output", type=command_line.folder, metavar="DIR",
        help=f"for paper_{table.name}.json and .png (default: benchmarks/results, of a run with all defaults)",
    )  # fmt: skip
    return p


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _run(table: Table, p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    default = OWN if options.model is None and options.data is None else PAPERS
    names = options.tasks or default[: None if table.all_tasks else 1]
    suites = [SUITES[name] for name in dict.fromkeys(names)]
    asked = Asked(suites=suites, methods=tuple(dict.fromkeys(options.methods)), gen_lengths=options.gen_length or ())
    cells = table.cells(asked)
    count = options.limit and options.limit * (1 if table.seeds is None else 2 * options.seeds)
    items = {suite.name: suite.items(options.data, count) for suite in suites}
    settings: dict[str, Any] = {"tasks": {suite.name: _record(suite.task) for suite in suites}, "limit": options.limit}
    settings["synthetic"] = [suite.name for suite in suites if suite.is_synthetic]
    if table.seeds is not None:
        settings |= {"seeds": list(range(options.seeds)), "seeds_vary": "the items, drawn with the seed"}
    file = _file(table, p, options)

    command_line.use_compilation_cache()
    command_line.check_device()
    from fdllm_jax.engine import LLM

    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)
    settings |= {"model": llm.name, "dtype": str(llm.dtype), "kernels": options.kernels}
    rows: Rows = []
    with report.kept(file, rows):
        for of_cell in decoded(llm, table, cells, items, options):
            rows += of_cell
            if file is not None:
                report.write_part(file, settings=settings, rows=rows)
    if not rows:
        raise ValueError("out of memory: give a smaller --batch, or a smaller --gen-length")
    title = f"arXiv 2609.26796, {table.title}\n{llm.name}, {llm.dtype}, {report.hardware()}"
    if settings["synthetic"]:
        title += f"; synthetic tasks: {', '.join(settings['synthetic'])}, not the paper's"
    show.print_table(table, rows, title)
    if file is not None:
        report.finish(file)
        try:
            picture.write(file.with_suffix(".png"), table, rows, title)
        except ImportError as error:
            _say(table, f"no {file.stem}.png: {error}; pip install 'fdllm-jax[plot]'")


def _file(table: Table, p: argparse.ArgumentParser, options: argparse.Namespace) -> Path | None:
    """Where the results go; None where they are only printed. Raises ValueError where they cannot be written."""
    name = f"paper_{table.name}"
    if options.output is None:
        file = report.file_of(name, options, p)
        if file is None:
            _say(table, "not all is as by default, so nothing is written: --output DIR says where to")
        return file
    return command_line.made(options.output) / f"{name}.json"


def _record(task: Task) -> dict[str, Any]:
    """What the results say of a task. Raises ValueError where its scores cannot be had here."""
    return task.record() | ({"sandbox": sandbox.isolation()} if task.runs_code else {})


def decoded(
    llm: "LLM",
    table: Table,
    cells: Sequence[Cell],
    items: Mapping[str, Sequence[Item]],
    options: argparse.Namespace,
) -> Iterator[Rows]:
    """Yield each cell's rows, batch by batch; what needs more memory than there is, is left out with a note.

    items: all of each task.
    """
    from benchmarks.paper.measure import compile_all, measure, prompts, scorer
    from fdllm_jax.memory import ran_out

    seeds, repeats = (None, options.repeats) if table.seeds is None else (options.seeds, 1)
    score = scorer()
    samples = [prompts(llm, cell, items[cell.suite.name], options.limit, seeds) for cell in cells]
    grid = [(batch, *of) for batch in sorted(set(options.batch)) for of in zip(cells, samples, strict=True)]
    _say(table, "compiling")
    compile_all(llm, grid)
    for done, (batch, cell, its) in enumerate(grid, 1):
        try:
            rows = measure(llm, table, cell, batch, its, repeats, score)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            _say(table, f"{cell.variant.name} at batch {batch}: out of memory, left out")
            continue
        _say(table, f"{done} of {len(grid)}: {show.line(table, rows)}")
        yield rows


def _say(table: Table, note: str) -> None:
    print(f"{_program(table)}: {note}", file=sys.stderr)
