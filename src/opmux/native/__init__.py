"""The compiled CPU library: ``library`` says whether it is there and why not, ``kernels`` calls into it.

Importing this package loads nothing; the first question or the first call does.
"""

from __future__ import annotations

from .loader import DTYPE_CODE, kernels, library

__all__ = ["DTYPE_CODE", "kernels", "library"]
