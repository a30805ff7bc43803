"""Compiled kernels: C code that fedsim compiles on the machine where it runs.

Calls do not hold Python's global interpreter lock.
"""
