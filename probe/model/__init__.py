"""`visitlens.load(...)`: a model with its tokenizer in a notebook, and the runs made with it."""
