"""Tasks with scored tokens: generators, task files, and the training of small models on them."""
