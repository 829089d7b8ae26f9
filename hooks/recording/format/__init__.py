"""The recording format: datasets and attributes, chunks, and the gate that checks a file before its data is read."""
