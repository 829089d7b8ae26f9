"""From a checkpoint and a text to a recording: one process, workers, Ray or torchrun."""
