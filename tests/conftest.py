"""One thread for all tests: they are small, and several may run side by side. Puts this folder on the path as well."""

import torch

torch.set_num_threads(1)
