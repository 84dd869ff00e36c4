"""Memory of a device that programs may use, and that the runtime of GPUs keeps beside it."""

import os

from xlashard.errors import ArgumentError
from xlashard.gpu.gpu_models import ALLOCATOR_FRACTION, GpuModel
from xlashard.hardware.chip import Chip
from xlashard.hlo.hlo_program import HloProgram
from xlashard.preflights.report.preflight_model import RuntimeMemory

_CONTEXT_BYTES = 1343 * 2**20
_CONTEXT_SOURCE = (
    "https://huggingface.co/docs/transformers/model_memory_anatomy: 1343 MB after the first array"
)

_CONNECTION_BYTES = 2**22 + 2**19 + 8 * 8 * 120 * 640
_CHANNELS = 24
_NCCL_SOURCE = (
    "https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/include/device.h: a buffer per protocol "
    "(Simple 4 MiB, LL 0.5 MiB, LL128 4.7 MiB), channel and communicator; 24 channels, as NCCL "
    "reports on 8 GPUs joined by NVLink"
)

_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def runtime_memory(module: HloProgram) -> tuple[RuntimeMemory, ...]:
    """Return the memory of a device that the runtime keeps beside the allocator.

    NCCL has a communicator for each group of devices that communicate.

    Args:
        module: The compiled module.
    """
    found = [RuntimeMemory("CUDA context", _CONTEXT_BYTES, _CONTEXT_SOURCE)]
    groups = {collective.groups for collective in module.collectives}
    if groups:
        nbytes = len(groups) * _CHANNELS * _CONNECTION_BYTES
        found.append(RuntimeMemory("NCCL buffers", nbytes, _NCCL_SOURCE))
    return tuple(found)


def available_bytes(chip: Chip) -> int:
    """Return the bytes of a device that a program may use.

    Those of a TPU are what its compiler makes available; those of a GPU what JAX's allocator takes:
    the share of the environment variable `XLA_PYTHON_CLIENT_MEM_FRACTION` or
    `XLA_CLIENT_MEM_FRACTION`, by default 75 %, with or without preallocation.

    Args:
        chip: Figures of the chip.

    Raises:
        ArgumentError: If the variable is no number from 0 to 1.
    """
    if not isinstance(chip, GpuModel):
        return chip.available_bytes
    text = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), "")
    try:
        fraction = float(text or ALLOCATOR_FRACTION)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction <= 1:
        raise ArgumentError(  # no-catalogue: needs an environment variable
            f"{_FRACTIONS[0]}={text!r} is invalid: expected a share of the memory, such as 0.9"
        )
    return int(fraction * chip.hbm_bytes)
