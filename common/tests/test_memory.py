"""Free memory of the CPU: the machine's, or what a container or a job may still take."""

import sys

import pytest

from common import memory
from common.memory import free_memory

GROUP = {2: ("memory.max", "memory.current", "inactive_file"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limits", "free"), [(("max", 900), 400), ((700, 5000), 200), (("max", "max"), None)])  # fmt: skip
def test_the_limit_of_a_group_counts(monkeypatch, tmp_path, version, limits, free):
    """Of a job's group and the one above it, each with 600 bytes in use, of which 100 are a cache of files."""
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    for folder, limit in zip((root / "job", root / "job" / "step"), limits, strict=True):
        folder.mkdir(parents=True)
        limit_file, used_file, cache = GROUP[version]
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / used_file).write_text("600\n")
        (folder / "memory.stat").write_text(f"anon 1\n{cache} 100\n")
    own = tmp_path / "own"
    own.write_text(f"9:cpu:/job\n{'4:memory' if version == 1 else '0:'}:/job/step\n")
    whole = free_memory("cpu")[0]
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    found = free_memory("cpu")[0]
    assert found == free if free else found > whole // 2


def test_without_groups_it_is_the_machines(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "none")
    free, total = free_memory("cpu")
    assert 0 < free <= total
