"""What all commands share: the console and the options that name a model."""
