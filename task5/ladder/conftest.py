"""What several tests need: an H200 that plans may ask, and a record of its own."""

from types import SimpleNamespace

import pytest
import torch

from task5.ladder import plot, record, table
from task5.ladder.kernels import IN_16_BITS, OF_EIGHT_WARPS, Call
from task5.ladder.plan import plan


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """table.json, README.md and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    results = ("times", "bars", "uneven", "prefill", "steps")
    for name, parts in {"README.md": ("table", "choices"), "RESULTS.md": results}.items():
        marks = (f"<!-- ladder: {s} -->\n<!-- end: {s} -->\n" for s in parts)
        (tmp_path / name).write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path


@pytest.fixture
def h200(monkeypatch):
    """What a plan asks of a GPU, answered as by an H200."""
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
    room, of_eight_warps = (
        {1: 396, 2: 198, 4: 92, 8: 45, 16: 21},
        {1: 132, 2: 66, 4: 30, 8: 15, 16: 7},
    )

    def query(self, rung, name, blocks=None, tiles=None):
        alone = rung in OF_EIGHT_WARPS or self.head_dim == 256  # a block on its SM
        fit = (of_eight_warps if alone else room).get(blocks)
        most = 32 if rung in IN_16_BITS else 16
        few = self.rows <= 8 and rung not in IN_16_BITS[1:]
        answers = {"rows_of_a_pair": 8 if few else most, "keys_of_a_tile": 64}
        answers |= {"shared_memory_bytes": 80 * 1024, "clusters_at_once": fit}
        return answers[name]

    monkeypatch.setattr(Call, "query", query)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    plan.cache_clear()
    yield lambda rows=4, head_dim=128, dtype=0: Call(
        torch.device("cuda", 0), dtype, head_dim, rows, gpu.multi_processor_count, hopper=True
    )
    plan.cache_clear()
