"""Where the processes of a test meet: a store that the test itself holds, as torchrun's agent does.

A port that is free when it is looked for may be another process's when it is used.
"""

from __future__ import annotations

from torch.distributed import TCPStore


def meeting_place() -> TCPStore:
    """To be kept for as long as they run."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def of_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment in which a process is one of `size` that meet at a port."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**where, "WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}.items()}
