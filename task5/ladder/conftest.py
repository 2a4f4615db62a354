"""A record of its own for each test that writes one."""

import pytest

from task5.ladder import plot, record, table


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
