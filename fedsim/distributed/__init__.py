"""One run over several processes (ranks): rank 0 runs the program, and all of them train and
evaluate its clients."""
