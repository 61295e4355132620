"""The Watch: what rounding does to a training run in any loop, and a comparison of two checkpoints."""
