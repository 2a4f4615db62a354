"""Checks in one process, a student's code in another one. What is dishonest: test_cheats.py."""

import shutil
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
import torch

from common import regions
from common.build import KernelError, using
from common.check import CheckFailed
from common.paths import ROOT
from common.staff import student_edition
from common.staff.judge import remote, sandbox, transfer
from common.staff.judge.check import marked_functions
from common.staff.judge.remote import ForkServer, Worker, standing_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
needs_sandbox = pytest.mark.skipif(bool(sandbox.missing()), reason="no namespaces here")

HONEST = """
q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.project_qkv(x))
S = q @ k.transpose(-1, -2) / self.head_dim**0.5
if causal:
    S = S.masked_fill(torch.ones(S.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
o = self.project_output((S.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """A student edition with the judge in it."""
    folder = tmp_path_factory.mktemp("judge") / "edition"
    student_edition.make(folder)
    judge = Path("common/staff/judge")
    shutil.copytree(ROOT / judge, folder / judge, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def write(folder, file, function, code, indent):
    """Put code into one region of an edition's file."""
    path = folder / file
    found = regions.regions(path.read_text(), file)
    lines = textwrap.indent(textwrap.dedent(code).strip("\n"), indent) + "\n"
    found = [r._replace(lines=lines) if r.function == function else r for r in found]
    path.write_text(regions.join(found))


@pytest.fixture(scope="module")
def server(edition):
    """What starts workers in the edition. It is not in a sandbox: that would have a copy of the edition."""
    with closing(ForkServer(edition)) as server:
        yield server


def run_first(suite, server):
    """Run a stage's first case on what stands in the server's folder."""
    item = next(iter(suite.items(["cpu"])))
    with closing(Worker(server)) as worker, standing_in(worker, marked_functions()):
        item.run(1)


def first_look(edition, server, code):
    """Run task 1's first case on code for its region."""
    from task1.test import suite

    write(edition, "task1/attention.py", "CustomSelfAttention.forward", code, " " * 8)
    run_first(suite, server)


def test_honest_code_passes(edition, server):
    first_look(edition, server, HONEST + "return o")


@needs_sandbox
def test_the_sandbox_hides_and_holds_back(edition, tmp_path):
    secret = tmp_path / "answers"
    secret.mkdir()
    (secret / "attention.py").write_text("return 1")
    code = f"""
    import ctypes, os, socket, sys
    found = []
    if os.path.exists("{secret}/attention.py"): found.append("the answers")
    libc = ctypes.CDLL(None)
    for line in open("/proc/self/mountinfo"):
        if libc.umount2(line.split()[4].encode(), 2) == 0: found.append("unmounted " + line)
    if libc.mount(b"none", b"/", None, 4096 | 32, None) == 0: found.append("made / writable")
    if set(os.listdir("/run")) - {{"mount"}}: found.append("sockets of services")
    for path in ("{secret}/x", "{ROOT}/x", "/etc/x", os.path.expanduser("~/x"), sys.prefix + "/x", sys.base_prefix + "/x"):
        try:
            with open(path, "w") as file: file.write("x")
        except OSError: continue
        # What is hidden is an empty folder in memory, which can be written.
        hidden = ("{secret}", "{ROOT}", os.path.expanduser("~"))
        if not path.startswith(hidden): found.append("wrote " + path)
    try: socket.create_connection(("192.0.2.1", 80), 1)
    except OSError as error:
        if "unreachable" not in str(error): found.append(f"network: {{error}}")
    if {{int(name) for name in os.listdir("/proc") if name.isdigit()}} - {{1, os.getpid()}}: found.append("processes")
    raise ValueError(", ".join(found) or "nothing found")
    """
    folder = tmp_path / "edition"
    shutil.copytree(edition, folder)
    with (
        closing(ForkServer(folder, sandbox.command(folder, [tmp_path]))) as server,
        pytest.raises(ValueError, match="^nothing found$"),
    ):
        first_look(folder, server, code)
    assert not (secret / "x").exists() and not (ROOT / "x").exists()


def test_a_kernel_that_damages_its_process_costs_the_case(edition, server):
    from task2.test import suite

    with pytest.raises(CheckFailed) as caught:
        run_first(suite, server)
    assert caught.value.not_written
    code = "*(volatile int*)8 = 1;"
    write(edition, "task2/attention_kernel.cu", "softmax_kernel_batched", code, "  ")
    with pytest.raises(KernelError, match=r"attention_kernel.cu:\d+: "):
        run_first(suite, server)


def test_tensors_arrive_as_they_are():
    base = torch.arange(60.0)
    view = base.view(3, 4, 5).transpose(0, 2)[1:, ::2]
    half = torch.randn(7, dtype=torch.float16)[1:]
    parameter = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
    sent = transfer.Sent({"view": view, "base": base, "half": half, "p": [parameter, None, 3]})
    numbered = []
    got = transfer.received(sent.payload, sent.fd, numbered.append)
    assert len(numbered) == 4 and type(got["p"][0]) is torch.nn.Parameter
    for mine, theirs in ((view, got["view"]), (base, got["base"]), (half, got["half"])):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
        assert mine.data_ptr() % 4096 == theirs.data_ptr() % 4096
    got["base"].fill_(7)  # the view shares its memory
    assert bool((got["view"] == 7).all()) and not bool((view == 7).any())
    sent.take_back()
    assert bool((base == 7).all()) and bool((view == 7).all())
    sent.close()


def test_a_huge_storage_is_not_sent_as_a_whole():
    from common.check.attention_case import lay_out

    x = torch.randn(2, 5, 2, 4)
    far, _, _ = lay_out("far", x, x, x)
    sent = transfer.Sent([far])
    (got,) = transfer.received(sent.payload, sent.fd, lambda t: None)
    assert torch.equal(got, far) and got.stride() == far.stride()
    got.mul_(2)
    sent.take_back()
    assert torch.equal(far, 2 * x)
    sent.close()


@pytest.mark.parametrize(
    "form",
    [
        (0, "torch.float32", (4,), (1,), 61),
        (0, "torch.float32", (4,), (100,), 0),
        (0, "torch.float32", (4,), (-1,), 10),
        (0, "torch.float32", (1 << 62,), (1,), 0),
        (0, "torch.complex64", (1,), (1,), 0),
        (1, "torch.float32", (1,), (1,), 0),
        (0, "torch.float32", (2, 2), (1,), 0),
    ],
)
def test_no_tensor_lies_outside_of_its_memory(form):
    memory = torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(transfer.TransferError):
        transfer.tensor_at(memory, *form)


def test_a_function_that_hangs_is_tried_a_few_times(edition, server, monkeypatch):
    from task1.attention import CustomSelfAttention

    monkeypatch.setattr(remote, "MORE", 0)
    write(edition, "task1/attention.py", "CustomSelfAttention.forward", "while True: pass", " " * 8)
    layer, found = CustomSelfAttention(*torch.ones(4, 8, 8), 8, 2), []
    with (
        closing(Worker(server)) as worker,
        standing_in(worker, marked_functions()),
        using(limit=0.5),
    ):
        for _ in range(remote.LATE + 1):
            with pytest.raises(CheckFailed) as caught:
                layer(torch.ones(1, 2, 8))
            found.append(str(caught.value))
    assert found[0] == "did not end within 0.5 s, and was ended"
    assert found[1:-1] == found[:1] * (remote.LATE - 1)
    assert found[-1] == f"not run: it has taken too long {remote.LATE} times"
