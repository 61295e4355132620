"""Methods that change how layers multiply: FP8, 8-bit generation, 2:4 sparsity."""
