"""Rewriting .cu files: what is changed, what is left alone, and what is refused."""

import re

import pytest

from common.cuda_on_cpu import RewriteError, rewrite


def body(source: str) -> str:
    """The rewritten text without the lines that are put before it."""
    text = rewrite(source, "student.cu")
    line_1 = '#line 1 "student.cu"\n'
    head = f"{line_1}#include <cuda_runtime.h>\n{line_1}"
    assert text.startswith(head)
    return text.removeprefix(head)


def launch(source: str) -> tuple[str, str, str]:
    """Kernel, configuration and arguments of the one launch in `source`."""
    text = " ".join(body(f"void f() {{\n{source};\n}}").split())
    kernel = re.search(r"\[&\]\(auto&\.\.\. a_\) \{ (.*?)\(a_\.\.\.\); \}", text)[1]
    assert f'launch("{kernel}", __FILE__, ' in text
    rest = text[text.index("LaunchConfig(") + len("LaunchConfig(") :].removesuffix("); }")
    depth, end = 1, 0
    while depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return kernel, rest[: end - 1].strip(), rest[end:].strip().removeprefix(",").strip()


LAUNCHES = [
    ("k<<<1, 2>>>(x)", ("k", "1, 2", "x")),
    ("k <<< 1, 2 >>> ( x )", ("k", "1, 2", "x")),
    ("k<<<g, b, 0, stream>>>(x, y)", ("k", "g, b, 0, stream", "x, y")),
    ("k<<<1, 2>>>()", ("k", "1, 2", "")),
    (
        "k<16, float><<<dim3(a, b), dim3(c, d)>>>(x)",
        ("k<16, float>", "dim3(a, b), dim3(c, d)", "x"),
    ),
    ("k<A<B<1>>><<<1, 2>>>(x)", ("k<A<B<1>>>", "1, 2", "x")),
    ("k<(1 > 0), 4><<<1, 2>>>(x)", ("k<(1 > 0), 4>", "1, 2", "x")),
    ("ns::S<int>::template k<3><<<1, 2>>>(x)", ("ns::S<int>::template k<3>", "1, 2", "x")),
    ("::ns::k<<<1, 2>>>(x)", ("::ns::k", "1, 2", "x")),
    ("kernels[i]<<<1, 2>>>(x)", ("kernels[i]", "1, 2", "x")),
    ("(*pick(3))<<<1, 2>>>(x)", ("(*pick(3))", "1, 2", "x")),
    ("k<<<1, 2, bytes<T<U<1>>>()>>>(x)", ("k", "1, 2, bytes<T<U<1>>>()", "x")),
    ("k<<<n >> 3, 1 << 5>>>(x >> 1)", ("k", "n >> 3, 1 << 5", "x >> 1")),
    ("k<<<1, 2>>>(f<A<B<1>>>(y), g(z))", ("k", "1, 2", "f<A<B<1>>>(y), g(z)")),
    ("if (n > 3) k<<<1, 2>>>(x)", ("k", "1, 2", "x")),
]


@pytest.mark.parametrize("source, expected", LAUNCHES, ids=[source for source, _ in LAUNCHES])
def test_launches(source, expected):
    assert launch(source) == expected


def test_two_launches_in_one_statement():
    assert body("void f() { a<<<1, 2>>>(x), b<<<3, 4>>>(y); }").count("cuda_on_cpu::launch(") == 2


UNTOUCHED = [
    'const char* s = "k<<<1, 2>>>(x)";',
    "// k<<<1, 2>>>(x) and __shared__ float x[3];",
    "/* __shared__\n k<<<1>>> */ int x;",
    'auto s = R"x(k<<<1, 2>>>("))" __shared__)x";',
    "char c = '\"'; int big = 1'000'000; auto u = u8\"<<<\";",
    '#include "header with <<<"\n#pragma unroll\nint y;',
    "#ifdef __CUDACC__\nk<<<1>>>; asm(\"wgmma.fence\"); __shared__ x;\n#endif\nint z;",
    "#if defined(__CUDACC__) && 1\nasm(\"x\");\n#else\nint a;\n#endif",
    "#if 0\n__shared__ nonsense\n#endif\nint b;",
    "__attribute__((__noinline__)) void f();",
    "auto f = [=] { return 1; };",
]  # fmt: skip


@pytest.mark.parametrize("source", UNTOUCHED)
def test_left_alone(source):
    assert body(source) == source


@pytest.mark.parametrize("member", ["config.", "config->"])
def test_a_configurations_dimensions_are_not_the_threads(member):
    assert body(f"{member}gridDim = gridDim;") == f"{member}gridDim_ = gridDim;"


def shared(declaration: str) -> str:
    return " ".join(body(f"void k() {{ {declaration} }}").split())


def test_static_shared_memory():
    text = shared("__shared__ float tile[T][T + 1], total;")
    assert "using tile_type_ = float[T][T + 1];" in text
    assert 'tile_type_& tile = ::cuda_on_cpu::shared<tile_type_>(&tile_site_, "tile"' in text
    assert "using total_type_ = float;" in text
    for alignment in ("__align__(128)", "alignas(128)"):
        for order in ("__shared__ {} float x[2];", "{} __shared__ float x[2];"):
            assert "shared<x_type_, (128)>" in shared(order.format(alignment))
    assert "shared<x_type_, alignof(float4)>" in shared("__shared__ alignas(float4) float x[2];")
    assert "using x_type_ = volatile int[2];" in shared("__shared__ volatile int x[2];")
    assert "using x_type_ = volatile int[2];" in shared("volatile __shared__ int x[2];")
    assert "using x_type_ = typename A<int, 3>::type[B<1, 2>::n];" in shared(
        "static __shared__ typename A<int, 3>::type x[B<1, 2>::n];"
    )


def test_dynamic_shared_memory():
    expected = 'float* x = ::cuda_on_cpu::dynamic_shared<float>("x");'
    for declaration in (
        "extern __shared__ float x[];",
        "extern __shared__ __align__(16) float x[];",
        "__shared__ extern float x [ ] ;",
    ):
        assert expected in shared(declaration).replace(" ;", ";")


REFUSED = [
    ("void f() {\n\n<<<1, 2>>>(x); }", 3, "no kernel name"),
    ("void f() {\nk<<<1, 2>>>; }", 2, "not followed by >>>"),
    ("void f() {\nk<<<1, 2; }", 2, "not followed by >>>"),
    ("void f() {\nk<<<>>>(x); }", 2, "needs a grid and a block"),
    ("void f() {\nk<<<4>>>(x); }", 2, "needs a block size"),
    ("void f() {\n__shared__ float x[2] = {1, 2}; }", 2, "no initializer"),
    ("void f() {\n__shared__ struct { int a; } x; }", 2, "no type of its own"),
    ("void f() {\nextern __shared__ float x[4]; }", 2, "extern __shared__ T x[]"),
    ("int a;\nextern __shared__ float x[];", 2, "inside its kernel"),
    ("namespace n {\n__shared__ float x[3]; }", 2, "inside its kernel"),
    ("#define GO(k) \\\n  k<<<1, 2>>>(x)", 1, "inside a macro"),
    ("#define TILE __shared__ float x[4]", 1, "inside a macro"),
    ('void f() {\nasm volatile("wgmma.fence.sync.aligned;"); }', 2, "wgmma.fence.sync.aligned"),
    ('void f() {\nasm("cp.async.bulk.tensor.2d" : : "r"(x)); }', 2, "cp.async.bulk.tensor.2d"),
    ("void f() { __shared__ float x[4];\nauto g = [=] { return x[0]; }; }", 2, "capture with [&]"),
    ("void f() { __shared__ float x[4];\nauto g = [=, &y] { return x[0]; }; }", 2, "capture with [&]"),
    ("void f() {\n__shared__ float", 2, "without its ;"),
]  # fmt: skip


@pytest.mark.parametrize("source, line, message", REFUSED)
def test_refused_with_file_and_line(source, line, message):
    with pytest.raises(RewriteError) as caught:
        rewrite(source, "student.cu")
    assert str(caught.value).startswith(f"student.cu:{line}: ")
    assert message in str(caught.value)


def test_a_capture_elsewhere_is_no_error():
    body("void f() { __shared__ float x[4]; }\nvoid g() { auto h = [=] { return 1; }; }")


def test_line_numbers_do_not_change():
    source = """\
#define TWO \\
  lines
template <int A,
          int B>  // a comment
__global__ void k(float* x) {
  __shared__ float
      tile[A]
          [B], other;
  here_6();
}
/* over
   lines */
void f() {
  k<1,
    2>  // why
      <<<dim3(1),
         2>>>(
          // the tensor
          x,
          y);
  here_18();
}
"""
    out = body(source).splitlines()
    for i, line in enumerate(source.splitlines()):
        if "here" in line:
            assert out[i].strip() == line.strip()
    assert len(out) == len(source.splitlines())


def test_only_a_kernels_return_is_noted():
    noted = "return ::cuda_on_cpu::returned_at(__FILE__, __LINE__);"
    kernel = "template <int N>\n__global__ void k(int n) { if (n) { return; } %s return; }"
    assert body(kernel % "x[3] = 1;") == (kernel % "x[3] = 1;").replace("return;", noted)
    for other in ("auto f = [&](int i) { if (i) return; };", "each([=] { return; });", "return 3;"):
        assert body(kernel % other) == (kernel % "@").replace("return;", noted).replace("@", other)
    helper = "__device__ void f() { return; }\nstruct S { void g() { return; } };"
    assert body(helper) == helper


PARTS = [  # statements after `extern __shared__ float s[];`, and what is called
    ("float* K = s + n;  // [R][D]", ['"K", K, {size_t(R), size_t(D)}']),
    ("float* K = s + n;  // [R][2 * D + 1], padded", ['"K", K, {size_t(R), size_t(2 * D + 1)}']),
    ("float* K = s + n;  // [R][unknown]", ['"K", K']),
    ("float* K = s + n;  // a comment", ['"K", K']),
    ("const float *A = s, *B = A + R, c = 3.0f;  // [R][D]", ['"A", A', '"B", B']),
    ("auto* K = reinterpret_cast<int (*)[4]>(&s[3]);", ['"K", K']),
    ("float* K = other + n;", []),
    ("float x = s[3], y = 2.0f * s[4];", []),
    ("for (float* p = s; p < s + n; ++p) {}", []),
    ("if (n) { float* p = s + n; }", []),
    ("*p = s[3]; x[0] = y * s[1]; p = s + 1; return s == p;", []),
]


@pytest.mark.parametrize("statements, calls", PARTS, ids=[p[0] for p in PARTS])
def test_pointers_into_dynamic_shared_memory_name_its_parts(statements, calls):
    start = "template <int R> __global__ void k(int n) {\nconstexpr int E = 1, D = 4;\nextern __shared__ float s[];\n"
    text = body(f"{start}{statements}\n}}")
    assert re.findall(r"::cuda_on_cpu::name_part\((.*?)\);", text) == calls
    assert re.sub(r" ::cuda_on_cpu::name_part\(.*?\);", "", text).endswith(f"\n{statements}\n}}")
