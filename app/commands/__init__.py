"""One file is one command."""
