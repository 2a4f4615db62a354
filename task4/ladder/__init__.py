"""The ladder: attention kernels from one thread per row to the fastest, one file and one change per rung.

rungs       which rungs there are, and what each can run on
call        calling them: ladder_attention;  known_calls: again, at a third of the host's time
test        every rung against float64:   python -m task4.ladder.test
__main__    build, check and time them:   python -m task4.ladder
benchmark   timing beside PyTorch's kernels and FlashAttention-3
record      what was measured, table.json;  table: README.md and RESULTS.md from it;  plot: the pictures
evidence/   accuracy beside PyTorch's kernels, the bars, and the hardware's counters
"""

from task4.ladder.call import SLOWER, ladder_attention
from task4.ladder.rungs import RUNGS, WIDEST, Rung, choose, fastest

__all__ = ["RUNGS", "SLOWER", "WIDEST", "Rung", "choose", "fastest", "ladder_attention"]
