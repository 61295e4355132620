"""One optimiser step, written for each kind of machine, with the same bits."""
