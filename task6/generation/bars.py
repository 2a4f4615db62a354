"""The bars: how fast generation has to be, beside the memory's speed.

    course, batch 4, prompt 1,024      bfloat16         float32
      time between tokens              3.4 ms           6.7 ms          and 1.12 x the floor
      time to the first token          85 ms            450 ms
                                                        (products on tensor cores)
      memory                           1.05 x weights and cache
      tokens                                            those of task 6's model
    llama-3.2-1b, batch 1, context 1,024, bfloat16
      time between tokens              0.7 ms
    on 2 GPUs, on 4: time between tokens, relative to one    0.62, 0.40

Between tokens the faster of the decoder's two ways counts, on one GPU as on several, and the row says which. The floor
is the time of a pure read, measured in the same run, of the weights and of the keys and values, each once.
"""

from dataclasses import replace

from common.record.grid import Grid
from task6.generation.benchmark import Case, Found
from task6.generation.peers import ONE_LAUNCH, READABLE
from task6.generation.record import Times

COURSE = Case("course", 4, 1024, 100, "bfloat16")
COURSE_FP32 = Case("course", 4, 1024, 100, "float32")
TENSOR_CORES = replace(COURSE_FP32, products="tensor cores")
LLAMA = Case("llama-3.2-1b", 1, 1024, 100, "bfloat16")
CASES = (COURSE, COURSE_FP32, TENSOR_CORES, LLAMA)

BETWEEN = {COURSE: 3.4, COURSE_FP32: 6.7, LLAMA: 0.7}  # ms
FIRST = {COURSE: 85.0, TENSOR_CORES: 450.0}  # ms
BY_FLOOR = {COURSE: 1.12, COURSE_FP32: 1.12}
BY_HELD = {COURSE: 1.05, COURSE_FP32: 1.05}
BY_ONE = {2: 0.62, 4: 0.40}  # by the number of GPUs


def grid(times: Times) -> Grid:
    """Each bar, what was found, and whether it is met."""
    result = empty()
    alone = {found.case: found for found in times.found if found.world == 1}
    shared = len(alone) < len(times.found)

    def fastest(found: Found) -> tuple[str, float]:
        """The decoder's faster way, and its time between tokens."""
        ways = {"": found.ours}
        if ONE_LAUNCH in found.speeds:
            ways[", a step in one launch"] = found.speeds[ONE_LAUNCH]
        way, speed = min(ways.items(), key=lambda way: way[1].between.median_ms)
        return way, speed.between.median_ms

    def judge(name: str, found: float, at_most: float | None, unit: str = "") -> None:
        if at_most is not None:
            bar = f"at most {at_most:g}{unit}"
            add(result, name, f"{found:.4g}{unit}", bar, found <= at_most)

    for found in times.found:
        case, (way, tbt) = found.case, fastest(found)
        if found.world > 1:
            name = f"{case}: time between tokens on {found.world} GPUs{way}, relative to one"
            judge(name, tbt / fastest(alone[case])[1], BY_ONE.get(found.world))
        elif not shared:
            judge(f"{case}: time between tokens{way}", tbt, BETWEEN.get(case), " ms")
            floor = found.floor(times.read_gb_per_s)
            judge(f"{case}: the same, relative to the floor", tbt / floor, BY_FLOOR.get(case))
            first = found.ours.first.median_ms
            judge(f"{case}: time to the first token", first, FIRST.get(case), " ms")
            for what, peak in (("allocated", found.allocated), ("reserved", found.reserved)):
                name = f"{case}: memory {what}, relative to weights and cache"
                judge(name, peak / found.held, BY_HELD.get(case))
            for other in (READABLE, ONE_LAUNCH) if case.dtype == "float32" else ():
                if other in found.same:
                    same, all_of = found.same[other], case.new_tokens
                    name = f"{case}: tokens equal to those of {other}"
                    add(result, name, f"{same} of {all_of}", "all", same == all_of)
    return result


def empty() -> Grid:
    """A table for bars."""
    return Grid("Bars", ["", "found", "bar", ""])


def add(grid: Grid, name: str, found: str, bar: str, met: bool) -> None:
    """A bar, what was found, and whether it is met."""
    grid.bars.append(met)
    grid.rows.append([name, found, bar, "met" if met else "not met !"])
