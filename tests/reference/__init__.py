"""Independent PyTorch references: the model and the samplers, written plainly and sharing no code with the engine."""

import torch

torch.set_num_threads(1)  # small tensors on a busy machine: more threads only wait for each other
