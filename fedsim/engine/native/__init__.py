"""Compiled kernels: C that is built on the machine that runs it, and called without Python's
lock."""
