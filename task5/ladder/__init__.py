"""Attention to a cache at the memory's speed: the rungs of decode beside task 5's readable kernel. See README.md."""

from task5.ladder.append import append_rope
from task5.ladder.call import decode_attention

__all__ = ["append_rope", "decode_attention"]
