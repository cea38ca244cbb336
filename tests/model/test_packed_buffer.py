import numpy as np
import pytest
import torch

from radixkv.model.packed_buffer import Field, PackedBuffer

FIELDS: dict[str, Field] = {
    "ids": ((3,), np.int64),
    "table": ((2, 5), np.int32),
    "nothing": ((0, 4), np.int32),
    "lens": ((3,), np.int32),
}


def test_all_arrays_arrive_in_one_copy(device: torch.device) -> None:
    buffer = PackedBuffer(device)
    host, on_device = buffer.carve(FIELDS)
    for index, (name, (shape, dtype)) in enumerate(FIELDS.items()):
        assert host[name].shape == shape
        assert host[name].dtype == dtype
        host[name][...] = np.arange(host[name].size).reshape(shape) + 1000 * index
    buffer.upload()
    assert buffer.num_uploads == 1
    for name, array in host.items():
        assert on_device[name].device == device
        assert np.array_equal(on_device[name].cpu().numpy(), array)
        assert on_device[name].data_ptr() % 16 == 0


def test_device_sees_nothing_before_the_upload(device: torch.device) -> None:
    buffer = PackedBuffer(device)
    host, on_device = buffer.carve({"ids": ((2,), np.int64)})
    host["ids"][:] = 7
    assert on_device["ids"].tolist() == [0, 0]
    buffer.upload()
    assert on_device["ids"].tolist() == [7, 7]


def test_equal_fields_of_a_fixed_buffer_keep_their_addresses(device: torch.device) -> None:
    buffer = PackedBuffer(device, capacity=PackedBuffer.size_of(FIELDS))
    _, first = buffer.carve(FIELDS)
    buffer.carve({"ids": ((1,), np.int64)})
    _, again = buffer.carve(FIELDS)
    assert all(first[name].data_ptr() == again[name].data_ptr() for name in FIELDS)


def test_fixed_buffer_refuses_what_does_not_fit() -> None:
    size = PackedBuffer.size_of(FIELDS)
    buffer = PackedBuffer(torch.device("cpu"), capacity=size)
    with pytest.raises(ValueError, match=f"fit into {size} bytes, got {size + 16}"):
        buffer.carve(FIELDS | {"one_more": ((1,), np.int32)})


def test_growing_buffer_keeps_working_under_inference_mode() -> None:
    buffer = PackedBuffer(torch.device("cpu"))
    with torch.inference_mode():
        buffer.carve({"ids": ((2,), np.int64)})
        buffer.upload()
    host, on_device = buffer.carve({"ids": ((1000,), np.int64)})
    host["ids"][:] = 5
    buffer.upload()
    host, on_device = buffer.carve({"ids": ((4,), np.int64)})
    host["ids"][:] = 6
    with torch.inference_mode():
        buffer.upload()
    assert on_device["ids"].tolist() == [6] * 4
