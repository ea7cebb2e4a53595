"""Checkpoint: a checked checkpoint of either format, whose parameters are read one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.table import Part
from fdllm_jax.config import ModelConfig

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
ITEMS_FOLDER = "parameters"
# Carried along, where there, byte for byte.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose names, shapes and dtypes have been checked, before any weight is read.

    `layout`: parameter path -> its tensors (convert/table.py). `dtypes`: parameter path -> dtype as stored.
    `read(path)` gives a parameter [rows, ...], its values checked to be finite; ValueError if they are not, or if the
    files are damaged.
    """

    directory: Path
    config: ModelConfig
    layout: dict[str, tuple[Part, ...]]
    dtypes: dict[str, np.dtype]
    read: Callable[[str], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part_nbytes(part, self.dtypes[path]) for path, parts in self.layout.items() for part in parts)


def part_nbytes(part: Part, dtype: np.dtype) -> int:
    """Bytes of a tensor."""
    return int(np.prod(part.shape)) * dtype.itemsize


def is_safetensors(directory: Path) -> bool:
    """Whether the directory holds a safetensors checkpoint, single-file or sharded."""
    return (directory / SINGLE_FILE).exists() or (directory / INDEX_FILE).exists()


def is_orbax(directory: Path) -> bool:
    """Whether the directory holds an Orbax checkpoint."""
    return (directory / ITEMS_FOLDER).is_dir()
