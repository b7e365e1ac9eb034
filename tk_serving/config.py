"""Every setting, in one table: environment variables and the knobs of the public interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """Settings read from ``TK_SERVING_*`` when the package is imported; :func:`reload` reads them again."""

    model_config = SettingsConfigDict(env_prefix="TK_SERVING_", extra="ignore", validate_assignment=True)

    kernel_backend: Literal["auto", "tilekernels"] = Field(
        default="auto", description="set by the engines' --kernel-backend flag; carries the choice to worker processes"
    )
    disable: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(), description="comma-separated operators or sites that keep the engine's own code"
    )
    cpu: Literal["reference", "simulator"] = Field(
        default="reference", description="how CPU tensors run: torch reference, or the generated CUDA in the simulator"
    )
    check: bool = Field(
        default=False, description="also verify tensor contents (indices, scales) on the host; synchronises"
    )
    jit: Literal["allow", "warn", "forbid"] = Field(
        default="allow", description="what happens when a kernel was not built ahead of time"
    )
    compare: bool = Field(
        default=False,
        description="run the engine's own function beside every replaced one and report differences; for debugging",
    )
    kernel_cache: str = Field(default="", description="folder of kernels built ahead of time by `tk-serving build`")
    local_cache: str = Field(
        default="", description="folder of kernels compiled here; empty: below the user's cache folder"
    )
    log: Literal["", "api"] = Field(
        default="", description="`api`: write shapes and dtypes of every call to stderr before it is launched"
    )
    experts: Literal["w4a8", "upcast", "resident", "stock"] = Field(
        default="stock",
        description="FP4 experts with FP8 activations on Hopper: `w4a8` multiplies FP4 weights as they are, `upcast` "
        "makes them FP8 layer by layer, `resident` keeps FP8 weights beside them, `stock` leaves all to the engine",
    )
    experts_min_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens of a step from which on `upcast` and `resident` run in FP8; 0: as measured",
    )
    nvtx: bool = Field(default=False, description="an NVTX range around every call, for Nsight Systems")
    pdl: bool = Field(
        default=True,
        description="programmatic dependent launch: a kernel starts before the one before it has ended, and waits for "
        "that itself; `0` builds and runs kernels without it",
    )
    print_kernel_source: bool = Field(
        default=False, description="print the generated CUDA of every kernel that is built"
    )
    simulator_cache: str = Field(
        default="", description="folder of simulated kernels; empty: a per-user temporary folder"
    )
    state_dir: str = Field(
        default="", description="folder in which the processes of a server share their call counters"
    )

    @field_validator("disable", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return frozenset(part.strip() for part in value.split(",") if part.strip())
        return value


def _read() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        raise ValueError("; ".join(map(_wrong, error.errors()))) from None


def _wrong(error: Any) -> str:
    literal = error["type"] == "literal_error"
    expected = error["ctx"]["expected"] if literal else error["msg"].removeprefix("Input should be ").split(",")[0]
    return f"TK_SERVING_{str(error['loc'][0]).upper()}: expected {expected}, got {error['input']!r}"


settings = _read()


def reload() -> Settings:
    """Read the environment again into the one settings object."""
    for name, value in _read():
        setattr(settings, name, value)
    return settings


_num_sms: int | None = None
_token_alignment = 128


def get_device_num_sms() -> int:
    """Streaming multiprocessors of the current CUDA device; 132 (H100, H200, H800) where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return 132


def num_sms_bound() -> int | None:
    """The bound that :func:`set_num_sms` has set."""
    return _num_sms


def get_num_sms() -> int:
    """Bound on the blocks of persistent kernels; the whole device by default."""
    return get_device_num_sms() if _num_sms is None else _num_sms


def set_num_sms(n: int) -> None:
    """Bound the blocks of persistent kernels. No result depends on it.

    Raises:
        ValueError: n is not in 1 ... the number of multiprocessors of the device.
    """
    global _num_sms
    limit = get_device_num_sms()
    if not 1 <= n <= limit:
        raise ValueError(f"set_num_sms: n: expected 1 to {limit}, got {n}")
    _num_sms = n


def get_pdl() -> bool:
    """Whether kernels use programmatic dependent launch."""
    return settings.pdl


def set_pdl(enabled: bool) -> None:
    """Switch programmatic dependent launch on or off for the calls that follow. No result depends on it.

    Raises:
        TypeError: enabled is no bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"set_pdl: enabled: expected a bool, got {type(enabled).__name__}")
    settings.pdl = enabled


def get_token_alignment() -> int:
    """Row alignment of an expert's region in expert-major buffers."""
    return _token_alignment


def set_token_alignment(alignment: int) -> None:
    """Set the row alignment of an expert's region.

    Raises:
        ValueError: alignment is below 1.
    """
    global _token_alignment
    if alignment < 1:
        raise ValueError(f"set_token_alignment: alignment: expected at least 1, got {alignment}")
    _token_alignment = alignment
