"""All ranks of a vLLM engine on one GPU, each in a worker process of its own: shows whether results are right, not how
fast they come.

NCCL refuses two ranks on one device of a host, but knows a host by a name that can be set. Ranks with hosts of their
own exchange data through sockets, as between machines: with NCCL's kernels, and inside CUDA graphs as well. The driver
runs the processes in turn, so that a collective takes milliseconds.
"""

from __future__ import annotations

import os

from vllm.v1.worker import gpu_worker

ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # these look for peers by device
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


class Worker(gpu_worker.Worker):
    """vLLM's worker, on the first GPU whatever its rank."""

    def init_device(self) -> None:
        os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"rank-{self.rank}")
        self.local_rank = 0
        super().init_device()
