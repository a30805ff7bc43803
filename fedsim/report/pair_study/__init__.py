"""PNCS's Table I from the traces of `selector=pair_study`.

`analysis` computes the table; `claims` judges what the paper says about it.
"""
