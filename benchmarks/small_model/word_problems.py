"""Word problems of one to four arithmetic steps, from a seed.

Training and test problems are disjoint by construction: the CRC of a question decides to which split it belongs.
`python -m benchmarks.small_model.word_problems 200` prints held-out ones as the lines that `fdllm_jax.compare --tasks`
reads.
"""

import json
import sys
import zlib
from dataclasses import dataclass
from random import Random

from benchmarks.small_model import stories
from benchmarks.small_model.wording import OutOfRange, Story

SPLITS = ("train", "test")
TEST_SHARE = 16
"""One question in so many belongs to the test split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question, its worked answer whose last line is `#### gold`, and what it was made from."""

    question: str
    answer: str
    gold: int
    steps: int
    skeleton: str


def split_of(question: str) -> str:
    """The split to which a question belongs."""
    return "test" if zlib.crc32(question.encode()) % TEST_SHARE == 0 else "train"


def make(seed: int, split: str = "train") -> Problem:
    """The problem of a seed: a pure function of `(seed, split)`."""
    if split not in SPLITS:
        raise ValueError(f"{split=} is unknown: give one of {', '.join(SPLITS)}")
    return draw(Random(f"word problem {split} {seed}"), split)


def draw(random: Random, split: str = "train") -> Problem:
    """A problem of a split, drawn with `random`."""
    while True:
        steps = 1 + int(random.random() * 4)
        skeleton = stories.ALL[int(random.random() * len(stories.ALL))]
        story = Story(random, steps)
        try:
            skeleton(story)
        except OutOfRange:
            continue
        question = story.question()
        if split_of(question) == split:
            name = skeleton.__name__
            return Problem(question=question, answer=story.answer(), gold=story.value, steps=steps, skeleton=name)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        problem = make(seed, split="test")
        print(json.dumps({"question": problem.question, "answer": f"#### {problem.gold}"}))
