"""Inline PTX as C++: each known instruction is one row of a table; an unknown one ends the launch when it runs."""

from __future__ import annotations

import re
from collections.abc import Callable

_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
_OPERAND = re.compile(r'"[=+&]*\w+"\s*\(')

_BARRIER = "__builtin_FILE(), __builtin_LINE()"

_WGMMA = re.compile(
    r"setp\.ne\.b32 p, %\d+, 0; "
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k32\.f32\.e5m2\.e4m3 \{.*\}, \{.*\}, %\d+, p, 1, 1"
)

_MMA_FP8 = (
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32 "
    r"\{%0, %1, %2, %3\}, \{%4, %5, %6, %7\}, \{%8, %9\}, \{%0, %1, %2, %3\}"
)

# Instruction pattern -> statement; {0} is operand %0 of the asm statement, {name} a group of the pattern.
_FORMS: tuple[tuple[str, str], ...] = (
    (r"", "(void)0"),  # holds registers
    (r"bar(rier)?(\.cta)?\.sync(\.aligned)? %0, %1", f"sim::barrier_wait({{0}}, {{1}}, {_BARRIER})"),
    (r"bar(rier)?(\.cta)?\.sync(\.aligned)? %0", f"sim::barrier_wait({{0}}, 0, {_BARRIER})"),
    (r"bar(rier)?(\.cta)?\.arrive(\.aligned)? %0, %1", f"sim::barrier_arrive({{0}}, {{1}}, {_BARRIER})"),
    (r"cp\.async\.commit_group", "sim::copy_commit()"),
    (r"cp\.async\.wait_all", "sim::copy_wait_all()"),
    (r"cp\.async\.wait_group (?P<groups>\d+)", "sim::copy_wait({groups})"),
    (r"cp\.async\.wait_group %0", "sim::copy_wait({0})"),
    (r"cp\.async\.c[ag]\.shared\.global\S* \[%0\], \[%1\], %2", "sim::copy_async({0}, {1}, {2})"),
    (r"cp\.async\.c[ag]\.shared\.global\S* \[%0\], \[%1\], %2, %3", "sim::copy_async({0}, {1}, {2}, {3})"),
    (r"mbarrier\.init\S* \[%0\], %1", "sim::mbarrier_init({0}, {1})"),
    (r"mbarrier\.arrive\.shared::cta\.b64 _, \[%0\]", "sim::mbarrier_arrive({0}, 0)"),
    (r"mbarrier\.arrive\.expect_tx\S* _, \[%0\], %1", "sim::mbarrier_arrive({0}, {1})"),
    (
        r"mbarrier\.try_wait\.parity\S* p, \[%1\], %2; selp\.b32 %0, 1, 0, p",
        f"sim::mbarrier_wait({{1}}, {{2}}, {_BARRIER}), {{0}} = 1",
    ),
    (r"cp\.async\.mbarrier\.arrive\.noinc\S* \[%0\]", "sim::copy_wait_all(), sim::mbarrier_arrive({0}, 0)"),
    (r"cp\.async\.bulk\.shared::cluster\.global\S* \[%0\], \[%1\], %2, \[%3\]", "sim::copy_bulk({0}, {1}, {2}, {3})"),
    (r"wgmma\.(fence|commit_group|wait_group)\S*( %0)?", "(void)0"),  # the product is there at once
    (
        _MMA_FP8,
        "{{ float* c_[] = {{&{0}, &{1}, &{2}, &{3}}}; unsigned a_[] = {{{4}, {5}, {6}, {7}}}, b_[] = {{{8}, {9}}}; "
        "sim::mma_e4m3_16x8x32(c_, a_, b_); }}",
    ),
    (r"stmatrix\S*\.x2\.trans\S* \[%0\], \{%1, %2\}", "sim::store_matrices({0}, {{{1}, {2}}})"),
    (r"stmatrix\S*\.x4\.trans\S* \[%0\], \{%1, %2, %3, %4\}", "sim::store_matrices({0}, {{{1}, {2}, {3}, {4}}})"),
    (r"fence\S*|membar\S*|setmaxnreg\S* .*|griddepcontrol\S*|prefetch\S* .*", "(void)0"),
    (r"cvt\.rn\.bf16\.f16 %0, %1", "{0} = sim::bf16_from_half({1})"),
    (r"rcp\.approx(\.ftz)?\.f32 %0, %1", "{0} = 1.f / ({1})"),
    (r"ex2\.approx(\.ftz)?\.f32 %0, %1", "{0} = exp2f({1})"),
    (
        r"(?P<op>min|max)\.NaN\.bf16x2 %0, %1, %2",
        "{{ unsigned v_ = 0; for (int k_ = 0; k_ < 2; ++k_) {{ "
        "unsigned a_ = ((unsigned)({1}) >> 16 * k_ & 0xffff) << 16, "
        "b_ = ((unsigned)({2}) >> 16 * k_ & 0xffff) << 16; float x_, y_; "
        "__builtin_memcpy(&x_, &a_, 4); "
        "__builtin_memcpy(&y_, &b_, 4); "
        "unsigned c_ = x_ != x_ || y_ != y_ ? 0x7fff0000u : f{op}f(x_, y_) == x_ ? a_ : b_; "
        "v_ |= c_ >> 16 << 16 * k_; }} {0} = (int)v_; }}",
    ),
    (
        r"max\.xorsign\.abs\.bf16x2 %0, %1, %2",
        "{{ unsigned v_ = 0; for (int k_ = 0; k_ < 2; ++k_) {{ "
        "unsigned a_ = ((unsigned)({1}) >> 16 * k_ & 0xffff), "
        "b_ = ((unsigned)({2}) >> 16 * k_ & 0xffff), s_ = (a_ ^ b_) & 0x8000, x_ = a_ & 0x7fff, y_ = b_ & 0x7fff; "
        "unsigned c_ = x_ > 0x7f80 ? y_ : y_ > 0x7f80 ? x_ : x_ > y_ ? x_ : y_; v_ |= (c_ | s_) << 16 * k_; }} "
        "{0} = (int)v_; }}",
    ),
    (r"redux\.sync\.(?P<op>add|min|max|and|or|xor)\.[usb]32 %0, %1, %2", "{0} = __reduce_{op}_sync({2}, {1})"),
    (r"fma\.rn(\.ftz)?\.f32 %0, %1, %2, %3", "{0} = fmaf({1}, {2}, {3})"),
    (r"red\.\S*\.or\.b32 \[%0\], %1", "atomicOr(reinterpret_cast<unsigned*>({0}), {1})"),
    (r"red\.\S*\.or\.b64 \[%0\], %1", "atomicOr(reinterpret_cast<unsigned long long*>({0}), {1})"),
    (r"and\.b32 %0, %1, (?P<mask>0x\w+)", "{0} = {1} & {mask}"),
    (r"prmt\.b32 %0, %1, %2, %3", "{0} = __byte_perm({1}, {2}, {3})"),
    (r"ld\.shared\.u16 %0, \[%1\]", "{0} = *(const unsigned short*)sim::shared_pointer({1})"),
    (
        r"ld\.shared\.v2\.f32 \{%0, %1\}, \[%2\]",
        "{{ float2 v_ = *(const float2*)sim::shared_pointer({2}); {0} = v_.x; {1} = v_.y; }}",
    ),
    (
        r"ld\.shared\.v2\.u32 \{%0, %1\}, \[%2\]",
        "{{ uint2 v_ = *(const uint2*)sim::shared_pointer({2}); {0} = v_.x; {1} = v_.y; }}",
    ),
    (
        r"ld\.shared\.v4\.u32 \{%0, %1, %2, %3\}, \[%4\]",
        "{{ uint4 v_ = *(const uint4*)sim::shared_pointer({4}); {0} = v_.x; {1} = v_.y; {2} = v_.z; {3} = v_.w; }}",
    ),
    (r"st\.shared\.v2\.u32 \[%0\], \{%1, %2\}", "*(uint2*)sim::shared_pointer({0}) = uint2{{{1}, {2}}}"),
    # Predicated and vector accesses of TileLang's copy templates; the value keeps its old content where not loaded.
    (
        r"setp\.ne\.b32 p, %2, 0; mov\.b32 %0, %3; @p ld\.global\S*\.u32 %0, \[%1\]",
        "if ({2}) {0} = *(const unsigned*)({1})",
    ),
    (
        r"setp\.ne\.b32 p, %3, 0; mov\.b32 .*; @p ld\.global\S*\.v2\.u32 \{%0, %1\}, \[%2\]",
        "if ({3}) {{ uint2 v_ = *(const uint2*)({2}); {0} = v_.x; {1} = v_.y; }}",
    ),
    (
        r"setp\.ne\.b32 p, %5, 0; mov\.b32 .*; @p ld\.global\S*\.v4\.u32 \{%0, %1, %2, %3\}, \[%4\]",
        "if ({5}) {{ uint4 v_ = *(const uint4*)({4}); {0} = v_.x; {1} = v_.y; {2} = v_.z; {3} = v_.w; }}",
    ),
    (r"setp\.ne\.b32 p, %2, 0; @p st\.global\S*\.u32 \[%0\], %1", "if ({2}) *(unsigned*)({0}) = {1}"),
    (
        r"setp\.ne\.b32 p, %3, 0; @p st\.global\S*\.v2\.u32 \[%0\], \{%1, %2\}",
        "if ({3}) *(uint2*)({0}) = uint2{{{1}, {2}}}",
    ),
    (
        r"setp\.ne\.b32 p, %5, 0; @p st\.global\S*\.v4\.u32 \[%0\], \{%1, %2, %3, %4\}",
        "if ({5}) *(uint4*)({0}) = uint4{{{1}, {2}, {3}, {4}}}",
    ),
)
_COMPILED = tuple((re.compile(pattern), form) for pattern, form in _FORMS)


def translate(source: str) -> str:
    """The source with every asm statement replaced by C++."""
    return _replace_calls(source, _ASM, _statement)


def _statement(text: str) -> str:
    template, operands = _parse(text)
    if re.search(r"%laneid", template):
        return f"{operands[0]} = sim::lane()"
    if match := _WGMMA.fullmatch(template):
        *sums, a0, a1, a2, a3, b, add = operands
        pointers = ", ".join(f"&{one}" for one in sums)
        return (
            f"{{ float* d_[] = {{{pointers}}}; sim::wgmma<{match['n']}>(d_, {{{a0}, {a1}, {a2}, {a3}}}, {b}, {add}); }}"
        )
    for pattern, form in _COMPILED:
        match = pattern.fullmatch(template)
        if match:
            return form.format(*operands, **match.groupdict())
    return 'sim::fail("unknown PTX: %s", "{}")'.format(template.replace("\\", "").replace('"', "'"))


def _parse(text: str) -> tuple[str, list[str]]:
    """Instruction text with single spaces, and the operand expressions, of what stands between asm's parentheses."""
    text = re.sub(r"(?m)^\s*#\s*if.*\n(?P<yes>[^#]*)#\s*else.*\n(?P<no>[^#]*)#\s*endif.*$", r"\g<no>", text)
    end = _template_end(text)
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text[:end]))
    template = template.replace("\\n", " ").replace("\\t", " ").replace("{{", "{").replace("}}", "}")
    template = re.sub(r"\s+", " ", template).strip()
    block = re.fullmatch(r"\{(?![^{}]*%0[^;]*\}\s*,)(.*)\}", template)  # a { ... } scope with its own registers
    template = block[1] if block else template
    template = re.sub(r"\.reg [^;]*;", " ", template)
    template = re.sub(r"\s+", " ", template).strip().rstrip("; ")
    operands, i = [], end
    while match := _OPERAND.search(text, i):
        stop = _closing(text, match.end())
        operands.append(text[match.end() : stop - 1].strip())
        i = stop
    return template, [f"({operand})" for operand in operands]


def _template_end(text: str) -> int:
    """Index of the first colon outside string literals, or the end."""
    quoted = False
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif c == ":" and not quoted:
            return i
    return len(text)


def _replace_calls(source: str, opening: re.Pattern[str], replacement: Callable[[str], str]) -> str:
    parts, i = [], 0
    while match := opening.search(source, i):
        end = _closing(source, match.end())
        parts += [source[i : match.start()], replacement(source[match.end() : end - 1])]
        # Later lines keep their numbers.
        parts.append("\n" * source.count("\n", match.start(), end))
        i = end
    return "".join(parts) + source[i:]


def _closing(text: str, i: int) -> int:
    """Index after the parenthesis that closes the one opened before ``i``; string literals do not count."""
    depth, quoted = 1, False
    while depth:
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        elif c == '"':
            quoted = True
        else:
            depth += (c == "(") - (c == ")")
        i += 1
    return i
