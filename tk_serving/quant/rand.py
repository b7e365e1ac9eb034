"""Random bits of stochastic rounding: a counter-based generator that kernels and the references share.

The bits of element i are a hash of i and of the state, a 64-bit number on the device that every call increases. A
captured CUDA graph increases it as well, so each replay rounds differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)

_seed = 0
_states: dict[torch.device, Tensor] = {}


def set_seed(seed: int) -> None:
    """Start the random bits of every device anew; also those of graphs captured before. The first seed is 0."""
    global _seed
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"set_seed: seed: expected int, got {type(seed).__name__}")
    _seed = seed
    for state in _states.values():
        state.fill_(_start(seed))


def next_state(device: torch.device, seed: int | None = None) -> Tensor:
    """int64 [1]: the state of one call on ``device``; of its own where the call has a seed."""
    if seed is not None:
        return torch.full((1,), _start(seed), dtype=torch.int64, device=device)
    state = _states.get(device)
    if state is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("rand: expected an uncaptured call on this device first, got one in a CUDA graph")
        state = _states[device] = torch.full((1,), _start(_seed), dtype=torch.int64, device=device)
    return state.add_(1)


def random_bits(state: Tensor, count: int) -> Tensor:
    """int64 [count] numbers below 2^32, one for each element."""
    element = torch.arange(count, device=state.device)
    mixed = _mix((element ^ state) & 0xFFFFFFFF)
    return _mix((mixed + (state >> 32 ^ (element >> 32) * GOLDEN)) & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers in which each bit depends on every bit."""
    x = (x ^ x >> 16) * MULTIPLIERS[0] & 0xFFFFFFFF
    x = (x ^ x >> 15) * MULTIPLIERS[1] & 0xFFFFFFFF
    return x ^ x >> 16


def _start(seed: int) -> int:
    """Far apart for neighbouring seeds (splitmix64), as a signed 64-bit number."""
    z = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    z ^= z >> 31
    return z - (z >> 63 << 64)
