"""Two processes give the tokens of one, and end when one of them is lost."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.build import using
from common.check.case import device_of
from common.check.rng import new_seed
from common.paths import ROOT
from common.tests.devices import DEVICE, of_gpus_hopper
from task6.generation import CONFIGS, Decoder, Weights
from task6.generation.config import Config
from task6.generation.parallel import Group, Heartbeat, processes

COMMAND = ["-m", "task6.generation", "--device", "cpu", "--config", "tiny", "--batch", "2", "--prompt", "6"]  # fmt: skip


def environment(rank, world, port):
    """As torchrun sets it."""
    return dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )  # fmt: skip


def start(rank, world, port, *options):
    return subprocess.Popen(
        [sys.executable, *COMMAND, *options], cwd=ROOT, env=os.environ | environment(rank, world, port), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def begins_with(text):
    return re.search(r"It begins with ([\d ]+)\.", text)[1]


def test_two_processes_give_the_tokens_of_one(port):
    alone = start(0, 1, port, "--new-tokens", "12").communicate(timeout=120)[0]
    both = [start(rank, 2, port, "--new-tokens", "12") for rank in range(2)]
    shown = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert begins_with(shown[0]) == begins_with(alone)
    assert "Shared by 2 processes." in shown[0] and not shown[1]


def random_weights(case, seed, device, group=None):
    config, dtype, *_ = case
    torch.manual_seed(seed)
    return Weights.random(config, device=device, dtype=dtype, group=group)


def one_launch_of_several(rank, world, port, case, seed, check, prompt, steps):
    """A process: each step's logits and tokens are those of one process alone, from the same token on."""
    os.environ.update(environment(rank, world, port))
    with processes(torch.device(DEVICE)) as group:
        device = device_of(DEVICE)
        _, dtype, batch, length = case
        weights = random_weights(case, seed, device, group)
        decoder = Decoder(weights, batch, length, group=group, persistent=True)
        decoder.prefill(prompt.to(device))
        for tokens, logits in steps:
            decoder.tokens.copy_(tokens)
            decoder.logits.fill_(torch.nan)
            with using(check=check, order="random" if check else "forward", seed=seed):
                decoder.step()
            expected = logits.to(device).chunk(world, -1)[rank]
            unit = torch.finfo(dtype).eps * logits.abs().max()
            error = (decoder.logits - expected).abs().max() / unit
            assert error <= (64 if dtype == torch.float32 else 8), error
            all_of = torch.empty(world, *expected.shape, device=device, dtype=dtype)
            dist.all_gather(list(all_of), decoder.logits)
            best = all_of.transpose(0, 1).flatten(1).argmax(-1, keepdim=True)
            assert torch.equal(decoder.tokens, best)


@of_gpus_hopper
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two GPUs share the model")
@pytest.mark.parametrize(
    "world, dtype, check",
    [(2, torch.float32, False), (2, torch.bfloat16, DEVICE == "cpu"), (3, torch.float16, False)],
)
def test_a_step_in_one_launch_of_several(port, world, dtype, check):
    if DEVICE == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs share the model")
    seed, device = new_seed(), torch.device(DEVICE)
    config = Config(2, 192, 6, 6, 64, 64 * 6, 600)
    case = config, dtype, 3, 80
    decoder = Decoder(random_weights(case, seed, device), 3, 80, persistent=True)
    prompt, steps = torch.randint(600, (3, 70)), []
    decoder.prefill(prompt.to(device))
    for _ in range(2 if check else 4):
        before = decoder.tokens.clone().cpu()
        decoder.step()
        steps.append((before, decoder.logits.clone().cpu()))
    mp.spawn(one_launch_of_several, (world, port, case, seed, check, prompt, steps), nprocs=world)


def test_the_others_end_when_one_is_lost(port):
    both = [start(rank, 2, port, "--new-tokens", "20000") for rank in range(2)]
    time.sleep(8)  # the tokens take longer
    assert both[0].poll() is None
    both[1].send_signal(signal.SIGKILL)
    shown, errors = both[0].communicate(timeout=60)
    both[1].wait()
    assert both[0].returncode == 1 and "Traceback" not in errors
    assert " ".join(shown.split()).startswith(
        "task6.generation: process 0 of 2 has lost another one"
    )


def test_processes_with_different_options(port):
    """They would give tokens of neither, or stop in a sum of other sizes."""
    both = [start(rank, 2, port, "--new-tokens", "4", "--seed", str(rank)) for rank in range(2)]
    shown = [process.communicate(timeout=90)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1]
    said = " ".join(shown[1].split())
    assert "process 1 of 2 has other options than the first: " in said
    assert "seed=1" in said and "seed=0" in said and "has lost another one" in shown[0]


def test_a_port_of_another_program():
    """Process 0 cannot listen there, and process 1 gets no answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        both = [start(rank, 2, port, "--new-tokens", "4") for rank in range(2)]
        shown, errors = zip(*(process.communicate(timeout=90) for process in both), strict=True)
    assert [process.returncode for process in both] == [1, 1]
    assert (
        shown[0] == f"task6.generation: process 0 of 2: port {port} is in use by another program\n"
    )
    assert shown[1].startswith("task6.generation: process 1 of 2 has ")
    assert not any("Traceback" in text for text in errors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_ADDR", None, "environment variable MASTER_ADDR expected, but not set"),
        ("MASTER_PORT", "a", "invalid literal for int"),
    ],
)
def test_an_environment_of_one_process_alone(name, value, message, port):
    variables = os.environ | environment(1, 2, port) | ({name: value} if value else {})
    if value is None:
        del variables[name]
    shown = subprocess.run(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        env=variables,
        text=True,
        capture_output=True,
        timeout=90,
    )
    assert shown.returncode == 1
    assert "process 1 of 2 cannot find the others: " in shown.stdout and message in shown.stdout


def text_after_text(rank, world, port):
    """Until it is killed."""
    os.environ.update(environment(rank, world, port))
    with processes(torch.device("cuda")) as group:
        device = device_of("cuda")
        weights = random_weights((CONFIGS["tiny"], torch.float32), 0, device, group)
        decoder = Decoder(weights, 1, 2000, group=group, persistent=True)
        prompt = torch.zeros(1, 4, dtype=torch.int64, device=device)
        while True:
            decoder.generate(prompt, 1500)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs share the model")
def test_a_gpu_that_waits_for_a_lost_process_does_not_hang(port, capfd):
    context = mp.get_context("spawn")
    both = [context.Process(target=text_after_text, args=(rank, 2, port)) for rank in range(2)]
    for process in both:
        process.start()
    time.sleep(20)  # the other one is there after half of it
    assert all(process.is_alive() for process in both)
    both[1].kill()
    both[0].join(60)
    assert both[0].exitcode == 1
    assert "process 0 of 2 has lost another one" in capfd.readouterr().out


def beats(rank, store, sentences):
    return Heartbeat(Group(rank, 2), store, sentences.append, period=0.05, patience=1)


def test_a_process_that_no_longer_answers_is_noticed():
    """With NCCL a sum waits for it for ever."""
    store, said = dist.HashStore(), {0: [], 1: []}
    here, there = (beats(rank, store, said[rank]) for rank in range(2))
    here.start(), there.start()
    time.sleep(2)
    assert said == {0: [], 1: []}
    there.done.set()  # as if it hung
    here.join(10)
    assert (
        len(said[0]) == 1
        and said[0][0].startswith("process 0 of 2 has lost another one")
        and not said[1]
    )


def test_a_process_that_is_done_is_not_lost():
    store, said = dist.HashStore(), {0: [], 1: []}
    here, there = (beats(rank, store, said[rank]) for rank in range(2))
    here.start(), there.start()
    time.sleep(0.3)
    there.stop()
    time.sleep(2)
    here.stop()
    assert said == {0: [], 1: []}


def test_which_sums_gpus_read_from_each_other():
    x = torch.zeros(4, 4096, dtype=torch.bfloat16)
    assert Group._is_small(x) and Group._is_small(x.float())
    large = torch.zeros(4, 1024, 4096, dtype=torch.bfloat16)
    for other in (x.half(), x.T, x[0, :4], x.view(-1)[1:4097], large):
        assert not Group._is_small(other)


@pytest.mark.parametrize("fails", [None, "_allocate", "_try_out"])
def test_sums_stay_with_nccl_where_memory_cannot_be_shared(monkeypatch, fails):
    def allocate(group):
        group._shared = torch.zeros(16, dtype=torch.uint8)
        return True

    def fail(group):
        raise RuntimeError("the GPUs have no way to each other")

    monkeypatch.setattr(Group, "_allocate", allocate)
    monkeypatch.setattr(Group, "_try_out", lambda group: True)
    monkeypatch.setattr(Group, "_all", staticmethod(lambda done: done))
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if fails:
        monkeypatch.setattr(Group, fails, fail)
    group = Group(0, 2)
    group.share_memory()
    assert (group._shared is None) == bool(fails)


def test_a_number_of_processes_that_does_not_divide():
    with pytest.raises(ValueError, match="must divide heads; got 3 and 4"):
        CONFIGS["tiny"].share(3)
    share = CONFIGS["course"].share(4)
    assert (share.heads, share.inner, share.hidden) == (8, 4096, 4096)
