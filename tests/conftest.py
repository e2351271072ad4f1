"""One thread for all tests: they are small, and several of them may run side by side. Also puts this folder on the path."""

import torch

torch.set_num_threads(1)
