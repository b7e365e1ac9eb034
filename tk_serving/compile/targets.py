"""The architectures that kernels are built for, and the compiler settings that every kernel shares."""

from __future__ import annotations

ARCHS = ("sm_90a", "sm_100a")

PASS_CONFIGS: dict[str, object] = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    # Contraction of a*b+c would change last bits that the specification fixes; kernels ask for fma by name.
    "tl.device_compile_flags": ["--fmad=false"],
}


def arch_of(capability: tuple[int, int]) -> str:
    """The build target for a compute capability: ``sm_90a`` for Hopper, ``sm_100a`` for the Blackwell line."""
    return "sm_90a" if capability[0] == 9 else "sm_100a"


def target(arch: str) -> dict[str, str]:
    """TileLang target. Always explicit: ``auto`` needs a GPU and would change the cache key."""
    return {"kind": "cuda", "arch": arch}
