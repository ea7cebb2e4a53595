"""Data sets from local files of JSON lines."""

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdllm_jax.tasks import parse_line

Row = Mapping[str, Any]


def find(data: Path, names: Sequence[str]) -> Path:
    """The file itself, or the first of the names (each also with .gz) in a folder. Raises FileNotFoundError."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise FileNotFoundError(f"{data}: there is no such file or folder")
    for name in names:
        for path in (data / name, data / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"{data}: expected a file {' or '.join(names)} (or with .gz) in it")


def text_of(path: Path) -> str:
    """The text of a file, gzipped where its name ends in .gz. Raises ValueError where it is none."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: neither UTF-8 text nor that in gzip ({error})") from error


def read(path: Path, fields: Mapping[str, type], check: Callable[[Row], str | None] = lambda row: None) -> list[Row]:
    """The objects of a file of JSON lines, gzipped where its name ends in .gz; blank lines are left out.

    fields: names that each object must have, and the types of their values. check: what else is wrong with an object,
    or None. Raises ValueError that names the lines at fault.
    """
    rows, faults = [], []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_line(line)
        except ValueError as error:
            faults.append(f"line {number}: {error}")
            continue
        fault = _fault(row, fields) or check(row)
        if fault is None:
            rows.append(row)
        else:
            faults.append(f"line {number}: {fault}")
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults[:3])}" + f"; and {len(faults) - 3} more" * (len(faults) > 3))
    if not rows:
        raise ValueError(f"{path}: no item in it: expected JSON lines with {', '.join(fields)}")
    return rows


def _fault(row: Any, fields: Mapping[str, type]) -> str | None:
    if not isinstance(row, dict):
        return "expected an object"
    wrong = [f"{name} ({kind.__name__})" for name, kind in fields.items() if not isinstance(row.get(name), kind)]
    return f"expected {', '.join(wrong)}; it has {', '.join(row) or 'nothing'}" if wrong else None
