"""Attention in one Python file: the kernels are strings, ``_CUDA_SRC`` and ``_CPP_SRC``.

three_kernels   scores, softmax and product, each a kernel of its own
fused           the same as one kernel, by the online softmax

``python -m task4.frontends.one_file`` checks, times and profiles them.
"""
