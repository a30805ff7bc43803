"""Numbers that are the same to the last bit on every processor.

BLAS, torch's sums, and exp, log and power of NumPy and torch round otherwise with each instruction set. What is here is
made of operations that IEEE 754 rounds in one way alone (+, -, *, / and roots of single elements, rounding to whole
numbers), in an order that is written down; products of matrices are of whole numbers so small that no order rounds.
"""
