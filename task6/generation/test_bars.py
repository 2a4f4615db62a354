"""How made-up times are judged."""

import pytest

from task6.generation import bars, peers
from task6.generation.bars import COURSE, COURSE_FP32, LLAMA, TENSOR_CORES
from task6.generation.fakes import READ, facts, made_up, speed, times
from task6.generation.record import Times


def test_bars_are_judged():
    grid = bars.grid(times())
    judged = {row[0]: (row[1], row[3]) for row in grid.rows}
    assert len(judged) == 5 + 5 + 2 + 1
    assert judged[f"{COURSE}: time between tokens"] == ("3.3 ms", "met")
    assert judged[f"{COURSE}: the same, relative to the floor"] == ("1.015", "met")
    assert judged[f"{COURSE}: memory allocated, relative to weights and cache"] == ("1.03", "met")
    assert judged[f"{COURSE}: memory reserved, relative to weights and cache"][1] == "not met !"
    assert judged[f"{COURSE_FP32}: time between tokens"] == ("6.8 ms", "not met !")
    assert judged[f"{TENSOR_CORES}: time to the first token"] == ("451 ms", "not met !")
    assert judged[f"{COURSE_FP32}: tokens equal to those of task 6's model"] == ("99 of 100", "not met !")  # fmt: skip
    assert judged[f"{LLAMA}: time between tokens"] == ("0.7 ms", "met")
    assert grid.bars.count(False) == 7


def test_the_faster_way_is_judged():
    found = made_up(COURSE_FP32, 990.0, 6.8)
    found.speeds[peers.ONE_LAUNCH] = speed(990.0, 6.6)
    found.same[peers.ONE_LAUNCH] = 100
    rows = bars.grid(Times(facts(), READ, [found])).rows
    judged = {name: (value, verdict) for name, value, _, verdict in rows}
    name = f"{COURSE_FP32}: time between tokens, a step in one launch"
    assert judged[name] == ("6.6 ms", "met")
    name = f"{COURSE_FP32}: tokens equal to those of the decoder, a step in one launch"
    assert judged[name] == ("100 of 100", "met")


@pytest.mark.parametrize(("world", "between", "verdict"), [(2, 2.0, "met"), (4, 1.4, "not met !")])
def test_the_bar_of_several_gpus(world, between, verdict):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, between, world)]
    (row,) = bars.grid(Times(facts(), READ, found)).rows
    assert row[0].endswith(f"on {world} GPUs, relative to one") and row[3] == verdict


def test_several_gpus_are_compared_with_the_faster_way_of_one():
    alone, both = made_up(COURSE, 84.0, 4.0), made_up(COURSE, 60.0, 2.0, 2)
    alone.speeds[peers.ONE_LAUNCH] = speed(84.0, 3.0)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert row[1] == "0.6667" and row[3] == "not met !"
    both.speeds[peers.ONE_LAUNCH] = speed(60.0, 1.5)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert "on 2 GPUs, a step in one launch, relative to one" in row[0] and row[1] == "0.5"
