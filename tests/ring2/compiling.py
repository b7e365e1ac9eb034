"""Compiling the generated CUDA of many launches at once, and what the compiler says about each.

The headers cost nvcc more than a kernel does, so the kernels of one operator are compiled as one file. Results are
kept by content beside the simulator's builds.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence

from tk_serving.compile import kernels
from tk_serving.compile.targets import PASS_CONFIGS
from tk_serving.environment import nvcc, nvcc_version
from tk_serving.operator import Operator
from tk_serving.plan import Launch
from tk_serving.simulator import source, toolchain
from tk_serving.workloads import Maker

_FUNCTION = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\([^;{]*\);')
_EXTERN_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?[\w: ]+? (\w+)\[\];")
_ATOMIC = re.compile(r"\b(?:tl::)?[Aa]tomic_?[A-Za-z]\w*\s*[(<\"]")
_INCLUDE = re.compile(r"(?m)^\s*#\s*include.*$")
_DIRECTIVE = re.compile(r"(?m)^\s*#\s*(?!pragma unroll).*$")
_DECLARATION = re.compile(
    r"(?:(?:alignas|__align__)\(\d+\) |extern |__shared__ |signed |unsigned )*[\w:<>*]+ \w+(?:\[\d*\])?"
    r"(?: = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ \d+\)\))?;"
)
_WAIT = "cudaGridDependencySynchronize();"
_TRIGGER = "cudaTriggerProgrammaticLaunchCompletion();"
_PTXAS = re.compile(
    r"Function properties for (\w+)\s*\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def case_launches(op: Operator) -> list[Launch]:
    """The distinct launches of the small cases."""
    found: dict[Launch, None] = {}
    for case in op.cases:
        found |= dict.fromkeys(op.plan(*op.bind(*op.inputs(Maker("cpu"), **case))).launches)
    return list(found)


def production_launches(op: Operator) -> list[Launch]:
    """The distinct launches of the real models' shapes."""
    return list(op.shape_classes())


def measure(launches: Sequence[Launch], arch: str) -> dict[str, dict]:
    """For each launch: atomics that the builder wrote and that the CUDA has, what comes before the wait for earlier
    launches and where the trigger for the next belongs, bytes of stack frame and of spills.

    Raises:
        AssertionError: a kernel does not compile; the message is the compiler's.
    """
    texts, found = {}, {}
    for launch in launches:
        prim_func = kernels.built(launch)
        texts[str(launch)] = cuda = source.generate(prim_func, arch).cuda
        counts = {"written": count_atomics(prim_func.script()), "generated": count_atomics(cuda)}
        early = {"before_wait": before_wait(cuda), "triggers": misplaced_triggers(cuda, launch.trigger_last)}
        found[str(launch)] = {**counts, **(early if launch.pdl else {key: [] for key in early})}
    resources = _compile(texts, arch)
    return {name: found[name] | resources[name] for name in texts}


def count_atomics(text: str) -> int:
    """Atomic operations that a TileLang function (as script) or a CUDA text spells out."""
    return len(_ATOMIC.findall(text))


def before_wait(cuda: str) -> list[str]:
    """Statements of the kernels that stand before the wait and are no declarations."""
    lines = [line.strip() for body in _bodies(cuda) for line in body.split(_WAIT)[0].splitlines() if line.strip()]
    return [line for line in lines if not _DECLARATION.fullmatch(line)]


def misplaced_triggers(cuda: str, last: bool) -> list[str]:
    """What stands where the one trigger of a kernel belongs: right behind its wait, or at its end (``last``)."""
    places = [body[: body.rindex("}")] if last else body.partition(_WAIT)[2] for body in _bodies(cuda)]
    lines = [[line.strip() for line in place.splitlines() if line.strip()] for place in places]
    found = [one[-1 if last else 0] if one else "" for one in lines]
    more = [f"{n} triggers" for body in _bodies(cuda) if (n := body.count(_TRIGGER)) != 1]
    return more + [line for line in found if line != _TRIGGER]


def _bodies(cuda: str) -> list[str]:
    """The kernels of a text, each from behind its opening brace."""
    return [part[part.index("{") + 1 :] for part in cuda.split('extern "C" __global__')[1:] if "{" in part]


def _compile(texts: dict[str, str], arch: str) -> dict[str, dict]:
    """Stack frame and spills of every text, by ptxas."""
    merged, symbols = _merge(texts)
    key = toolchain.digest(merged, arch, repr(PASS_CONFIGS), nvcc_version(), toolchain.tilelang_version())
    file = toolchain.cache() / "ptxas" / f"{key}.json"
    if not file.is_file():
        toolchain.write(file, json.dumps(_ptxas(merged, arch)))
    reported = json.loads(file.read_text())
    return {name: _sum([reported[s] for s in symbols[name]]) for name in texts}


def _sum(parts: list[dict]) -> dict:
    return {key: sum(part[key] for part in parts) for key in parts[0]}


def _merge(texts: dict[str, str]) -> tuple[str, dict[str, list[str]]]:
    """One file of several kernels, with names of their own, and the names of each."""
    includes: dict[str, None] = {}
    bodies, symbols = [], {}
    for i, (name, text) in enumerate(texts.items()):
        head = text[: _FUNCTION.search(text).start()]
        includes |= dict.fromkeys(line.strip() for line in _INCLUDE.findall(head))
        body = text[len(head) :]
        imported = _imported(head)
        names = dict.fromkeys(_FUNCTION.findall(body))
        for local in (*names, *dict.fromkeys(_EXTERN_SHARED.findall(body))):
            body = re.sub(rf"\b{local}\b", f"{local}_{i}", body)
        symbols[name] = [f"{local}_{i}" for local in names]
        label = name.replace('"', "'").replace("\\", "/")
        if imported:  # device functions of its own: each kernel's may have the same names
            body = f"namespace imported_{i} {{\n{imported}\n{body}\n}}"
        bodies.append(f'#line 1 "{label}"\n{body}')
    return "\n".join(["#define ENABLE_BF16", *includes, *bodies]), symbols


def _imported(head: str) -> str:
    """What a kernel imports with ``T.import_source``: the text before it, without directives but pragmas."""
    return _DIRECTIVE.sub("", head).strip()


def _ptxas(cuda: str, arch: str) -> dict[str, dict]:
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernels.cu")
        source.write_text(cuda)
        command = [nvcc(), "--cubin", "-O3", f"-arch={arch}", "-std=c++20", "-w", "-Xptxas", "-v"]
        command += ["-I", TILELANG_TEMPLATE_PATH, "-I", CUTLASS_INCLUDE_DIR, *PASS_CONFIGS["tl.device_compile_flags"]]
        run = subprocess.run([*command, "-o", f"{folder}/kernels.cubin", source], capture_output=True, text=True)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[:4000]
    return {
        name: {"stack": int(stack), "spill": int(stores) + int(loads)}
        for name, stack, stores, loads in _PTXAS.findall(output)
    }


def local_memory_reason(launch: Launch) -> str:
    """Why this kernel may use local memory: ``LOCAL_MEMORY = {"<builder>": "<reason>"}`` in its module."""
    builder = launch.builder
    return getattr(__import__(builder.__module__, fromlist=["*"]), "LOCAL_MEMORY", {}).get(builder.__name__, "")
