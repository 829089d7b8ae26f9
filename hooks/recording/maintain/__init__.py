"""What is done to recordings that exist: validate, repair, merge, pack, pull."""
