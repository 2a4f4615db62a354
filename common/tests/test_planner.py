"""The planner: what a library's name follows, which architectures a source is for, and which nvcc suits."""

import pytest

from common.build import BuildError, planner, toolchain
from common.tests.folders import KERNEL, write_kernel


def test_the_name_follows_sources_headers_and_flags(tmp_path):
    source = write_kernel(tmp_path / "named")
    names = {planner.plan(source, "cpu").path, planner.plan(source, "cpu", check=True).path}
    (source.parent / "factor.cuh").write_text("#pragma once\n#include <inner.cuh>\n")
    (source.parent / "inner.cuh").write_text("#define FACTOR 2.0f\n")
    names.add(planner.plan(source, "cpu").path)
    (source.parent / "inner.cuh").write_text("#define FACTOR 3.0f\n")
    names.add(planner.plan(source, "cpu").path)
    (source.parent / "unrelated.cuh").write_text("#define FACTOR 4.0f\n")
    names.add(planner.plan(source, "cpu").path)
    assert len(names) == 4


def test_a_source_that_is_for_some_gpus_alone_is_not_built_for_others(tmp_path):
    source = write_kernel(tmp_path / "one", "// architectures: sm_90a\n" + KERNEL)
    assert planner.architectures(source) == ("sm_90a",)
    with pytest.raises(BuildError, match=r"is for sm_90a alone, and not for sm_80"):
        planner.plan(source, "cuda", arch="80")
    source.write_text(31 * "// words\n" + source.read_text())  # not near the top: it says nothing
    assert planner.architectures(source) == ()


def test_a_gpu_that_a_source_is_not_for_is_named(tmp_path, monkeypatch):
    source = write_kernel(tmp_path / "one", "// architectures: sm_90a\n" + KERNEL)
    monkeypatch.setattr(
        toolchain, "find_gpu", lambda: toolchain.Gpu("NVIDIA A100", (8, 0), (13, 0))
    )
    with pytest.raises(
        BuildError, match=r"not for this machine's GPU, NVIDIA A100, which is sm_80"
    ):
        planner.plan(source, "cuda")


# ---- the CUDA compiler


@pytest.fixture
def fake_nvcc(monkeypatch, tmp_path):
    """Makes an nvcc of a given version that builds for given architectures the only one there is."""

    def make(version: str, *architectures: int) -> None:
        known = "\\n".join(f"compute_{a}" for a in architectures)
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            f'case $1 in --version) echo "Cuda compilation tools, release {version}, V{version}.1";;\n'
            f'--list-gpu-arch) printf "{known}\\n";; *) exit 1;; esac\n'
        )
        nvcc.chmod(0o755)
        monkeypatch.setenv("NVCC", str(nvcc))
        toolchain.nvcc_for.cache_clear()

    yield make
    toolchain.nvcc_for.cache_clear()


def test_nvcc_too_old_for_the_gpu(fake_nvcc):
    fake_nvcc("11.4", 70, 75, 80)
    with pytest.raises(
        BuildError, match=r"nvcc 11\.4\.1 .* is too old for sm_90a: it builds for sm_70 to sm_80"
    ):
        toolchain.nvcc_for("sm_90a")
    assert toolchain.nvcc_for("sm_80").version == (11, 4)


def test_driver_too_old_for_nvcc(fake_nvcc):
    fake_nvcc("13.0", 80, 90)
    with pytest.raises(BuildError, match=r"driver is too old for nvcc 13\.0\.1.*up to CUDA 12\.4"):
        toolchain.nvcc_for("sm_90a", (12, 4))
    assert toolchain.nvcc_for("sm_90a", (13, 2)).version == (13, 0)


@pytest.mark.parametrize("arch", ["hopper", "sm_9", "sm_80a", "sm_999"])
def test_unknown_architecture(fake_nvcc, arch):
    fake_nvcc("13.0", 80, 90)
    with pytest.raises(BuildError, match=arch):
        toolchain.nvcc_for(toolchain.normal_arch(arch))


def test_architecture_of_a_gpu():
    names = [toolchain.arch_of(c) for c in ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))]
    assert names == ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"]
