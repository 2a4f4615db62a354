"""Compiles this task's kernels: python -m task4.compile [--verbose] [--device cpu|cuda] [--arch sm_90a ...]."""

from common.build import compile_main

if __name__ == "__main__":
    compile_main(__file__, "attention_kernel.cu")
