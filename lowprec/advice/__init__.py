"""What a recipe takes of a machine and costs in quality: see answer.py."""
