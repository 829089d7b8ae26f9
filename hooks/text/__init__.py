"""From a text file to documents, token ids and packed contexts."""
