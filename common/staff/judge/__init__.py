"""A student's code in a process of its own, and the checks in another one.

transfer   tensors between the two
worker     the process that runs the student's code: it gets inputs and gives outputs
remote     what stands in for the student's functions and kernels where the checks run

The process that checks holds the truth, the verdict and the seeds. It imports nothing that a student wrote.
"""
