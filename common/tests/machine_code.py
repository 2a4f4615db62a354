"""What ptxas made of a kernel: SASS, by cuobjdump and nvdisasm, and two forms of it that are wrong.

ptxas of CUDA 13.0 writes both (task5/ladder/NOTES.md). A kernel that has one fails on a GPU alone, and seldom.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LEAST = 6  # cycles from CS2R to the first reader of what it writes, as ptxas itself leaves them elsewhere

_FUNCTION = re.compile(r"\.text\.(\S+):")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;\s*/\*\s*0x")
_SECOND_WORD = re.compile(r"\s+/\*\s*0x([0-9a-f]+)\s*\*/")
_NULL = re.compile(r"CS2R R(\d+), SRZ")
_PARTS = re.compile(r"(@\S+ +)?(\w+)(\S*)\s*(.*)")  # guard, name, modifiers, operands
_REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.64)?")
_COPY = re.compile(r"LDGSTS\S* \[[^]]*\bUR\d+[^]]*\], desc\[UR")
_JUMPS = ("BRA", "BRX", "CALL", "EXIT", "RET")


class Instruction(NamedTuple):
    address: int
    text: str
    cycles: int  # until the next one of the warp is issued, at least

    @property
    def parts(self) -> tuple[str | None, str, str, list[str]]:
        """Its guard, a predicate without which it always runs; its name; the name's modifiers; the operands."""
        guard, name, modifiers, operands = _PARTS.match(self.text).groups()
        return guard, name, modifiers, operands.split(",")


Code = Sequence[Instruction | None]  # None: something may jump here


@functools.cache
def tool(name: str) -> str | None:
    """Where cuobjdump or nvdisasm is: on PATH, or in the folder that Triton brings."""
    found = importlib.util.find_spec("triton")
    folders = found.submodule_search_locations if found else None
    of_triton = [Path(f) / "backends/nvidia/bin" / name for f in folders or ()]
    return shutil.which(name) or next((str(p) for p in of_triton if p.is_file()), None)


def disassembled(library: Path) -> Iterator[tuple[str, Code]]:
    """The kernels of a library for one architecture, by name."""
    with tempfile.TemporaryDirectory() as folder:
        extract = [tool("cuobjdump"), "-xelf", "all", str(library.resolve())]
        subprocess.run(extract, cwd=folder, check=True, capture_output=True)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            command = [tool("nvdisasm"), "-hex", str(cubin)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                yield from functions(process.stdout)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)


def functions(lines: Iterable[str]) -> Iterator[tuple[str, Code]]:
    """The functions of ``nvdisasm -hex``, whose instructions have two words, each on a line of its own."""
    name, code, pending = None, [], None
    for line in lines:
        if found := _FUNCTION.match(line):
            if name:
                yield name, code
            name, code = found[1], []
        elif line.startswith(".L"):
            code.append(None)
        elif found := _INSTRUCTION.match(line):
            pending = int(found[1], 16), found[2]
        elif pending and (found := _SECOND_WORD.match(line)):
            code.append(Instruction(*pending, int(found[1], 16) >> 41 & 15))
            pending = None
    if name:
        yield name, code


def wrong(code: Code) -> list[str]:
    """The instructions of a function that ptxas has got wrong, each with why."""
    found = []
    for i, instruction in enumerate(code):
        if instruction is None:
            continue
        if _COPY.search(instruction.text):
            found.append(f"{_shown(instruction)}: the address is in the copy's policy")
        if null := _NULL.search(instruction.text):
            reader = _read_too_early(code[i:], int(null[1]))
            if reader:
                found.append(
                    f"{_shown(reader)}: less than {LEAST} cycles after {_shown(instruction)}"
                )
    return found


def _read_too_early(code: Code, register: int) -> Instruction | None:
    """What reads this register or the next one too soon after ``code[0]`` has written both."""
    written, cycles = {register, register + 1}, code[0].cycles
    for instruction in code[1:]:
        if instruction is None or cycles >= LEAST:
            break
        guard, name, *_ = instruction.parts
        if name in _JUMPS:
            break
        writes, reads = _registers(instruction)
        if reads & written:
            return instruction
        if not guard:
            written -= writes
        cycles += instruction.cycles
    return None


def _registers(instruction: Instruction) -> tuple[set[int], set[int]]:
    """What it writes, of a first operand that is a register, and what it reads. ``.64`` and WIDE are of two."""
    _, name, modifiers, (first, *others) = instruction.parts
    wide = ".WIDE" in modifiers or name == "CS2R"
    writes = set()
    if found := re.fullmatch(r"R(\d+)", first):
        writes = {int(found[1]), int(found[1]) + wide}
    else:
        others.append(first)
    reads = set()
    for operand in others:
        for number, of_two in _REGISTER.findall(operand):
            reads |= {int(number), int(number) + bool(of_two)}
    return writes, reads


def _shown(instruction: Instruction) -> str:
    return f"{instruction.address:#x} {instruction.text}"
