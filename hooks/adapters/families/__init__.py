"""One file is one model family: how its layers, visits and sites are found."""
