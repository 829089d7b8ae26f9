"""What an ablated head's output becomes. No torch."""

MODES = ("zero", "mean", "resample")
