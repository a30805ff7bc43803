"""One run over several processes (ranks).

Rank 0 runs the program, and all ranks train and evaluate its clients.
"""
