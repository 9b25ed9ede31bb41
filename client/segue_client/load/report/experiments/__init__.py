"""What is special of each experiment: its table, its curves, and its answer in one sentence."""
