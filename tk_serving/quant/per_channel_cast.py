"""Cast with one scale for each column of a block of rows, for products that sum over tokens."""

from torch import Tensor

from tk_serving.compare import BITWISE
from tk_serving.expect import Expect
from tk_serving.operator import Plan, Quantized, operator
from tk_serving.quant import channels, samples
from tk_serving.workloads import MODELS, Maker, Workload

_expect = Expect("per_channel_cast")


def _plan(
    x: Tensor | Quantized,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    use_packed_ue8m0: bool,
) -> Plan:
    tokens, hidden = channels.check(_expect, x, fmt, num_per_tokens, num_per_channels)
    if use_packed_ue8m0:
        _expect.that(round_sf, "use_packed_ue8m0", "round_sf as well", False)
    return channels.plan(
        x, tokens, hidden, num_per_tokens, round_sf, num_per_channels=num_per_channels, packed=use_packed_ue8m0
    )


def _inputs(
    make: Maker,
    *,
    tokens: int,
    hidden: int,
    npt: int,
    source: str = "bfloat16",
    npc: int | None = None,
    round_sf: bool = False,
    packed: bool = False,
    values: str = "normal",
    pad: int = 0,
) -> tuple:
    x = samples.cast_input(make, tokens, hidden, source, (1, npc) if npc else None, values=values, pad=pad)
    return x, "e4m3", npt, round_sf, npc, packed


@operator(
    spec="operators.md P10, A7",
    phase="fine-tuning",
    plan=_plan,
    inputs=_inputs,
    equality=BITWISE,
    cases=[
        {"tokens": 0, "hidden": 64, "npt": 128},
        {"tokens": 135, "hidden": 144, "npt": 128, "values": "special", "pad": 8},
        {"tokens": 5, "hidden": 48, "npt": 128, "source": "float32", "round_sf": True, "values": "special"},
        {"tokens": 165, "hidden": 144, "npt": 32, "round_sf": True, "packed": True},
        {"tokens": 40, "hidden": 176, "npt": 32, "source": "e4m3", "npc": 128},
    ],
    workloads=[
        Workload(f"{m.name}-fine-tuning", {"hidden": m.hidden_size, "npt": m.quant_group}, (4096, 8192), m.key)
        for m in MODELS
    ],
    peers=["tile_kernels"],
)
def per_channel_cast(
    x: Tensor | Quantized,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    *,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> Quantized:
    """Quantise columns to FP8 with one scale for each block of rows.

    Args:
        x: bfloat16 or float32 [T, H], row-strided, H a multiple of 16; or a pair of float8_e4m3fn [T, H] and float32
            [T, ceil(H / npc)], which is dequantised first.
        fmt: ``e4m3``.
        num_per_tokens: rows of a block: 32 or 128. The last block may be short.
        round_sf: scales are powers of two.
        num_per_channels: npc, 32 or 128; exactly if x is a pair.
        use_packed_ue8m0: exponents of four blocks of rows in an int32; needs ``round_sf``.

    Returns:
        (data, sf): float8_e4m3fn [T, H]; float32 [M, H], M = ceil(T / num_per_tokens), or int32 [ceil(M / 4), H] with
        the first block in the low byte.

    Raises:
        TypeError: wrong dtype or kind of argument.
        ValueError: wrong shape, block size or combination of arguments.
    """
    return channels.cast(channels.values_of(x, num_per_channels), num_per_tokens, round_sf, use_packed_ue8m0)
