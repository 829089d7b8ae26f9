"""Reading a recording, finished or not."""
