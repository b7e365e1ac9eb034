"""From a TileLang function to the C++ that the simulator builds: device text, launch table, host text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tk_serving.compile.targets import PASS_CONFIGS, target
from tk_serving.simulator import ptx, toolchain
from tk_serving.simulator.errors import SimulationError

ARCH = "sm_90a"

_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^;{]*)\);')
_MMA_TF32 = re.compile(
    r"tl::mma_sync<(tl::DataType::kTensorFloat32, ){2}tl::DataType::kFloat32, 16, 8, 8, false, true>"
)
_AXES = {
    f"{kind}Idx.{axis}": str(3 * k + a) for k, kind in enumerate(("block", "thread")) for a, axis in enumerate("xyz")
}


@dataclass(frozen=True)
class Generated:
    """What TileLang generates for one function."""

    entry: str  # of the host code
    cuda: str
    host: str
    launch_tags: dict[str, str]  # by kernel

    def edited(self, edit: Callable[[str], str]) -> Generated:
        """With a changed CUDA text."""
        cuda = edit(self.cuda)
        if cuda == self.cuda:
            raise ValueError(f"{self.entry}: the edit changes nothing")
        return replace(self, cuda=cuda)


def generate(prim_func: Any, arch: str = ARCH) -> Generated:
    """Lower a function, or take the texts from the cache; needs neither nvcc nor a GPU."""
    key = toolchain.digest(prim_func.script(show_meta=True), arch, repr(PASS_CONFIGS), toolchain.tilelang_version())
    file = toolchain.cache() / "lowered" / f"{key}.json"
    if file.is_file():
        return Generated(**json.loads(file.read_text()))
    generated = _lower(prim_func, arch)
    toolchain.write(file, json.dumps(asdict(generated)))
    return generated


def _lower(prim_func: Any, arch: str) -> Generated:
    import tilelang
    from tilelang import tvm

    goal = tvm.target.Target(target(arch))
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        lowered = tilelang.lower(prim_func, target=goal, enable_host_codegen=True, enable_device_compile=False)
    tags = {}
    for function in lowered.device_mod.functions.values():
        parameters = function.attrs.get("tirx.kernel_launch_params") if function.attrs else None
        if parameters is not None:
            tags[str(function.attrs["global_symbol"])] = "".join(_tag(str(p)) for p in parameters)
    host = lowered.host_mod.inspect_source()
    return Generated(str(prim_func.attrs["global_symbol"]), lowered.kernel_source, host, tags)


def _tag(parameter: str) -> str:
    return _AXES.get(parameter, "s" if "dyn_shared" in parameter else "o")


_UNIT = """#include "device.h"
#line 1 "{name}.cu"
{device}
#line 1 "table"
// The linker names the ends of the section; the anchor makes sure that it exists.
__attribute__((section("sim_shared"), used)) static char sim_shared_anchor[16] = {{1}};
extern "C" __attribute__((visibility("hidden"))) char __start_sim_shared[], __stop_sim_shared[];
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];
extern "C" __attribute__((visibility("default"))) const void* const sim_image = __ehdr_start;
{bodies}
static const sim::Kernel sim_kernels[] = {{
{rows}
  {{}}}};
#include "glue.h"
"""
_BODY = """SIM_UNCHECKED static void {kernel}_body(const void* p) {{
  const TVMFFIAny* a = (const TVMFFIAny*)p;
  {kernel}({arguments});
}}"""
_ROW = """  {{"{kernel}", {kernel}_body, "{tags}", {count},
   __start_sim_shared, __stop_sim_shared, __ehdr_start, _end}},"""


def device_unit(name: str, generated: Generated) -> str:
    """The translation unit of the device code. Line numbers of the CUDA text are kept, for messages."""
    kernels = {match[1]: match[2] for match in _SIGNATURE.finditer(generated.cuda)}
    if not kernels:
        raise SimulationError(f"{name}: no kernel in the generated CUDA")
    bodies, rows = [], []
    for kernel, parameters in kernels.items():
        if kernel not in generated.launch_tags:
            raise SimulationError(f"{name}: TileLang recorded no launch parameters for {kernel}")
        arguments = [_argument(i, text) for i, text in enumerate(_split(parameters))]
        bodies.append(_BODY.format(kernel=kernel, arguments=", ".join(arguments)))
        rows.append(_ROW.format(kernel=kernel, tags=generated.launch_tags[kernel], count=len(arguments)))
    device = _device_text(generated.cuda)
    return _UNIT.format(name=name, device=device, bodies="\n".join(bodies), rows="\n".join(rows))


def host_unit(generated: Generated) -> str:
    return '#include "host.h"\n' + generated.host


def _device_text(cuda: str) -> str:
    text = _MMA_TF32.sub("sim::mma_tf32_16x8x8", ptx.translate(cuda))
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w: ]+?) (\w+)\[\];", r"\1* \2 = (\1*)sim::dynamic_shared();", text
    )
    text = re.sub(r"(?m)^(\s*)__shared__ ", r'\1static __attribute__((section("sim_shared"))) ', text)
    # Local arrays start as garbage.
    return re.sub(r"(?m)^(\s+(?!static|const|return)[\w:<>, ]+ (\w+)\[\d+\];)$", r"\1 sim::poison(\2);", text)


def _split(parameters: str) -> list[str]:
    return [p.strip() for p in re.sub(r"__grid_constant__|__restrict__", "", parameters).split(",") if p.strip()]


def _argument(index: int, parameter: str) -> str:
    """The expression of one kernel argument, decoded from the packed call."""
    kind = re.sub(r"\w+$", "", parameter).strip()
    field = "v_ptr" if "*" in kind else "v_float64" if kind in ("float", "double") else "v_int64"
    return f"({kind})a[{index}].{field}"
