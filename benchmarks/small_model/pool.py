"""Pools of encoded training examples, made by several processes.

python -m benchmarks.small_model.pool TOKENIZER_DIRECTORY --bin-length 256 --count 100000
"""

import argparse
import functools
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from benchmarks.small_model.dialogue import EOS
from benchmarks.small_model.mixture import FEW_SHOT, ZERO_SHOT, Mixture, Writer

LENGTHS = {256: (0, 256), 768: (200, 768), 2304: (600, 2304)}
"""Bin length -> the range over which the lengths with shots spread; no shots in the smallest."""

CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Encoded examples.

    tokens: uint16 [n, L], the prompt, the answer, then `<|endoftext|>` up to L.
    prompt_length: uint16 [n].
    length: uint16 [n], prompt and answer with one `<|endoftext|>`.
    """

    tokens: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray


def default_mixture(bin_length: int) -> Mixture:
    """The mixture of a bin: zero-shot in the smallest, few-shot in the others."""
    return ZERO_SHOT if bin_length == min(LENGTHS) else FEW_SHOT


def build(
    bin_length: int,
    count: int,
    seed: int,
    tokenizer_directory: Path,
    mixture: Mixture | None = None,
    workers: int | None = None,
) -> Pool:
    """`count` examples of at most `bin_length` tokens: a pure function of all but `workers` (default: all cores).

    Raises:
        ValueError: an unknown bin length.
        FileNotFoundError: no tokenizer in the directory.
    """
    if bin_length not in LENGTHS:
        raise ValueError(f"{bin_length=} is unknown: give one of {', '.join(map(str, LENGTHS))}")
    path = Path(tokenizer_directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: make it with python -m benchmarks.small_model.vocabulary")
    mixture = mixture or default_mixture(bin_length)
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    jobs = [(f"pool {seed} {bin_length} {index}", size) for index, size in enumerate(sizes)]
    chunk = functools.partial(_chunk, bin_length, str(path), mixture)
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers <= 1:
        chunks = [chunk(job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            chunks = pool.map(chunk, jobs, chunksize=1)
    return Pool(
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        prompt_length=np.concatenate([chunk.prompt_length for chunk in chunks]),
        length=np.concatenate([chunk.length for chunk in chunks]),
    )


@functools.lru_cache(maxsize=4)
def _tools(path: str, mixture: Mixture) -> tuple[Tokenizer, Writer]:
    """What a process needs, made once in it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Tokenizer.from_file(path), Writer(mixture)


def _chunk(bin_length: int, path: str, mixture: Mixture, job: tuple[str, int]) -> Pool:
    tokenizer, writer = _tools(path, mixture)
    seed, size = job
    random, eos = Random(seed), tokenizer.token_to_id(EOS)
    tokens = np.full((size, bin_length), eos, np.uint16)
    prompt_length, length = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
    low, high = LENGTHS[bin_length]
    filled = 0
    while filled < size:
        examples = []
        for _ in range(min(256, size - filled)):
            examples.append(writer.example(random, int(low + random.random() * (high - low)) if low else 0))
        texts = [text for example in examples for text in (example.prompt, example.answer)]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        for prompt, answer in zip(encoded[::2], encoded[1::2], strict=True):
            total = len(prompt) + len(answer) + 1
            if total <= bin_length:
                tokens[filled, : total - 1] = prompt + answer
                prompt_length[filled], length[filled] = len(prompt), total
                filled += 1
    return Pool(tokens=tokens, prompt_length=prompt_length, length=length)


def main() -> None:
    """Builds a pool and prints its throughput and lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="the tokenizer's directory")
    parser.add_argument("--bin-length", type=int, default=256, choices=LENGTHS)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    start = time.perf_counter()
    pool = build(arguments.bin_length, arguments.count, arguments.seed, arguments.tokenizer, workers=arguments.workers)
    seconds = time.perf_counter() - start
    answer = pool.length.astype(int) - pool.prompt_length
    print(
        f"{arguments.count / seconds:.0f} examples/s with {arguments.workers} processes; "
        f"prompt {pool.prompt_length.mean():.0f} tokens, answer {answer.mean():.0f}, both "
        f"{np.percentile(pool.length, [5, 50, 95])}"
    )


if __name__ == "__main__":
    main()
