"""Compiles the kernels that this task runs on, those of tasks 4 and 5: python -m task7.compile."""

from common.build import compile_main

if __name__ == "__main__":
    compile_main(__file__, "../task4/attention_kernel.cu", "../task5/attention_kernel.cu")
