"""A record of its own for each test that writes one."""

import pytest

from task6.generation import plot, record, table


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """table.json, GRAPHS.md and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    results = ("bars", "times", "steps", "shared", "graded", "tokens")
    for name, parts in {"GRAPHS.md": ("ways", "parts"), "RESULTS.md": results}.items():
        marks = (f"<!-- ladder: {part} -->\n<!-- end: {part} -->\n" for part in parts)
        (tmp_path / name).write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path
