"""Whether two answers in LaTeX mean the same, by SymPy and math-verify.

Parsing what a model wrote can take any time and memory: `minerva` runs this file in the sandbox, as it is.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 5  # for one comparison, as in the harness


def compare(solution: str, text: str, gold: str, answer: str) -> list[bool]:
    """Whether the normalised answer equals the gold one, and whether the text's answer is the solution's."""
    return [same(answer, gold), verified(solution, text)]


def same(answer: str, gold: str) -> bool:
    """Whether answers are equal as strings, or the difference of what SymPy reads in them is simplified to 0."""
    if answer and answer == gold:
        return True
    try:
        with _at_most(SECONDS):
            import sympy
            from sympy.parsing.latex import parse_latex

            difference: Any = parse_latex(answer)
            difference -= parse_latex(gold)
            return bool(sympy.simplify(difference) == 0)
    except Exception:  # whatever SymPy makes of a text that is no mathematics
        return False


def verified(solution: str, text: str) -> bool:
    """Whether math-verify finds the solution's answer in the text."""
    from math_verify import parse, verify

    return bool(verify(gold=parse(solution), target=parse(text)))


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
