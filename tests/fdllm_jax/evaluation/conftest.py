"""Whether generated code can be run here."""

import pytest

from fdllm_jax.evaluation import sandbox


@pytest.fixture(scope="session")
def layers() -> str:
    """What confines code on this system; its tests are skipped where nothing does."""
    try:
        return sandbox.isolation()
    except ValueError as error:
        pytest.skip(str(error))
