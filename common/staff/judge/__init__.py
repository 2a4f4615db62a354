"""A student's code in a process of its own, and the checks in another one.

transfer     tensors between the two
sandbox      what the student's process may do
forkserver   starts workers, in the sandbox
worker       the process that runs the student's code: it gets inputs and gives outputs
remote       what stands in for the student's functions and kernels where the checks run
check        the command that runs the checks

The process that checks holds the truth, the verdict and the seeds. It imports nothing that a student wrote.
"""

STAGE_SECONDS = 900  # then a stage counts as hung
