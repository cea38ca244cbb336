"""What every kernel checks of its arguments before it is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["FLOAT_DTYPES", "KV_DTYPES", "check_tensor"]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KV_DTYPES = (*FLOAT_DTYPES, torch.int8, torch.float8_e4m3fn)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    has_unit_stride: bool = False,
) -> None:
    """Check one argument; None in a shape stands for any size.

    Args:
        name: of the argument, for the message.
        tensor: the argument.
        shape: expected sizes.
        dtypes: accepted dtypes.
        device: expected device.
        has_unit_stride: whether the last dimension must be contiguous.

    Raises:
        ValueError: something differs; the message has the name, what is expected and what is there.
    """
    if shape is not None:
        actual = tuple(tensor.shape)
        if len(actual) != len(shape) or any(
            want is not None and want != have for want, have in zip(shape, actual, strict=True)
        ):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{name} must have shape [{expected}], got {list(actual)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {accepted}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if has_unit_stride and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
