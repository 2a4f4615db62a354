"""Kernels as compiled, without a GPU: none has what ptxas is known to get wrong."""

import pytest

from common.build import BuildError, planner
from common.paths import ROOT
from common.tests import machine_code
from common.tests.machine_code import Instruction, wrong

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
SOURCES = sorted(ROOT.glob("task*/**/*.cu")) + sorted(ROOT.glob("common/*/*.cu"))


def code(*lines):
    """Of (cycles, text), or None for a label."""
    return [line and Instruction(16 * i, line[1], line[0]) for i, line in enumerate(lines)]


NULL = (2, "CS2R R4, SRZ")
POINTER = (3, "@P2 IMAD.WIDE R4, R14, 0x4, R8")
TEST = (4, "ISETP.NE.U32.AND P2, PT, R4, RZ, PT")


def test_a_null_pointer_that_is_read_too_early():
    assert wrong(code(NULL, POINTER, TEST)) == [
        "0x20 ISETP.NE.U32.AND P2, PT, R4, RZ, PT: less than 6 cycles after 0x0 CS2R R4, SRZ"
    ]
    assert wrong(code(NULL, (3, "LDG.E R9, desc[UR16][R4.64]")))
    assert wrong(code(NULL, (3, "STG.E desc[UR16][R8.64], R5")))
    assert wrong(code(NULL, (3, "STG.E desc[UR16][R4.64+0x8], R9")))


@pytest.mark.parametrize(
    "lines",
    [
        ((3, NULL[1]), POINTER, TEST),  # six cycles
        (NULL, (3, POINTER[1].removeprefix("@P2 ")), TEST),  # written in any case
        (NULL, (3, "@P2 IMAD.WIDE R6, R14, 0x4, R8"), (4, "ISETP.NE.U32.AND P2, PT, R6, RZ, PT")),
        (NULL, (1, "BRA `(.L_x_1)"), TEST),
        (NULL, None, TEST),
        ((1, "CS2R R4, SR_CLOCKLO"), TEST),
        (NULL, (1, "MOV R45, R14"), (1, "FADD R8, R40, R51")),
    ],
)
def test_one_that_is_not(lines):
    assert not wrong(code(*lines))


def test_a_copy_whose_address_is_in_its_policy():
    copy = "LDGSTS.E.BYPASS.128 [R57{}+0x1180], desc[UR1][R12.64], P2"
    assert wrong(code((1, copy.format("+UR0"))))
    assert not wrong(code((1, copy.format(""))))


def test_what_nvdisasm_prints():
    text = """
\t.section\t.text._Z4kernelv,"ax",@progbits
.text._Z4kernelv:
        /*0000*/                   CS2R R4, SRZ ;        /* 0x0000000000047805 */
                                                         /* 0x000fe4000001ff00 */
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_1) ;       /* 0xfffffffc00f48947 */
                                                         /* 0x000fea000383ffff */
"""
    assert list(machine_code.functions(text.splitlines())) == [
        (
            "_Z4kernelv",
            [Instruction(0, "CS2R R4, SRZ", 2), None, Instruction(16, "@!P0 BRA `(.L_x_1)", 5)],
        )
    ]
    assert Instruction(0, "@!P0 BRA `(.L_x_1)", 5).parts == ("@!P0 ", "BRA", "", ["`(.L_x_1)"])
    assert Instruction(0, "LDGDEPBAR", 1).parts == (None, "LDGDEPBAR", "", [""])
    assert Instruction(0, "IMAD.WIDE R4, R14", 3).parts == (None, "IMAD", ".WIDE", ["R4", " R14"])


@pytest.mark.parametrize("source", SOURCES, ids=planner.display)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel(arch, source):
    if not all(map(machine_code.tool, ("cuobjdump", "nvdisasm"))):
        pytest.skip("no cuobjdump and nvdisasm: they come with the CUDA toolkit, and with Triton")
    if (named := planner.architectures(source)) and arch not in named:
        pytest.skip(f"not for {arch}")
    try:
        library = planner.plan(source, "cuda", arch=arch).path
    except BuildError as error:  # no nvcc
        pytest.skip(str(error).splitlines()[0])
    if not library.exists():
        pytest.skip(f"not compiled here: python -m common.build --arch {arch}")
    found = {name: wrong(one) for name, one in machine_code.disassembled(library)}
    assert found and not any(found.values()), found
