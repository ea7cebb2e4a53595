"""GSM8K's training set in the form of the mixture: no calculator marks, last line `#### number`."""

import json
import os
import re
from pathlib import Path

_CALCULATOR = re.compile(r"<<[^>]*>>")


def default_path() -> Path:
    """`gsm8k_train.jsonl` in the folder that the environment variable FDLLM_DATA names (default `../shared/data`)."""
    return Path(os.environ.get("FDLLM_DATA", "../shared/data")) / "gsm8k_train.jsonl"


def load(path: Path | None = None) -> list[tuple[str, str]]:
    """Questions and answers of a GSM8K file, one JSON object with `question` and `answer` a line.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = path or default_path()
    if not path.is_file():
        raise FileNotFoundError(
            f"GSM8K's training set is not at {path}: set FDLLM_DATA to the folder that holds "
            f"{path.name}, or give GSM8K no weight"
        )
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [(row["question"].strip(), _CALCULATOR.sub("", row["answer"]).strip()) for row in rows]
