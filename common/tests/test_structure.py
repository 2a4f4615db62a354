"""The imports of the repository: no cycle, and no student's file or shared module needs what only checks need.

Read from the source, so that imports inside functions count; those under TYPE_CHECKING are never executed and do not.
"""

import ast
import textwrap
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from common.paths import ROOT

# What checks, times, records and grades, and who may import it: these themselves, the ladder, the tasks'
# tests and times of task 7's loop.
CHECKERS = ("common.check", "common.timing", "common.record")
MAY_CHECK = (
    *CHECKERS,
    "common.grade",
    "common.regions",
    "common.report",
    "common.staff",
    "common.tests",
)

Graph = dict[str, dict[str, int]]  # by module: what it imports, and in which line


def import_graph(root: Path) -> Graph:
    """The imports among the modules of ``common/`` and ``task*/``.

    An import of ``a.b.c`` executes ``a/__init__.py`` and ``a/b/__init__.py`` first. They are edges too, except
    the packages that contain the importing module: these have begun by then.
    """
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for pattern in ("common/**/*.py", "task*/**/*.py")
        for path in root.glob(pattern)
    }
    graph: Graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = edges = {}
        for target, line in _imports(ast.parse(path.read_text(encoding="utf-8")), package):
            parts = target.split(".")
            for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
                if name in paths and name != module and not f"{module}.".startswith(f"{name}."):
                    edges.setdefault(name, line)
    return graph


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """What is imported, with its line. ``from a import b`` gives a.b, which may be no module: then a alone counts."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        children: list[ast.AST] = list(tree.orelse)
    else:
        children = list(ast.iter_child_nodes(tree))
    if isinstance(tree, ast.Import):
        for alias in tree.names:
            yield alias.name, tree.lineno
    elif isinstance(tree, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - tree.level + 1] if tree.level else []
        base = ".".join([*above, *([tree.module] if tree.module else [])])
        for alias in tree.names:
            yield f"{base}.{alias.name}", tree.lineno
    for child in children:
        yield from _imports(child, package)


def find_cycle(graph: Graph) -> str | None:
    """``a imports b (line 3), b imports a (line 7)``; None if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        names = error.args[1][::-1]  # it lists the imported one first
        steps = zip(names, names[1:], strict=False)
        return ", ".join(f"{a} imports {b} (line {graph[a][b]})" for a, b in steps)
    return None


def path_to(graph: Graph, start: str, forbidden: tuple[str, ...]) -> str | None:
    """``a imports b imports common.check``, if that is where imports lead; None otherwise."""
    todo, seen = [[start]], {start}
    while todo:
        path = todo.pop(0)
        for name in graph[path[-1]]:
            if _is_in(name, forbidden):
                return " imports ".join([*path, name])
            if name not in seen:
                seen.add(name)
                todo.append([*path, name])
    return None


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def free_of_checks(graph: Graph) -> list[str]:
    """The modules that must do without: a task's own files, and the rest of common."""
    tasks = [m for m in graph if m.startswith("task") and m.count(".") == 1]
    tasks = [m for m in tasks if not m.endswith((".test", ".ladder", ".speed"))]
    return tasks + [m for m in graph if m.startswith("common") and not _is_in(m, MAY_CHECK)]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(ROOT)


def test_no_module_imports_itself_in_a_circle(graph: Graph) -> None:
    assert "common.check.suite" in graph and "task4.ladder" in graph
    assert find_cycle(graph) is None


def test_answers_and_shared_modules_do_without_the_checker(graph: Graph) -> None:
    free = free_of_checks(graph)
    assert {"task4.attention", "task6.model", "task7.inference", "common.build.builder"} <= {*free}
    found = [path for module in free if (path := path_to(graph, module, CHECKERS))]
    assert not found, "\n".join(found)


# The checker itself --------------------------------------------------------------------------------------


def write(root: Path, **sources: str) -> Graph:
    for name, source in sources.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return import_graph(root)


def test_a_cycle_through_a_function_is_named(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        common__a="import os\nfrom common import b\n",
        common__b="def f():\n    from common.c.inner import g\n",
        common__c__inner="import common.a\n",
    )
    (tmp_path / "common/c/__init__.py").touch()
    cycle = find_cycle(graph)
    assert cycle is not None
    steps = {
        "common.a imports common.b (line 2)",
        "common.b imports common.c.inner (line 2)",
        "common.c.inner imports common.a (line 1)",
    }
    assert set(cycle.split(", ")) == steps


def test_a_package_is_executed_before_its_modules(tmp_path: Path) -> None:
    (tmp_path / "common/c").mkdir(parents=True)
    (tmp_path / "common/c/__init__.py").write_text("from .inner import g\nfrom . import outer\n")
    graph = write(
        tmp_path,
        common__a="from common.c.inner import g\n",
        common__c__inner="g = 1\n",
        common__c__outer="import common.a\nfrom common.c import inner\n",
    )
    assert graph["common.c"] == {"common.c.inner": 1, "common.c.outer": 2}
    assert graph["common.c.outer"] == {"common.a": 1, "common.c.inner": 2}
    cycle = find_cycle(graph)
    assert cycle is not None and "common.a imports common.c (line 1)" in cycle


def test_what_is_only_for_types_does_not_count(tmp_path: Path) -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from common import a\n"
    graph = write(tmp_path, common__a="from common import b\n", common__b=types)
    assert find_cycle(graph) is None and graph["common.b"] == {}
    graph = write(tmp_path, common__b=types + "else:\n    from common import a\n")
    assert find_cycle(graph) is not None


def test_the_way_to_the_checker_is_named(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        common__check__suite="",
        common__layer="def f():\n    from common.check.suite import Suite\n",
        task1__attention="import common.layer\n",
        task1__test="import common.check.suite\n",
    )
    (tmp_path / "common/check/__init__.py").touch()
    assert sorted(free_of_checks(graph)) == ["common.layer", "task1.attention"]
    found = path_to(graph, "task1.attention", CHECKERS)
    assert found == "task1.attention imports common.layer imports common.check.suite"
    assert path_to(graph, "common.check.suite", CHECKERS) is None
