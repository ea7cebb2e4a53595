"""What a task is: items with their prompts, and scores of responses to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of a task.

    key: its name in the data set, or its number from 0. prompt: the text with its shots, before any chat template.
    document: what the score needs of the data set's fields.
    """

    key: str
    prompt: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A benchmark.

    load: the items of a local file, or of a folder that holds it under a usual name. Raises FileNotFoundError where
    there is none, and ValueError that names the lines at fault.
    score: of an item and the response's text (cut before the first stop string), each metric's value in [0, 1]. It may
    be called from several threads at once.
    metrics: what `score` returns, the main one first. shots: solved examples in a prompt. stop: strings before which
    a response ends. gen_length: response positions by default. chat_template: whether prompts are meant for it.
    source: where the prompts and the rules of the score are from. runs_code: whether `score` runs generated code, which
    needs a system with a `sandbox`. packages: what else decides the scores.
    """

    name: str
    load: Callable[[Path], list[Item]]
    score: Callable[[Item, str], dict[str, float]]
    metrics: tuple[str, ...]
    shots: int
    stop: tuple[str, ...]
    gen_length: int
    chat_template: bool
    source: str
    runs_code: bool = False
    packages: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """What a results file says of the task. Raises ValueError where a package is not installed."""
        try:
            versions = {package: version(package) for package in self.packages}
        except PackageNotFoundError as error:
            raise ValueError(
                f"task {self.name} needs {', '.join(self.packages)}, and {error.name} is not installed: "
                "pip install 'fdllm-jax[evaluation]'"
            ) from error
        return {"task": self.name, "shots": self.shots, "source": self.source, "packages": versions}
