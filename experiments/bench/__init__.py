"""Questions that were asked once, beside the records that answer them. bench.py runs them too."""
