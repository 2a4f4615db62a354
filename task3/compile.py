"""python -m task3.compile: says that there is nothing to compile; this task has no kernels."""

from common.build import compile_main

if __name__ == "__main__":
    compile_main(__file__)
