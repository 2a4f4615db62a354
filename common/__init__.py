"""What the seven tasks share: building kernels, running them without a GPU, checking, timing.

Imported before torch (each task's __init__.py sees to it) for one setting: PyTorch's CPU threads go to sleep after an
operation instead of spinning for the next one. The blocks of a kernel that runs on the CPU need those cores: on a
laptop's two, spinning makes the tests many times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
