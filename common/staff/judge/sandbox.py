"""What a student's process may do: no network, no other process, and of the disk only a copy of its own folder.

Linux's namespaces do that, by ``unshare`` and ``mount`` of util-linux, without root. Where the system forbids them, the
limits on memory, processes and files remain, and :func:`missing` says what is not held back.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
LIMITS = {
    "data": 8 * GIB,  # bytes of memory of its own
    "nproc": 512,  # processes and threads
    "fsize": 4 * GIB,  # bytes of a file; an answer is one
    "cpu": 3600,  # seconds
    "core": 0,
}
DISK = "1g"  # for its folder, and for /tmp: in memory, gone with the process

# sh -c SCRIPT sh FOLDER ENVIRONMENT PYTHON HIDDEN... : hide folders, make the rest read-only, go to a copy of FOLDER.
# ENVIRONMENT and PYTHON, on which it is based, may lie in a hidden folder.
_SCRIPT = f"""
set -e
folder=$1 environment=$2 python=$3; shift 3
mount -t tmpfs -o size={DISK} tmpfs /mnt
mkdir /mnt/folder /mnt/environment /mnt/python
cp -r "$folder/." /mnt/folder
mount --rbind "$environment" /mnt/environment
mount --rbind "$python" /mnt/python
while [ "$1" != -- ]; do mount -t tmpfs -o size=1m tmpfs "$1"; shift; done; shift
mount -t tmpfs -o size={DISK} tmpfs /tmp
mount -t tmpfs -o size={DISK} tmpfs /dev/shm
mkdir -p "$folder" "$environment" "$python"
mount --rbind /mnt/environment "$environment"
mount --rbind /mnt/python "$python"
mount --rbind /mnt/folder "$folder"
for device in /dev/nvidia*; do if [ -c "$device" ]; then mount --bind /dev/null "$device"; fi; done
mount -o remount,bind,ro / 2>/dev/null || true
cd "$folder"
exec "$@"
"""


def command(folder: Path, hidden: Sequence[Path] = ()) -> list[str]:
    """What is put before a command so that it runs in the sandbox, in ``folder``.

    Args:
        folder: what it gets a copy of, at the same path.
        hidden: folders that are empty for it.
    """
    limits = [shutil.which("prlimit") or "", *(f"--{name}={n}" for name, n in LIMITS.items())]
    before = limits if limits[0] else []
    if not _namespaces():
        return before
    kept = [str(folder), sys.prefix, sys.base_prefix]
    script = ["sh", "-c", _SCRIPT, "sh", *kept, *map(str, hidden), "--"]
    return [*_UNSHARE, *script, *before]


_UNSHARE = [
    "unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child",
    "--mount", "--mount-proc",
]  # fmt: skip


@functools.cache
def _namespaces() -> bool:
    """Whether this system allows them."""
    try:
        mount = ["sh", "-c", "mount -t tmpfs tmpfs /mnt"]
        done = subprocess.run([*_UNSHARE, *mount], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def missing() -> list[str]:
    """What is not held back on this system, in a sentence each."""
    said = []
    if not _namespaces():
        said.append(
            "submissions can use the network and read this account's files: this system allows no namespaces"
            " (unshare --user --net --mount)"
        )
    if not shutil.which("prlimit"):
        said.append("submissions have no limits on memory and processes: there is no prlimit")
    if os.geteuid() == 0 and not _namespaces():
        said.append("submissions run as root: grade as another user")
    return said
