"""Documents and prompts to experiment on, and the scores over them."""
