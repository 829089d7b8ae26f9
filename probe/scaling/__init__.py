"""Sections 3 to 5 of SMELT as instruments for any table of training runs: scaling law, compute saved, downstream residuals."""
