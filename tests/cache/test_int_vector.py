from __future__ import annotations

from array import array

import numpy as np
import pytest

from radixkv.cache.int_vector import IntVector, as_int32


def test_vector_grows_and_keeps_its_values() -> None:
    vector = IntVector()
    for i in range(100):
        vector.append(i)
    vector.extend(range(100, 300))
    assert vector.view.tolist() == list(range(300))
    assert (vector[0], vector[-1], len(vector)) == (0, 299, 300)


def test_vector_does_not_alias_its_source() -> None:
    source = np.array([1, 2], dtype=np.int32)
    vector = IntVector(source)
    source[0] = 9
    assert vector.view.tolist() == [1, 2]


def test_truncate_then_append_overwrites() -> None:
    vector = IntVector([1, 2, 3])
    vector.truncate(1)
    vector.append(7)
    assert vector.view.tolist() == [1, 7]
    with pytest.raises(IndexError):
        vector.truncate(3)


@pytest.mark.parametrize("index", [2, -3])
def test_index_out_of_range_raises(index: int) -> None:
    vector = IntVector([1, 2])
    vector.extend([3])
    vector.truncate(2)
    with pytest.raises(IndexError):
        vector[index]
    with pytest.raises(IndexError):
        vector[index] = 0


def test_to_bytes_is_little_endian() -> None:
    assert IntVector([1, 258]).to_bytes(1) == b"\x02\x01\x00\x00"


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        array("q", [1, 2, 3]),
        array("i", [1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([1, 2, 3], dtype=">i4"),
        np.array([1, 0, 2, 0, 3], dtype=np.int32)[::2],
    ],
)
def test_as_int32_takes_every_container(values: object) -> None:
    result = as_int32(values)  # type: ignore[arg-type]
    assert result.dtype == np.int32
    assert result.flags.c_contiguous
    assert result.tobytes() == np.array([1, 2, 3], dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "values", [[1.5], [True], ["1"], [[1, 2]], [2**31], [-(2**31) - 1], [2**70], [None]]
)
def test_as_int32_refuses_what_is_no_token_id(values: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids must"):
        as_int32(values)  # type: ignore[arg-type]
