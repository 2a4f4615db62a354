"""The ladder: attention kernels from one thread a row to the fastest on the chip, one file and one change a rung.

rungs      which rungs there are, what each can run on, and calling them
test       every rung against float64:   python -m task4.ladder.test
__main__   build, check and time them:   python -m task4.ladder
speed      timing beside PyTorch's kernels;  table, plot: what is made of it;  counters: what bounds a rung
"""

from task4.ladder.rungs import RUNGS, Rung, fastest, ladder_attention, prepared

__all__ = ["RUNGS", "Rung", "fastest", "ladder_attention", "prepared"]
