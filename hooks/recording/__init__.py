"""A recording on disk: its format, its store, and how it is written, read and maintained."""
