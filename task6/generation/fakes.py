"""What the tests of the command share: made-up speeds, cases and records."""

from task6.generation import peers, record
from task6.generation.bars import COURSE, COURSE_FP32, LLAMA, TENSOR_CORES
from task6.generation.benchmark import OURS, Found
from task6.generation.breakdown import GAPS, Part
from task6.generation.graded import Beside
from task6.generation.measure import Speed
from task6.generation.record import Times

READ = 4000.0  # GB/s


def speed(first, between):
    return Speed.of([first] * 3, [0.99 * between, between, 1.01 * between])


def made_up(case, first, between, world=1):
    """A step that has to read 13 GB, 3.25 ms at READ; of the smaller model 2.6 GB."""
    found = Found(
        case,
        world,
        (2.6e9 if case == LLAMA else 13e9) / world,
        10**10,
        int(1.03e10),
        int(1.06e10),
        1980,
        [1, 2, 3],
    )
    found.speeds = {OURS: speed(first, between), peers.READABLE: speed(first, 3 * between)}
    found.same = {peers.READABLE: 99}
    found.left_out = {peers.LLAMA: "out of memory"}
    found.parts = [Part("o", "tensor_core_kernel", 24, 900.0, 3e9), Part(GAPS, "", 0, 30.0)]
    found.parts.append(Part("x", "x", 1, 0.1))
    found.one_launch = [Part("o", "", 24, 800.0, 3e9), Part("embedding", "", 1, 5.0)]
    return found


def facts(date="2026-01-01"):
    found = record.origin("cpu", 1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return found | {"date": date, "machine": found["machine"] | gpu}


def times(date="2026-01-01"):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE_FP32, 990.0, 6.8), made_up(LLAMA, 5.0, 0.7)]
    found.append(made_up(TENSOR_CORES, 451.0, 6.8))
    return Times(facts(date), READ, found)


def beside(theirs, errors=None, ours=300.0, note=""):
    return Beside("made up", speed(0, ours).between, speed(0, theirs).between, note, 2e12, errors)
