"""Sends what the CPU has prepared to a device, without waiting for what the device still computes."""

from __future__ import annotations

from typing import Any

import torch


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of `values` (numbers in lists) on the device.

    From memory that can be paged out, a copy would wait until the device has computed all that it was given before.
    """
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the CPU's `tensor` on the device, or the tensor itself if the device is the CPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
