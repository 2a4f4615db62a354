"""Turn a `.cu` file into C++ that g++ and clang accept.

C++ lacks two constructs; everything else that CUDA adds is a header:

* `kernel<<<grid, block, bytes, stream>>>(arguments)` becomes a call of `cuda_on_cpu::launch`;
* `__shared__` declarations become references into the memory of the running block.

Besides, for messages, a kernel's `return;` notes where it was, and pointers into dynamic shared memory
give their names to what they point to.

Line numbers do not change, so a compiler's message shows the student's own file and line. A header
with kernels or shared memory is rewritten in the same way, as a file of its own.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_TOKEN = re.compile(
    r"""
      (?P<comment>   //(?:\\\n|[^\n])* | /\*.*?\*/ )
    | (?P<directive> (?<![^\n])[ \t]*\#(?:\\\n|/\*.*?\*/|//(?:\\\n|[^\n])*|"(?:\\.|[^"\\\n])*"|[^\n])* )
    | (?P<string>    (?:u8|[uUL])?R"(?P<delimiter>[^\s()\\]{0,16})\(.*?\)(?P=delimiter)"
                   | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*"
                   | (?:u8|[uUL])?'(?:\\.|[^'\\\n])+' )
    | (?P<number>    \.?\d(?:[eEpP][+-]|'?[\w.])* )
    | (?P<word>      [A-Za-z_]\w* )
    | (?P<space>     \n | [^\S\n]+ )
    | (?P<open_launch> <<< )
    | (?P<other>     -> | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CONDITION = re.compile(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b(.*)", re.DOTALL)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_INTEGERS = ("int", "unsigned", "size_t", "int64_t", "uint32_t", "int32_t", "long")
_GPU_INSTRUCTION = re.compile(r"\b(?:wgmma|tcgen05|mbarrier|cp\.async\.bulk|[a-z]\w*)\.[\w.:]+")


class RewriteError(ValueError):
    """Something in the `.cu` file that cannot run on the CPU; the message begins with file:line."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int

    @property
    def blank(self) -> bool:
        return self.kind in ("space", "comment")


def rewrite(source: str, path: str | Path) -> str:
    """The C++ for the text `source` of the CUDA file or header `path`.

    `path` is for messages: the compiler's, and those of RewriteError.
    """
    line_1 = (
        f'#line 1 "{_escaped(path)}"\n'  # twice: the message about a header says what includes it
    )
    return f"{line_1}#include <cuda_runtime.h>\n{line_1}{_File(source, path).rewritten()}"


class _File:
    """One file while it is rewritten."""

    def __init__(self, source: str, path: str | Path):
        self.path = path
        self.tokens = tokens_of(source)
        self.out: list[str] = []
        self.scopes: list[str] = []  # of each open brace: "namespace", "class" or "function"
        self.bodies: list[str] = []  # of each open brace: in a "kernel", in a "lambda", or ""
        self.statement: list[str] = []  # words since the last ; { or }
        self.dynamic: dict[
            str, int
        ] = {}  # dynamic shared arrays and pointers into them, and how deep each is declared
        self.integers: list[tuple[int, str]] = []  # names of integers in scope, and how deep
        self.shared_depths: list[int] = []  # how deep each __shared__ variable in scope is declared

    def error(self, line: int, message: str) -> RewriteError:
        return RewriteError(f"{self.path}:{line}: {message}")

    # ---- the walk over the tokens

    def rewritten(self) -> str:
        tokens, i = self.tokens, 0
        gpu_only = GpuOnlyRegions()
        while i < len(tokens):
            token = tokens[i]
            if token.kind == "directive":
                gpu_only.see(token.text)
                self._directive(token)
                i += 1
            elif gpu_only.inside:
                self.out.append(token.text)
                i += 1
            elif token.kind == "open_launch":
                i = self._launch(i)
            elif token.text == "__shared__":
                i = self._shared(i)
            else:
                if token.text in ("asm", "__asm__"):
                    self._check_assembly(i)
                elif token.text == "[":
                    self._check_capture(i)
                parts = self._parts(i) if token.text == ";" else ""
                self._track(token)
                if token.text == "return" and self._leaves_kernel(i):
                    self.out.append("return ::cuda_on_cpu::returned_at(__FILE__, __LINE__)")
                    i += 1
                    continue
                before = tokens[self._previous(i)].text
                if token.text in ("gridDim", "blockDim") and before in (".", "->"):
                    # Of a cudaLaunchConfig_t; by itself it is a macro.
                    self.out.append(f"{token.text}_")
                    i += 1
                    continue
                bare = token.text == "__noinline__" and tokens[self._previous(i)].text != "("
                self.out.append("__attribute__((noinline))" if bare else token.text)
                if parts:
                    self.out.append(parts)
                i += 1
        return "".join(self.out)

    def _directive(self, token: Token) -> None:
        for construct in ("<<<", "__shared__"):
            if construct in token.text and re.match(r"\s*#\s*define\b", token.text):
                message = f"{construct} inside a macro cannot be run on the CPU; use a function"
                raise self.error(token.line, message)
        self.out.append(token.text)

    def _track(self, token: Token) -> None:
        """Follow the braces, to know whether a declaration is inside a function."""
        if token.blank:
            return
        if token.text == "{":
            outer = self.scopes[-1] if self.scopes else "namespace"
            if outer == "function":
                scope = "function"
            elif "namespace" in self.statement or self.statement[-2:-1] == ["extern"]:
                scope = "namespace"
            elif ")" not in self.statement and {"struct", "class", "union", "enum"} & set(
                self.statement
            ):
                scope = "class"
            else:
                scope = "function"
            body = self.bodies[-1] if self.bodies else ""
            if outer != "function" and "__global__" in self.statement:
                body = "kernel"
            elif _begins_lambda(self.statement):
                body = "lambda"
            self.scopes.append(scope)
            self.bodies.append(body)
            if scope == "function":
                self._remember_integers()
            self.statement = []
        elif token.text == "}":
            if self.scopes:
                self.scopes.pop()
                self.bodies.pop()
            self.dynamic = {n: d for n, d in self.dynamic.items() if d <= len(self.scopes)}
            self.integers = [(d, n) for d, n in self.integers if d <= len(self.scopes)]
            self.shared_depths = [d for d in self.shared_depths if d <= len(self.scopes)]
            self.statement = []
        elif token.text == ";":
            if not self.scopes or self.scopes[-1] != "class":
                self._remember_integers()
            self.statement = []
        else:
            self.statement.append(token.text)

    def _leaves_kernel(self, i: int) -> bool:
        """Is token i the `return` of a `return;` that ends a thread?"""
        after = self._next(i + 1)
        in_kernel = bool(self.bodies) and self.bodies[-1] == "kernel"
        return in_kernel and after < len(self.tokens) and self.tokens[after].text == ";"

    def _check_assembly(self, i: int) -> None:
        """Inline PTX cannot run here; say which instruction it was."""
        strings = []
        for token in self.tokens[i:]:
            if token.text == ";":
                break
            if token.kind == "string":
                strings.append(token.text)
        if strings[:1] == ['""']:
            return  # no instruction: it only keeps the compiler from moving code, of which C++ knows too
        found = _GPU_INSTRUCTION.search(" ".join(strings))
        raise self.error(
            self.tokens[i].line,
            f"inline PTX ({found[0] if found else 'asm'}) runs on a GPU only; "
            "on the CPU, kernels reach tensor cores and asynchronous copies through ptx.cuh",
        )

    def _check_capture(self, i: int) -> None:
        """[=] would copy a __shared__ variable, here a reference; on a GPU it captures none."""
        equals = self._next(i + 1)
        after = self._next(equals + 1)
        if not self.shared_depths or after >= len(self.tokens):
            return
        if self.tokens[equals].text == "=" and self.tokens[after].text in ("]", ","):
            raise self.error(
                self.tokens[i].line,
                "on the CPU this [=] would copy the kernel's __shared__ variables; capture with [&]",
            )

    # ---- kernel<<<...>>>(...)

    def _launch(self, i: int) -> int:
        """Rewrite the launch whose `<<<` is token i; returns the index after its arguments."""
        tokens, line = self.tokens, self.tokens[i].line
        start = self._kernel_start(i)
        kernel = _one_line(tokens[start:i])
        newlines = "\n" * "".join(t.text for t in tokens[start:i]).count("\n")
        del self.out[len(self.out) - (i - start) :]

        close = self._launch_close(i)
        config = "".join(t.text for t in tokens[i + 1 : close])
        if not config.strip():
            raise self.error(line, f"{kernel}<<<>>> needs a grid and a block")
        if config.strip().count(",") == 0:
            raise self.error(line, f"{kernel}<<<{config.strip()}>>> needs a block size too")

        opening = self._next(close + 3)
        end = self._matching(opening)
        arguments = "".join(t.text for t in tokens[opening + 1 : end])
        after_config = "".join(t.text for t in tokens[close + 3 : opening])
        separator = ", " if _has_code(tokens[opening + 1 : end]) else ""
        pointer = f"::cuda_on_cpu::entry_point(t_, {kernel})"
        self.out.append(
            f"::cuda_on_cpu::launch({_c_string(kernel)}, __FILE__, {tokens[start].line}, "
            f"[&](auto&... a_) {{ {kernel}(a_...); }}, "
            f"[&](auto t_) -> decltype({pointer}) {{ return {pointer}; }}, {newlines}"
            f"::cuda_on_cpu::LaunchConfig({config}){after_config}{separator}{arguments})"
        )
        return end + 1

    def _kernel_start(self, i: int) -> int:
        """Index of the first token of the kernel's name, which ends just before token i."""
        tokens, line = self.tokens, self.tokens[i].line
        j = self._previous(i)
        while True:
            if j >= 0 and tokens[j].text == ">":
                j = self._previous(self._matching_back(j, ">", "<", line))
            elif j >= 0 and tokens[j].text in (")", "]"):
                pairs = {")": "(", "]": "["}
                j = self._matching_back(j, tokens[j].text, pairs[tokens[j].text], line)
                before = self._previous(j)
                if before < 0 or tokens[before].kind != "word" or tokens[before].text == "return":
                    return j
                j = before
                continue
            if j < 0 or tokens[j].kind != "word":
                raise self.error(line, "no kernel name before <<<")
            before = self._previous(j)
            if before >= 0 and tokens[before].text == "template":
                before = self._previous(before)
            if not (before >= 1 and tokens[before].text == ":" and tokens[before - 1].text == ":"):
                return j
            j = before - 1  # the first colon
            before = self._previous(j)
            if before < 0 or not (tokens[before].kind == "word" or tokens[before].text == ">"):
                return j  # ::name, from the global namespace
            if tokens[before].text == "return":
                return j
            j = before

    def _launch_close(self, i: int) -> int:
        """Index of the `>>>` that closes the launch configuration opened at token i.

        Template arguments may end in `>>>` too, even before a `(`; the launch's is the last one in
        its statement that is followed by an argument list.
        """
        tokens, depth, found = self.tokens, 0, None
        for j in range(i + 1, len(tokens)):
            text = tokens[j].text
            if text in _CLOSERS:
                depth += 1
            elif text in _CLOSERS.values():
                depth -= 1
            if depth < 0 or (depth == 0 and text == ";") or tokens[j].kind == "open_launch":
                break
            if depth == 0 and [t.text for t in tokens[j : j + 3]] == [">", ">", ">"]:
                after = self._next(j + 3)
                if after < len(tokens) and tokens[after].text == "(":
                    found = j
        if found is None:
            raise self.error(tokens[i].line, "<<< is not followed by >>>(arguments)")
        return found

    # ---- __shared__

    def _shared(self, i: int) -> int:
        """Rewrite the declaration with `__shared__` at token i; returns the index of its `;`."""
        tokens, line = self.tokens, self.tokens[i].line
        end = i + 1
        while end < len(tokens) and tokens[end].text != ";":
            if tokens[end].text in ("{", "}", "="):
                raise self.error(
                    line, "a __shared__ variable has no initializer and no type of its own"
                )
            if tokens[end].kind == "directive":
                raise self.error(line, "a preprocessor line inside a __shared__ declaration")
            end += 1
        if end == len(tokens):
            raise self.error(line, "a __shared__ declaration without its ;")

        before = self._specifiers_before(i)
        words = [t for t in tokens[before:i] + tokens[i + 1 : end]]
        if not self.scopes or self.scopes[-1] != "function":
            raise self.error(line, "on the CPU a __shared__ variable is declared inside its kernel")
        del self.out[len(self.out) - (i - before) :]
        external, alignment, words = self._without_specifiers(words, line)
        type_name, variables = self._declarators(words, line)

        parts = []
        for name, dimensions in variables:
            if external:
                if not re.fullmatch(r"\[\s*\]", dimensions):
                    raise self.error(
                        line, "dynamic shared memory is declared as extern __shared__ T x[]"
                    )
                pointer = f'::cuda_on_cpu::dynamic_shared<{type_name}>("{name}")'
                parts.append(f"{type_name}* {name} = {pointer}")
                self.dynamic[name] = len(self.scopes)
                continue
            self.shared_depths.append(len(self.scopes))
            alias, site = f"{name}_type_", f"{name}_site_"
            aligned = f", {alignment}" if alignment else ""
            parts.append(
                f"using {alias} = {type_name}{dimensions}; static int {site}; {alias}& {name} = "
                f'::cuda_on_cpu::shared<{alias}{aligned}>(&{site}, "{name}", __FILE__, __LINE__)'
            )
        newlines = "\n" * "".join(t.text for t in tokens[before:end]).count("\n")
        self.out.append("; ".join(parts) + newlines)
        return end

    def _specifiers_before(self, i: int) -> int:
        """Where the declaration begins: static, extern, volatile, alignas(...) may precede."""
        tokens, start = self.tokens, i
        while True:
            j = self._previous(start)
            if j < 0:
                return start
            if tokens[j].text in ("static", "extern", "volatile"):
                start = j
            elif tokens[j].text == ")":
                opening = self._matching_back(j, ")", "(", tokens[i].line)
                word = self._previous(opening)
                if word < 0 or tokens[word].text not in ("alignas", "__align__"):
                    return start
                start = word
            else:
                return start

    def _without_specifiers(self, words: list[Token], line: int) -> tuple[bool, str, list[Token]]:
        """Split off extern, static and alignment: (is it extern, its alignment or "", the rest)."""
        external, alignment, rest, i = False, "", [], 0
        while i < len(words):
            text = words[i].text
            if text in ("alignas", "__align__"):
                depth, j = 0, i + 1
                while j < len(words):
                    depth += {"(": 1, ")": -1}.get(words[j].text, 0)
                    if depth == 0 and words[j].text == ")":
                        break
                    j += 1
                inside = _flat(words[i + 1 : j + 1]).strip()
                alignment = f"alignof{inside}" if _is_type(inside) else inside
                i = j + 1
                continue
            if text == "extern":
                external = True
            elif text != "static" and words[i].kind != "comment":
                rest.append(words[i])
            i += 1
        return external, alignment, rest

    def _declarators(self, words: list[Token], line: int) -> tuple[str, list[tuple[str, str]]]:
        """Split `float a[2], b` into the type and (name, dimensions) of each variable."""
        parts, depth = [[]], 0
        for token in words:
            depth += {"<": 1, ">": -1, "(": 1, ")": -1, "[": 1, "]": -1}.get(token.text, 0)
            if token.text == "," and depth == 0:
                parts.append([])
            else:
                parts[-1].append(token)
        variables, type_name = [], ""
        for number, part in enumerate(parts):
            end = len(part)
            while end and (part[end - 1].blank or part[end - 1].text == "]"):
                if part[end - 1].text == "]":
                    depth = 0
                    while True:
                        end -= 1
                        depth += {"]": 1, "[": -1}.get(part[end].text, 0)
                        if depth == 0 or end == 0:
                            break
                else:
                    end -= 1
            if end == 0 or part[end - 1].kind != "word":
                raise self.error(line, f"cannot read this __shared__ declaration: {_flat(words)}")
            head = _flat(part[: end - 1]).strip()
            if number == 0:
                type_name = head
            elif head:
                raise self.error(
                    line, f"write {head} {part[end - 1].text} as a declaration of its own"
                )
            variables.append((part[end - 1].text, _flat(part[end:]).strip()))
        if not type_name:
            raise self.error(line, f"this __shared__ declaration has no type: {_flat(words)}")
        return type_name, variables

    # ---- pointers into dynamic shared memory: messages name what they point to

    def _parts(self, i: int) -> str:
        """What follows `float* K_j = shared + n;`, whose ; is token i, or "".

        In the scope of the dynamic array itself, where each pointer begins a part of it. A comment `// [B_c][D]` behind
        gives the part's dimensions, if all names in it are integers that are in scope.
        """
        words, calls = self.statement, []
        if len(self.scopes) not in self.dynamic.values() or words.count("(") != words.count(")"):
            return ""
        declarators, depth = [[]], 0
        for word in words:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(word, 0)
            if word == "," and depth == 0:
                declarators.append([])
            else:
                declarators[-1].append(word)
        if not words or not re.fullmatch(r"[A-Za-z_]\w*", words[0]) or words[0] == "return":
            return ""
        for number, declarator in enumerate(declarators):
            if "=" not in declarator:
                continue
            equals = declarator.index("=")
            left, right = declarator[:equals], declarator[equals + 1 :]
            pointer = "*" in left[(1 if number == 0 else 0) : -1] or (
                number == 0 and "auto" in left
            )
            if not pointer or not re.fullmatch(r"[A-Za-z_]\w*", left[-1]) or right[:1] == ["="]:
                continue
            if self.dynamic.keys() & set(right):
                self.dynamic[left[-1]] = len(self.scopes)
                dimensions = self._dimensions(i) if len(declarators) == 1 else ""
                calls.append(f' ::cuda_on_cpu::name_part("{left[-1]}", {left[-1]}{dimensions});')
        return "".join(calls)

    def _dimensions(self, i: int) -> str:
        comment = next(
            (t for t in self.tokens[i + 1 :] if t.kind != "space" or "\n" in t.text), None
        )
        match = comment and re.match(r"//\s*((?:\[[\w\s*+-]+\]){2,3})", comment.text)
        if not match:
            return ""
        known = {name for _, name in self.integers}
        if not set(re.findall(r"[A-Za-z_]\w*", match[1])) <= known:
            return ""
        extents = re.findall(r"\[(.*?)\]", match[1])
        return f", {{{', '.join(f'size_t({extent})' for extent in extents)}}}"

    def _remember_integers(self) -> None:
        """The names that the statement declares as integers: `int a`, `constexpr int A = 1, B = 2`, `<int N>`."""
        words, declared = self.statement, False
        for word, name, after in zip(words, words[1:], [*words[2:], ""], strict=False):
            declared |= word in _INTEGERS
            in_front = word in _INTEGERS or (declared and word == "," and after == "=")
            ends = after in ("", "=", ",", ">", ")", "{")
            if in_front and ends and re.fullmatch(r"[A-Za-z_]\w*", name):
                self.integers.append((len(self.scopes), name))

    # ---- moving about

    def _next(self, i: int) -> int:
        while i < len(self.tokens) and self.tokens[i].blank:
            i += 1
        return i

    def _previous(self, i: int) -> int:
        i -= 1
        while i >= 0 and self.tokens[i].blank:
            i -= 1
        return i

    def _matching(self, i: int) -> int:
        """Index of the parenthesis that closes the one at token i."""
        depth = 0
        for j in range(i, len(self.tokens)):
            depth += {"(": 1, ")": -1}.get(self.tokens[j].text, 0)
            if depth == 0:
                return j
        raise self.error(self.tokens[i].line, "( without )")

    def _matching_back(self, i: int, closer: str, opener: str, line: int) -> int:
        """Index of the bracket that opens the one at token i; brackets of other types are skipped whole."""
        depth, other = 0, 0
        for j in range(i, -1, -1):
            text = self.tokens[j].text
            if text in ";{}":
                break
            if closer == ">":
                other += {")": 1, "]": 1, "(": -1, "[": -1}.get(text, 0)
                if other:
                    continue
            depth += {closer: 1, opener: -1}.get(text, 0)
            if depth == 0:
                return j
        raise self.error(line, f"{closer} without {opener} before <<<")


class GpuOnlyRegions:
    """Follows #if to know the parts that only nvcc compiles: those are left as they are."""

    def __init__(self) -> None:
        self.stack: list[bool | None] = []  # True: needs __CUDACC__; False: needs it absent

    @property
    def inside(self) -> bool:
        return True in self.stack

    def see(self, directive: str) -> None:
        match = _CONDITION.match(directive)
        if not match:
            return
        word, condition = match[1], match[2]
        if word in ("if", "ifdef", "ifndef"):
            needs = None
            if re.search(r"\b__CUDACC__\b|\b__CUDA_ARCH__\b", condition):
                needs = word != "ifndef" and not re.search(r"!\s*(defined\b)?", condition)
            elif word == "if" and condition.strip() == "0":
                needs = True
            self.stack.append(needs)
        elif word == "endif" and self.stack:
            self.stack.pop()
        elif self.stack:
            self.stack[-1] = (
                None if self.stack[-1] is None or word == "elif" else not self.stack[-1]
            )


def tokens_of(source: str) -> list[Token]:
    """The text in pieces; what has no end, such as a comment, is "other"."""
    tokens, line = [], 1
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup if match.lastgroup != "delimiter" else "string"
        tokens.append(Token(kind, match[0], line))
        line += match[0].count("\n")
    return tokens


def _flat(tokens: list[Token]) -> str:
    """The tokens on one line, without comments."""
    return "".join(" " if t.blank else t.text for t in tokens)


def _one_line(tokens: list[Token]) -> str:
    return " ".join(_flat(tokens).split())


def _begins_lambda(statement: list[str]) -> bool:
    """Does the statement end in a lambda whose body begins now? An index follows a name, and an attribute is [[."""
    return any(
        word == "["
        and (i == 0 or statement[i - 1] in ("=", "(", ",", "return", "&", "|", "?", ":"))
        and statement[i + 1 : i + 2] != ["["]
        for i, word in enumerate(statement)
    )


def _has_code(tokens: list[Token]) -> bool:
    return any(not t.blank for t in tokens)


def _is_type(parenthesized: str) -> bool:
    """alignas takes a number or a type; only names of types begin like this."""
    return bool(
        re.match(r"\(\s*(?:float|double|int|u?int\d|uint\d+_t|char|short|long|__)", parenthesized)
    )


def _escaped(path: str | Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
