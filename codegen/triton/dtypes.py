"""Names of dtypes in Triton, and reading tensors in a narrower one than they are computed with."""

from __future__ import annotations

import torch

DTYPES = {"float32": "tl.float32", "float16": "tl.float16", "bfloat16": "tl.bfloat16"}
"""Dtypes of products, as they are written in kernels."""

FLOAT8 = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
"""Dtypes that are read, and widened for products; by Triton's short names."""

PRODUCTS = (*DTYPES, *FLOAT8, "int8", "uint8")
"""Dtypes of tensors whose elements are multiplied, widened where they are narrower than the products."""


def allows_tf32() -> bool:
    """Whether torch multiplies float32 as tf32 on NVIDIA's devices, by any of its settings: `allow_tf32` raises where
    one of the newer ones was used."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def cast(stored: str, dtype: str) -> str:
    """Suffix of a load that converts its value to a dtype of products; by way of float16 from float8, which is exact on
    every device, infinities and NaN included, and of float32 from integers."""
    if stored == dtype:
        return ""
    by_way = ".to(tl.float16)" if stored in FLOAT8 and dtype != "float16" else ""
    by_way = ".to(tl.float32)" if "int" in stored and dtype != "float32" else by_way
    return f"{by_way}.to({DTYPES[dtype]})"
