"""The 8B stand-in: a small checkpoint grown to LLaDA-8B's shape, with a trained model's confidences.

`python -m benchmarks.expand fdllm_jax/assets/fdllm-9m OUT` writes 16 GB; benchmarks/expansion.py has the recipe.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import convert
from benchmarks.expansion import LLADA_8B, Shape, expanded
from convert.checkpoint import COMPANIONS
from convert.interrupts import Interrupted, Interrupts
from convert.safetensors_files import SHARD_BYTES, write_safetensors
from convert.staging import check_new, staged
from convert.table import layout
from convert.tensors import TensorInfo
from fdllm_jax.config import CONFIG_FILE

SHAPES = {"llada-8b": LLADA_8B}


def shape_of(text: str) -> Shape:
    """A name of SHAPES, or five numbers."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        return Shape(*map(int, text.split(",")))
    except (ValueError, TypeError):
        expected = f"{', '.join(SHAPES)} or {','.join(Shape._fields)}"
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: expected {expected}") from None


def write_expanded(
    source: Path,
    destination: Path,
    shape: Shape,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write `source` grown to `shape` as a safetensors checkpoint: `destination`, which must not exist.

    One parameter is held at a time (see `expanded`): at LLaDA-8B's shape in bf16 the process has 1.6 GB at most. The
    tokenizer's files are copied. check: called before each tensor; what it raises stops the work. Raises
    FileNotFoundError or ValueError, and leaves nothing behind.
    """
    check_new(destination)
    config, parameters = expanded(*convert.load(source), shape, seed, dtype)
    parts = layout(config)
    infos = {part.name: TensorInfo(dtype=dtype, shape=part.shape) for packed in parts.values() for part in packed}

    def tensors() -> Iterator[np.ndarray]:
        for path, parameter in parameters:
            rows, start = np.asarray(parameter), 0
            for part in parts[path]:
                check()
                yield rows[start : start + part.shape[0]]
                start += part.shape[0]
            del parameter, rows  # before the next one is made

    nbytes = sum(math.prod(info.shape) for info in infos.values()) * jnp.dtype(dtype).itemsize
    with staged(destination, nbytes) as folder:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        (folder / CONFIG_FILE).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
        write_safetensors(folder, infos, tensors(), shard_bytes)


def main(arguments: Sequence[str] | None = None, *, interrupts: Interrupts | None = None) -> int:
    """Write, and return the exit code: 0; 2 with one message on stderr; 130 or 143 if interrupted or terminated."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.expand", description=__doc__)
    p.add_argument("source", metavar="SMALL", help="the small checkpoint's directory, or its id on the hub")
    p.add_argument("destination", metavar="OUT", type=Path, help="the directory to make; must not exist")
    p.add_argument(
        "--shape",
        type=shape_of,
        default=LLADA_8B,
        help="llada-8b (default), or D,LAYERS,HEADS,MLP,VOCAB: multiples of the small model's, D at least 4 times",
    )
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--seed", type=int, default=0, help="of the rows of unused ids (0)")
    chosen = p.parse_args(arguments)
    try:
        if chosen.seed < 0:
            raise ValueError(f"--seed {chosen.seed}: expected at least 0")
        write_expanded(
            convert.resolve(chosen.source),
            chosen.destination,
            chosen.shape,
            dtype=chosen.dtype,
            seed=chosen.seed,
            check=(interrupts or Interrupts()).check,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 128 + interrupt.number
    return 0


if __name__ == "__main__":
    own = Interrupts()
    own.install()
    sys.exit(main(interrupts=own))
