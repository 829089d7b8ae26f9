"""The machinery that reads a model of transformers or of the user's own; it holds no model family."""
