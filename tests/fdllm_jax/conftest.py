"""The engine promotes no dtype silently (the optimisers of the training code do)."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtype_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
