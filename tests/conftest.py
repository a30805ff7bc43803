"""One thread per test process: the tensors are small, and threads that share cores with others wait for each other."""

import torch

torch.set_num_threads(1)
