"""The run-time type checker of the tests."""

from collections.abc import Callable

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception


def checked(function: Callable) -> Callable:
    """The function under beartype, which reads `Self` only where it decorates a whole class: such a method is left."""
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function
