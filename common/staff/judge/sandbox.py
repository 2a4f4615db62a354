"""What a student's process may do: no network, no other process, and of the disk only a copy of its own folder.

Linux's namespaces do that, by ``unshare`` and ``mount`` of util-linux, without root. Where the system forbids them, the
limits on memory, processes and files remain, and :func:`missing` says what is not held back.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
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
OWNERS = range(61184, 65520)  # users that systemd keeps free for such purposes
DISK = "1g"  # for its folder, and for /tmp: in memory, gone with the process

# sh -c SCRIPT sh FOLDER ENVIRONMENT PYTHON OWNER HIDDEN... : make all read-only, hide folders, go to a copy of FOLDER.
# ENVIRONMENT and PYTHON, on which it is based, may lie in a hidden folder. Where memory runs out, what is in here ends
# first.
_SCRIPT = f"""
set -e
echo 1000 > /proc/self/oom_score_adj
folder=$1 environment=$2 python=$3 owner=$4; shift 4
while read -r _ _ _ _ target _; do
  mount -o remount,bind,ro "$(printf %b "$target")" 2>/dev/null || true
done < /proc/self/mountinfo
mount -t tmpfs -o size={DISK} tmpfs /mnt
mkdir /mnt/folder /mnt/environment /mnt/python
cp -r "$folder/." /mnt/folder
chown -R "$owner:$owner" /mnt/folder
mount --rbind "$environment" /mnt/environment
mount --rbind "$python" /mnt/python
while [ "$1" != -- ]; do mount -t tmpfs -o size=1m tmpfs "$1"; shift; done; shift
mount -t tmpfs -o size={DISK} tmpfs /tmp
mount -t tmpfs -o size={DISK} tmpfs /dev/shm
mkdir -p "$folder" "$environment" "$python"
mount --rbind /mnt/environment "$environment"
mount --rbind /mnt/python "$python"
mount --rbind /mnt/folder "$folder"
cd "$folder"
[ "$owner" = 0 ] || user="--reuid=$owner --regid=$owner --clear-groups"
# Another user's process does not keep the signal of --kill-child.
exec setpriv $user --pdeathsig=KILL --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


def command(folder: Path, hidden: Sequence[Path] = ()) -> list[str]:
    """What is put before a command so that it runs in the sandbox, in ``folder``.

    Args:
        folder: what it gets a copy of, at the same path.
        hidden: folders that are empty for it, with this account's home.
    """
    limits = [shutil.which("prlimit") or "", *(f"--{name}={n}" for name, n in LIMITS.items())]
    before = limits if limits[0] else []
    return [*tied(), *(_inside(folder, hidden) if _namespaces() else []), *before]


def tied() -> list[str]:
    """What is put before a command so that it ends with the thread that starts it, even by SIGKILL."""
    return ["setpriv", "--pdeathsig=KILL"] if shutil.which("setpriv") else []


def _inside(folder: Path, hidden: Sequence[Path]) -> list[str]:
    # A folder that lies in another hidden one has to be mounted on before it is gone.
    covered = {path for path in (*hidden, Path.home()) if path.is_dir() and path != Path("/")}
    inner_first = sorted(covered, key=lambda path: -len(path.parts))
    kept = [str(folder), sys.prefix, sys.base_prefix, str(_owner())]
    script = ["sh", "-c", _SCRIPT, "sh", *kept, *map(str, inner_first), "--"]
    return [*_UNSHARE, *script]


def _owner() -> int:
    """Who a student's code runs as, in the sandbox.

    Limits do not hold for root. So where root grades, it is a user that exists nowhere else; others are root in their
    own namespace, without its capabilities.
    """
    return OWNERS[os.getpid() % len(OWNERS)] if os.geteuid() == 0 else 0


_NAMESPACES = ["--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
_UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *_NAMESPACES]


@functools.cache
def _namespaces() -> bool:
    """Whether this system allows them."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        command = [*_inside(Path(folder), []), sys.executable, "-c", ""]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=20)
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
