"""Attention kernels over the paged KV pool, and their plain-torch references.

Each module imports torch (and triton) only. This file stays free of imports: it is
installed as `radixkv.kernels`, and importing the package must not need a GPU.
"""
