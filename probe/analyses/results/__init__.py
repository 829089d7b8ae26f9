"""Results of analyses, kept beside a recording and read back."""
