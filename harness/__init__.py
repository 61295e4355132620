"""What holds a run, whatever it trains: flags, its folder, checkpoints, several processes."""
