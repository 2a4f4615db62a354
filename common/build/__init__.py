"""Compiling the tasks' .cu files, and calling the launchers in them on torch tensors.

toolchain  which compilers there are, which GPU, and what each can do
planner    what a library is made from, by which commands, and its name in .build/
builder    makes the libraries that are missing there
signature  what the functions of a .cu take, and how a tensor is passed
call       from keywords to a call of C;  host: C++ code that reads torch's tensors for it
interrupt  Ctrl-C while a kernel runs on the CPU
library    ``kernels.launch("name", inp=tensor, n=3)``
cli        ``python -m taskN.compile`` and ``python -m common.build``

Importing this does not import torch, start a compiler or touch a GPU.
"""

from common.build.builder import build
from common.build.cli import compile_main
from common.build.library import (
    Arguments,
    KernelError,
    Kernels,
    dtype_code,
    observing,
    touching,
    using,
)
from common.build.signature import View
from common.build.toolchain import BuildError

__all__ = [
    "Arguments",
    "BuildError",
    "KernelError",
    "Kernels",
    "View",
    "build",
    "compile_main",
    "dtype_code",
    "observing",
    "touching",
    "using",
]
