"""What the seven tasks share: building kernels, running them without a GPU, checking, timing."""
