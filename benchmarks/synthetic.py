"""Checkpoints of any size with random weights, in LLaDA's Hugging Face format: for measuring and testing conversion."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.safetensors_files import write_safetensors
from convert.table import layout
from convert.tensors import DTYPES, TensorInfo
from fdllm_jax.config import ModelConfig


def write_checkpoint(directory: Path, config: ModelConfig, *, dtype: str, seed: int, shard_bytes: int) -> None:
    """Make `directory` with a config.json and random finite weights of `dtype` (a key of `convert.tensors.DTYPES`).

    Weights are between -2 and 2, of any sign, mantissa and lower exponent. One tensor is held.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    infos = {
        part.name: TensorInfo(dtype=dtype, shape=part.shape) for parts in layout(config).values() for part in parts
    }
    write_safetensors(directory, infos, _weights(infos, seed), shard_bytes)


def _weights(infos: dict[str, TensorInfo], seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for info in infos.values():
        nbytes = math.prod(info.shape) * DTYPES[info.dtype].itemsize
        words = generator.integers(0, 2**64, nbytes // 8 + 1, dtype=np.uint64)
        words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)  # the highest bit of the exponent: neither NaN nor infinity
        yield words.view(np.uint8)[:nbytes].view(DTYPES[info.dtype]).reshape(info.shape)
