"""The material of a written report on the kernels, measured and counted here: ``python -m common.report``.

shapes    FLOPs, bytes and arithmetic intensity of each kernel, as formulas of the shapes
gpu       times of the kernels of tasks 2, 4 and 5, and what Nsight Compute counts in them
roof      what a machine reaches, and where a measured kernel is below that
picture   the roofline as a PNG
page      the Markdown, with places for a student's answers
"""
