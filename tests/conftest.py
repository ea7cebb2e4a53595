"""What all tests share: strict JAX settings, shape annotations checked at run time, and the choice of kernels."""

import os

# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The tests compile hundreds of small programs once each: on a GPU the timing of candidates for every matmul, on a CPU
# the compiler's expensive passes would take most of the run.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_gpu_autotune_level=0"
    if os.path.exists("/dev/nvidia0")
    else " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import hypothesis
import jax
import jaxtyping
import pytest

from tests.typecheck import checked

# A busy machine is slow, and a slow example is no fault.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

jax.config.update("jax_numpy_rank_promotion", "raise")
# The packages must not be imported before this hook is there.
jaxtyping.install_import_hook(["fdllm_jax", "pallas_kernels", "convert"], f"{checked.__module__}.{checked.__name__}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        default="auto",
        choices=("auto", "pallas", "xla", "interpret"),
        help="the kernels that the tests run with",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and jax.default_backend() != "gpu":
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> str:
    """The value of --kernels."""
    return request.config.getoption("--kernels")
