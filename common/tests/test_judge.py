"""Checks in one process, a student's code in another one: honest code passes, and dishonest code gains nothing."""

import shutil
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
import torch

from common import regions
from common.build import KernelError
from common.check import CheckFailed
from common.paths import ROOT
from common.staff import student_edition
from common.staff.judge import sandbox, transfer
from common.staff.judge.check import marked_functions
from common.staff.judge.remote import Worker, standing_in

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


def first_look(folder, code, *, hide=()):
    """Run task 1's first case on code for its region."""
    from task1.test import suite

    write(folder, "task1/attention.py", "CustomSelfAttention.forward", code, " " * 8)
    item = next(iter(suite.items(["cpu"])))
    with (
        closing(Worker(folder, sandbox.command(folder, hide))) as worker,
        standing_in(worker, marked_functions()),
    ):
        item.run(1)


def test_honest_code_passes(edition):
    first_look(edition, HONEST + "return o")


CHEATS = {
    "ends the process": ("import os; os._exit(0)", "has ended with status 0"),
    "raises SystemExit": ("raise SystemExit(0)", "has ended"),
    "ends it at exit": (
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit",
        "has ended",
    ),
    "PyTorch's attention": (
        """
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.project_qkv(x))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.project_output(o.transpose(1, 2).flatten(2))
        """,
        "this is PyTorch's attention",
    ),
    "a lazy tensor": (
        HONEST + "class Lazy(torch.Tensor): pass\nreturn o.as_subclass(Lazy)",
        "should be a plain tensor",
    ),
    "no tensor": ("return 'right'", "should be a plain tensor"),
    "the input is changed": (HONEST + "x.zero_()\nreturn o", "x was changed"),
    "zeros, and a patched comparison": (
        """
        import common.check.compare, common.check.difference, sys, torch
        common.check.compare.assert_close = common.check.difference.error_of = lambda *a, **k: torch.zeros(1)
        for module in list(sys.modules.values()):
            if hasattr(module, "assert_close"): module.assert_close = lambda *a, **k: None
        return torch.zeros_like(x)
        """,
        "largest error",
    ),
    "a verdict on stdout": ("print('  attention   21 of 21'); return x * 0", "largest error"),
    "filled in later": (
        """
        import threading, time
        out = torch.zeros_like(x)
        def later():
            time.sleep(0.2)
            out.copy_(torch.ones_like(x))
        threading.Thread(target=later).start()
        return out
        """,
        "largest error",
    ),
    "nonsense instead of an answer": (
        """
        import os, socket, struct, torch
        for fd in range(3, 64):
            try: s = socket.socket(fileno=os.dup(fd))
            except OSError: continue
            s.sendall(struct.pack("<Q", 9) + b'["passed"')
        return x
        """,
        "sent an answer that is no JSON",
    ),
    "a tensor beyond what was sent": (
        """
        import json, os, socket, struct
        answer = json.dumps({"value": {"new": [0, "torch.float32", [1 << 40]]}}).encode()
        for fd in range(3, 64):
            try: s = socket.socket(fileno=os.dup(fd))
            except OSError: continue
            s.sendall(struct.pack("<Q", len(answer)) + answer)
        return x
        """,
        "that was not sent",
    ),
    "more than may be sent": (
        """
        import os, socket, struct
        for fd in range(3, 64):
            try: s = socket.socket(fileno=os.dup(fd))
            except OSError: continue
            s.sendall(struct.pack("<Q", 1 << 50))
        return x
        """,
        "at most",
    ),
    "a smaller file": (
        """
        import os
        for fd in range(3, 64):
            try: os.ftruncate(fd, 0)
            except OSError: pass
        return x
        """,
        "largest error",
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gains_nothing(edition, name):
    code, reason = CHEATS[name]
    with pytest.raises(AssertionError, match=reason):
        first_look(edition, code)


@needs_sandbox
def test_the_sandbox_hides_and_holds_back(edition, tmp_path):
    secret = tmp_path / "answers"
    secret.mkdir()
    (secret / "attention.py").write_text("return 1")
    code = f"""
    import os, socket
    found = []
    if os.path.exists("{secret}/attention.py"): found.append("the answers")
    for path in ("{secret}/x", "{ROOT}/x", "/etc/x", os.path.expanduser("~/x")):
        try:
            with open(path, "w") as file: file.write("x")
        except OSError: continue
        # What is hidden is an empty folder in memory, which can be written.
        hidden = ("{secret}", "{ROOT}", os.path.expanduser("~"))
        if not path.startswith(hidden): found.append("wrote " + path)
    try: socket.create_connection(("192.0.2.1", 80), 1)
    except OSError as error:
        if "unreachable" not in str(error): found.append(f"network: {{error}}")
    if any(name.isdigit() and int(name) > 50 for name in os.listdir("/proc")): found.append("processes")
    raise ValueError(", ".join(found) or "nothing found")
    """
    with pytest.raises(ValueError, match="^nothing found$"):
        first_look(edition, code, hide=[tmp_path])
    assert not (secret / "x").exists() and not (ROOT / "x").exists()


def test_a_kernel_that_damages_its_process_costs_the_case(edition):
    from task2.test import suite

    item = next(iter(suite.items(["cpu"])))

    def run():
        worker = Worker(edition, sandbox.command(edition))
        with closing(worker), standing_in(worker, marked_functions()):
            item.run(1)

    with pytest.raises(CheckFailed) as caught:
        run()
    assert caught.value.not_written
    code = "*(volatile int*)8 = 1;"
    write(edition, "task2/attention_kernel.cu", "softmax_kernel_batched", code, "  ")
    with pytest.raises(KernelError, match=r"attention_kernel.cu:\d+: "):
        run()


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
