"""The optimisers, what builds them, and what keeps an average of their weights."""
