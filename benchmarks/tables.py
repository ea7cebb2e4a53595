"""Tables of the documents, from the results: python -m benchmarks.tables

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and is replaced whole.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "fdllm_jax" / "assets" / "fdllm-9m" / "README.md")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Bring every document's tables up to date."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """The text with every table made from the results as they are."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def small_model() -> str:
    """Accuracy and tokens per step of the shipped checkpoint."""
    figures: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in json.loads((RESULTS / "small_model.json").read_text(encoding="utf-8"))["rows"]:
        figures.setdefault((row["case"]["task"], row["case"]["method"]), {})[row["metric"]] = row
    lines = ["| task | method | accuracy | of | tokens per step |", "|---|---|---|---|---|"]
    for (task, method), of in figures.items():
        accuracy = of["accuracy"]
        lines.append(
            f"| {task.replace('_', ' ')} | `{method}` | {accuracy['median']:.1%} "
            f"({accuracy['low']:.1%} to {accuracy['high']:.1%}) | {accuracy['repeats']} "
            f"| {of['tokens_per_step']['median']:.2f} |"
        )
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[], str]] = {"small_model": small_model}

if __name__ == "__main__":
    main()
