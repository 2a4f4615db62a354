"""A student's kernels with the host code of the course: of their .cu, only what runs on the GPU is taken over.

What stands between the marks may close a brace and define a constructor, which would run as soon as the library is
loaded. So nothing of their host code is: nvcc makes device code of their file, without running anything of it, and that
replaces the device code in the object file of ours. The launchers find the kernels by name.
"""

import dataclasses
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.build import BuildError, builder, planner
from common.build.planner import OBJECT, OUT, Target
from common.paths import ROOT

SECONDS = 300.0  # for nvcc; templates may be endless
LARGEST = 64 << 20  # bytes of device code


def compiled(source: Path, arch: str) -> bytes:
    """What nvcc makes of a source for the GPU alone, as it stands in an object file.

    Raises:
        BuildError: it does not compile, or takes too long.
    """
    target = planner.plan(source, "cuda", arch=arch)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "device.fatbin"
        command = [str(out) if word == OUT else word for word in _with(target, "-fatbin")]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{planner.display(source)}: nvcc did not end in {SECONDS:g} s"
            ) from None
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace")
            raise BuildError(builder.readable(said))
        return out.read_bytes()


def plan(source: Path, arch: str, code: Path) -> Target:
    """The library of a source of ours with other device code: a file that :func:`compiled` gave the bytes of.

    It is built beside that file.
    """
    target = planner.plan(source, "cuda", arch=arch)
    host = target.path.with_name(f"host-{target.path.stem}.o")
    ours = dataclasses.replace(target, commands=(tuple(_with(target, "-c")),), path=host)
    objcopy = shutil.which("objcopy") or "objcopy"
    section = f".nv_fatbin={code}"
    link = (OBJECT if word == planner.display(source) else word for word in target.commands[0])
    commands = (
        (objcopy, "--update-section", section, planner.display(host), OBJECT),
        tuple(link),
    )
    return dataclasses.replace(
        target, commands=commands, path=code.with_suffix(".so"), needs=(ours,)
    )


def _with(target: Target, way: str) -> list[str]:
    """The command that makes something else than a shared library."""
    return [way if word == "-shared" else word for word in target.commands[0]]
