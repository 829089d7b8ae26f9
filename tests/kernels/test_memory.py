"""What glibc does with freed memory: measured in a process of its own, since it holds for all of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from visitlens.kernels import memory

CODE = r"""
import ctypes, os, re, threading
from pathlib import Path
from visitlens.kernels.memory import give_back_freed_memory, keep_freed_memory, share_arenas

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

share_arenas()
keep_freed_memory()
gate = threading.Barrier(8)

def answer():
    gate.wait()
    blocks = [bytes(20_000) for _ in range(50)]
    gate.wait()

threads = [threading.Thread(target=answer) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
read, write = os.pipe()
libc = ctypes.CDLL(None)
libc.fdopen.restype, libc.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
stream = libc.fdopen(write, b"w")
libc.malloc_info(0, stream), libc.fclose(stream)
arenas = len(re.findall(rb"<heap ", os.read(read, 1 << 16)))
blocks = [bytes(100_000) for _ in range(1000)]
last, full = bytes(100_000), resident()
blocks.clear()
kept = resident()
give_back_freed_memory()
print(arenas, full - kept, kept - resident())
"""


@pytest.mark.skipif(memory._glibc() is None, reason="glibc alone has these settings")
def test_freed_memory_is_kept_in_two_arenas_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    arenas, kept, given = map(float, done.stdout.split())
    assert arenas <= 2, "of nine threads"
    assert kept < 10 and given > 50, "of 100 MB"
