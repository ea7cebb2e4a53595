"""The checks on tensors: finite values against numpy's, and the listing of faults."""

import numpy as np
import pytest

from convert.tensors import _BLOCK, DTYPES, TensorInfo, check_finite, check_tensors, is_finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_finite_for_every_sixteen_bit_pattern(dtype: str) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    values = (patterns if DTYPES[dtype].itemsize == 2 else patterns.astype(np.uint32) << 16).view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(values)
    assert [is_finite(values[i : i + 1]) for i in range(0, 2**16, 7)] == list(expected[::7])
    assert is_finite(values[expected])
    assert not is_finite(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, _BLOCK - 1, _BLOCK, 2 * _BLOCK + 2])
def test_one_bad_value_is_found_anywhere(dtype: str, place: int) -> None:
    values = np.full((3, (2 * _BLOCK + 3) // 3), -1.5, DTYPES[dtype])
    assert is_finite(values)
    values.reshape(-1)[min(place, values.size - 1)] = -np.inf
    assert not is_finite(values)
    with pytest.raises(ValueError, match=r"some\.weight holds NaN or infinite weights"):
        check_finite("some.weight", values)


def test_all_faults_are_reported_together() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (5,), "d": (6,)}
    found = {
        "b": TensorInfo(dtype="float32", shape=(5,)),
        "c": TensorInfo(dtype="I64", shape=(5,)),
        "d": TensorInfo(dtype="bfloat16", shape=(6,)),
        "e": TensorInfo(dtype="float32", shape=(7, 8)),
    }
    with pytest.raises(ValueError) as caught:
        check_tensors("there", expected, found)
    assert str(caught.value).splitlines() == [
        "the tensors of there do not fit its config.json:",
        "  missing (1): a [2, 3]",
        "  unexpected (1): e [7, 8]",
        "  wrong shape (1): b [5] (expected [4])",
        "  dtype other than bfloat16, float16, float32 (1): c I64",
    ]


def test_long_listings_are_cut() -> None:
    with pytest.raises(ValueError, match=r"missing \(25\): t0 \[1\].* t19 \[1\] and 5 more$"):
        check_tensors("there", {f"t{i}": (1,) for i in range(25)}, {})
