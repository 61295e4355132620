"""What a recipe costs on your own net: tried in little (trial.py), or foreseen from one run (foresee.py)."""
