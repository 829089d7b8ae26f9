"""Training matched pairs of a looped model and its Baseline, and their budgets."""
