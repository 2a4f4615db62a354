"""What a student's process may do: no network, no other process, and of the disk only a copy of its own folder.

Linux's namespaces do that, by ``unshare``, ``mount`` and ``setpriv`` of util-linux, without root. Where the system
forbids them, the limits on memory, processes and files remain, and :func:`missing` says what is not held back.
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
# ENVIRONMENT and PYTHON, on which it is based, may lie in a hidden folder. What is bound from a read-only mount is
# read-only, too. /run has the sockets of services, which would do what they are asked outside of the sandbox; /dev has
# disks.
_SCRIPT = f"""
set -e
folder=$1 environment=$2 python=$3; shift 3
while read -r _ _ _ _ point _; do
  mount -o remount,bind,ro "$(printf %b "$point")" 2>/dev/null || :
done < /proc/self/mountinfo
mount -t tmpfs -o size={DISK} tmpfs /mnt
mkdir /mnt/folder /mnt/environment /mnt/python /mnt/dev /mnt/dev/shm
cp -r "$folder/." /mnt/folder
mount --rbind "$environment" /mnt/environment
mount --rbind "$python" /mnt/python
ln -s /proc/self/fd /mnt/dev/fd
for device in /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/nvidia*; do
  [ -c "$device" ] || continue
  : > "/mnt$device"; mount --bind "$device" "/mnt$device"
done
while [ "$1" != -- ]; do mount -t tmpfs -o size=1m tmpfs "$1"; shift; done; shift
mount -t tmpfs -o size={DISK} tmpfs /tmp
mount -t tmpfs -o size=1m tmpfs /run
mount --rbind /mnt/dev /dev
mount -t tmpfs -o size={DISK} tmpfs /dev/shm
mkdir -p "$folder" "$environment" "$python"
mount --rbind /mnt/environment "$environment"
mount --rbind /mnt/python "$python"
mount --rbind /mnt/folder "$folder"
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
    return [*_UNSHARE, *script, *_POWERLESS, *before]


_UNSHARE = [
    "unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child",
    "--mount", "--mount-proc",
]  # fmt: skip
# Root in there could take the mounts away again, and read and write what they protect.
_POWERLESS = [
    "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs", "--",
]  # fmt: skip


@functools.cache
def _namespaces() -> bool:
    """Whether this system allows them."""
    try:
        mount = ["sh", "-c", 'mount -t tmpfs tmpfs /mnt; exec "$@"', "sh", *_POWERLESS, "true"]
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
            " (unshare --user --net --mount, setpriv)"
        )
    if not shutil.which("prlimit"):
        said.append("submissions have no limits on memory and processes: there is no prlimit")
    if os.geteuid() == 0 and not _namespaces():
        said.append("submissions run as root: grade as another user")
    return said
