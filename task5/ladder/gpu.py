"""What a launch has to know of its GPU, and the scratch that it gets there."""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

ON_CPU = 6  # blocks where there is no GPU: enough to share a pair


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for sm_90a run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def sms_of(device: torch.device) -> int:
    """How many blocks are at work at once, one on each SM."""
    if device.type == "cpu":
        return ON_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Workspace(NamedTuple):
    capture: int  # of which it is; 0: outside of one
    floats: Tensor
    counters: Tensor


_workspaces: dict[tuple[torch.device, int], _Workspace] = {}


def workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Scratch of at least so many floats, and so many int32 counters that are 0 when the stream's next launch begins.

    A launch leaves the counters so. A CUDA graph that is captured gets its own, and zeroes them before the first call
    on a stream: it may be replayed beside others, on any stream, and before or after them.

    Returns:
        float32 ``(floats or more,)`` and int32 ``(counters or more,)``, of the device's current stream.

    Raises:
        RuntimeError: the driver does not say whether the stream is being captured.
    """

    def new() -> tuple[Tensor, Tensor]:
        return torch.empty(floats, device=device), torch.zeros(
            counters, dtype=torch.int32, device=device
        )

    if device.type == "cpu":
        return new()  # because a launch that fails there does not end the process
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    capture = _capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    known = _workspaces.get((device, stream))
    if (
        known is None
        or known.capture != capture
        or known.floats.numel() < floats
        or known.counters.numel() < counters
    ):
        known = _workspaces[device, stream] = _Workspace(capture, *new())
    return known.floats, known.counters


def _capture_of(stream: int) -> int:
    """The number of the capture that a stream takes part in, which no other one has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _capture_info()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 failed with status {error}")
    return number.value


@functools.cache
def _capture_info() -> ctypes._CFuncPtr:
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    function.argtypes = [ctypes.c_void_p] * 6
    return function
