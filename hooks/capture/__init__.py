"""Reading site values of a forward pass or of a generation, by layer and visit."""
