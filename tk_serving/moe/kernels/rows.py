"""How rows are cut into parts, so that a single token already keeps several multiprocessors busy."""


def threads_for(units: int) -> int:
    """Threads of a block, one for each unit of a part: full warps, about 128, such that the parts come out even."""
    parts = (units + 127) // 128
    return ((units + parts - 1) // parts + 31) // 32 * 32


def resident_blocks(threads: int, wanted_threads: int) -> int:
    """Blocks on a multiprocessor that registers must leave room for."""
    return min(32, wanted_threads // threads)
