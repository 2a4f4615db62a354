"""What an answer may not reach for: a look at its text, before anything of it runs.

A result can be right and still not be the student's: computed in a thread that nothing watches, or by Python code that
a kernel calls. No answer needs what that takes. This is no wall, which the sandbox is; it is a line that a person can
read, where otherwise the points would have been earned.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from common import regions
from common.cuda_on_cpu.rewriter import GpuOnlyRegions, Token, tokens_of
from common.regions import Region

LARGEST = 500_000  # bytes of the answers in a file

_MODULES = {
    "torch", "math", "typing", "functools", "itertools", "collections",
    "common.build", "common.dtypes", "common.inputs", "common.layer",
    *(f"task{n}" for n in range(1, 8)),
}  # fmt: skip
_BUILTINS = {
    "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals", "locals", "open", "setattr", "vars",
}  # fmt: skip
# Ways to the system, to files and other threads, around what watches PyTorch, and to the tests' own attention.
_MEMBERS = {
    "builder", "builtins", "ctypes", "gc", "get_type_hints", "importlib", "inspect", "library", "multiprocessing",
    "observing", "os", "planner", "subprocess", "sys", "test", "threading", "using",
    "autograd", "classes", "compile", "data_ptr", "distributed", "export", "from_dlpack", "from_file", "from_numpy",
    "futures", "fx", "hub", "jit", "load", "numpy", "onnx", "ops", "overrides", "package", "parallel", "profiler",
    "save", "serialization", "storage", "testing", "tolist", "untyped_storage", "utils",
}  # fmt: skip
_DIRECTIVES = {"define", "undef", "pragma", "if", "ifdef", "ifndef", "elif", "else", "endif"}
_C_WORDS = {
    "__asm", "__asm__", "__attribute", "__attribute__", "_Exit", "_exit", "abort", "asm", "atexit", "dlopen", "dlsym",
    "execve", "exit", "fopen", "fork", "getenv", "mmap", "mprotect", "popen", "pthread_create", "quick_exit",
    "syscall", "system",
}  # fmt: skip
NO_PLACE = "has no place in an answer"


def refused(file: str, filled: str, own: Sequence[Region]) -> str | None:
    """Why these answers are not run, with the line in the student's file; None if they may be.

    Args:
        file: its path in a checkout, which the sentence begins with.
        filled: the course's text with the answers in it: what would be run.
        own: the regions of the student's file.
    """
    size = sum(len(region.lines.encode()) for region in own)
    if size > LARGEST:
        return f"{file}: its answers have {size:,} bytes; at most {LARGEST:,} are read"
    begins = {region.function: region.begin for region in own}
    found = regions.regions(filled, file)
    for line, why, anywhere in _python(filled) if file.endswith(".py") else _cuda(found):
        # An error of syntax may show only behind the answer that has made it.
        around = [r for r in found if r.begin <= line] or found[:1]
        region = around[-1]
        if anywhere or region.begin < line < region.end:
            line = min(max(line, region.begin), region.end)
            return f"{file}:{line + begins[region.function] - region.begin}: {why}"
    return None


def _python(text: str) -> Iterator[tuple[int, str, bool]]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno or 0, f"{type(error).__name__}: {error.msg}", True
        return
    except (ValueError, MemoryError, RecursionError) as error:
        yield 0, f"Python cannot read it: {str(error) or type(error).__name__}", True
        return
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if why := _why_not(node):
            yield node.lineno, why, False


def _why_not(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            modules = [f"{'.' * node.level}{module or ''}.{alias.name}" for alias in names]
        case ast.Name(id=name):
            return f"{name} {NO_PLACE}" if name in _BUILTINS or name.startswith("__") else ""
        case ast.Attribute(attr=name, value=value):
            own = isinstance(value, ast.Name) and value.id == "self"
            if name in _MEMBERS or name.startswith("__") or (_is_private(name) and not own):
                return f".{name} {NO_PLACE}"
            changes = not isinstance(node.ctx, ast.Load) and not own
            return f"an answer changes no other object; it sets .{name}" if changes else ""
        case _:
            return ""
    return next((f"import of {name} {NO_PLACE}" for name in modules if not _may_import(name)), "")


def _may_import(name: str) -> bool:
    known = any(f"{name}.".startswith(f"{module}.") for module in _MODULES)
    parts = name.split(".")[1:]
    return known and _MEMBERS.isdisjoint(parts) and not any(map(_is_private, parts))


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "_"


def _cuda(found: Sequence[Region]) -> Iterator[tuple[int, str, bool]]:
    for region in found:
        for line, why in _kernel(region):
            yield region.begin + line, why, True


def _kernel(region: Region) -> Iterator[tuple[int, str]]:
    """What leaves the function, or calls the system: line and reason."""
    depth = 0
    levels: list[int] = []  # of the braces, at each #if
    only_gpu = GpuOnlyRegions()
    last = Token("space", "", 0)
    for token in tokens_of(region.lines):
        if token.kind == "directive":
            only_gpu.see(token.text)
            yield from ((token.line, why) for why in _directive(token.text, levels, depth))
        elif token.kind == "word" and token.text in _C_WORDS and not only_gpu.inside:
            yield token.line, f"{token.text} {NO_PLACE}"
        elif token.kind == "other":
            if last.kind == "other" and last.text + token.text in ("/*", "<%", "%>"):
                yield token.line, f"{last.text}{token.text} {NO_PLACE}"
            if token.text in ('"', "'", "\\"):
                yield token.line, f"a {token.text} without its end"
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if depth < 0:
                yield token.line, "a } without its {: an answer stays inside of its function"
                return
        last = token
    if depth or levels:
        yield region.end - region.begin, f"{'a {' if depth else 'an #if'} without its end"


def _directive(text: str, levels: list[int], depth: int) -> Iterator[str]:
    """What is wrong with a line that begins with #; ``levels`` follows it."""
    word = (re.match(r"\s*#\s*(\w*)", text) or [""])[1]
    if word not in _DIRECTIVES:
        yield f"#{word} {NO_PLACE}"
    if word == "define" and (bad := re.search(r"[{}]|##|<%|%>|#\s*define\s+__\w*", text)):
        yield f"{bad[0]!r} {NO_PLACE}"
    if word == "define" and (words := _C_WORDS.intersection(re.findall(r"\w+", text))):
        yield f"{min(words)} {NO_PLACE}"
    if word.startswith("if"):
        levels.append(depth)
    elif word in ("elif", "else", "endif"):
        if not levels or levels[-1] != depth:
            yield f"braces that do not pair up before #{word}"
        if word == "endif" and levels:
            levels.pop()
